"""One timer that watches every step: what is told, of which step, and when."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from asyncengine.engine import device_thread as module
from asyncengine.engine.device_thread import Watchdog

SOFT, HARD = 10.0, 30.0


class Timer:
    def __init__(self, due: float, call: Callable[..., object], args: tuple[Any, ...]) -> None:
        self.due, self.call, self.args = due, call, args
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


class Loop:
    """The part of an event loop that a timer needs; its time moves when told to."""

    def __init__(self) -> None:
        self.now = 0.0
        self.timers: list[Timer] = []

    def time(self) -> float:
        return self.now

    def call_at(self, due: float, call: Callable[..., object], *args: Any) -> Timer:
        self.timers.append(Timer(due, call, args))
        return self.timers[-1]

    @property
    def armed(self) -> list[Timer]:
        self.timers = sorted((timer for timer in self.timers if not timer.cancelled), key=lambda timer: timer.due)
        return self.timers

    def move(self, to: float) -> None:
        while self.armed and self.timers[0].due <= to:
            timer = self.timers.pop(0)
            self.now = max(self.now, timer.due)
            timer.call(*timer.args)
        self.now = to


class Watched:
    """A watchdog and what it has told, with the time."""

    def __init__(self, loop: Loop) -> None:
        self.loop = loop
        self.told: list[tuple[str, str, float]] = []
        self.dog: Watchdog[str] = Watchdog(SOFT, HARD, self.note("slow"), self.note("over"))

    def note(self, kind: str) -> Callable[[str], None]:
        return lambda name: self.told.append((kind, name, self.loop.now))


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    loop = Loop()
    monkeypatch.setattr(module.asyncio, "get_running_loop", lambda: loop)
    return Watched(loop)


def test_each_limit_is_told_once_and_in_time(watched: Watched) -> None:
    watched.dog.begin("one")
    watched.loop.move(100)
    assert watched.told == [("slow", "one", SOFT), ("over", "one", HARD)]
    assert not watched.loop.armed


def test_a_step_behind_a_slow_one_is_watched_from_its_own_beginning(watched: Watched) -> None:
    """The timer is set for the second limit of the first by then."""
    watched.dog.begin("one")
    watched.loop.move(12)
    watched.dog.end()
    watched.dog.begin("two")
    watched.loop.move(100)
    assert watched.told == [("slow", "one", 10), ("slow", "two", 22), ("over", "two", 42)]


def test_a_step_that_began_while_the_timer_ran_is_neither_told_early_nor_forgotten(watched: Watched) -> None:
    for began in range(0, 25, 5):
        watched.loop.move(began)
        watched.dog.begin(f"at {began}")
        assert len(watched.loop.armed) == 1, "one timer, however many steps there were"
        if began < 20:
            watched.loop.move(began + 4)
            watched.dog.end()
    watched.loop.move(100)
    assert watched.told == [("slow", "at 20", 30), ("over", "at 20", 50)]


def test_nothing_is_told_of_what_has_ended_nor_after_close(watched: Watched) -> None:
    watched.dog.begin("one")
    watched.dog.end()
    watched.loop.move(100)
    assert not watched.loop.armed, "nothing to do: no timer"
    watched.dog.begin("two")
    assert watched.loop.armed
    watched.dog.close()
    assert not watched.loop.armed
    watched.loop.move(200)
    assert not watched.told


def test_who_fails_when_told_does_not_end_the_watch(watched: Watched) -> None:
    def fail(name: str) -> None:
        raise RuntimeError(name)

    dog: Watchdog[str] = Watchdog(SOFT, HARD, fail, watched.note("over"))
    dog.begin("one")
    with pytest.raises(RuntimeError, match="one"):
        watched.loop.move(20)
    watched.loop.move(100)
    assert watched.told == [("over", "one", HARD)]
