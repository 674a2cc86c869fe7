"""An owned engine whose event loop goes away without `aclose`: everybody who waits is told."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest
from support.fake_engine import executor_of, greedy, in_thread, make_engine, num_in_line, until

from asyncengine import AsyncEngine, Engine
from asyncengine.errors import EngineClosed, EngineDead, WrongLoop
from asyncengine.stream import TokenStream

LONG = greedy(400, ignore_eos=True)


def new_loop(kind: str) -> asyncio.AbstractEventLoop:
    if kind == "asyncio":
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = pytest.importorskip("uvloop").new_event_loop()
    return loop


class Caller:
    """A blocking call on a thread of its own: what became of it."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self.outcome: Any = None
        self._work = work
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.outcome = self._work()
        except BaseException as error:
            self.outcome = error

    def ended(self) -> Any:
        self._thread.join(120)
        assert not self._thread.is_alive(), "it waits for ever"
        return self.outcome


def started(loop: asyncio.AbstractEventLoop, **settings: Any) -> AsyncEngine:
    engine = make_engine(**settings)
    loop.run_until_complete(engine.start())
    return engine


@pytest.mark.parametrize("kind", ["asyncio", "uvloop"])
@pytest.mark.parametrize("busy", [False, True], ids=["idle", "in a step"])
def test_closing_the_loop_ends_the_engine(kind: str, busy: bool):
    loop = new_loop(kind)
    engine = started(loop, max_queued_requests=1, max_num_seqs=1, when_full="wait")
    executor = executor_of(engine)
    if busy:
        executor.hold()
    callers = [Caller(lambda: Engine(engine).generate([2, 3], LONG)) for _ in range(3)]
    if busy:  # one runs, one is queued, one waits at the gate
        gate = engine.core.loop.queue_limit
        there = until(lambda: executor.entered.is_set() and gate.waiting == 1 and bool(num_in_line(engine)))
        loop.run_until_complete(there)
    elsewhere = Caller(lambda: asyncio.run(engine.generate([4, 5], LONG)))
    loop.close()
    executor.release()
    assert not engine.alive
    for caller in [*callers, elsewhere]:
        assert isinstance(caller.ended(), (EngineDead, EngineClosed)), caller.ended()
    with pytest.raises(EngineDead, match="its event loop was closed"):
        Engine(engine).generate([2, 3], greedy(2))
    assert Caller(lambda: asyncio.run(engine.aclose())).ended() is None
    assert Caller(lambda: asyncio.run(engine.aclose(drain=True))).ended() is None
    with pytest.raises(EngineDead):
        asyncio.run(engine.generate([2, 3], greedy(2)))


def test_a_loop_that_is_dropped_is_closed():
    loop = asyncio.new_event_loop()
    engine = started(loop)
    caller = Caller(lambda: Engine(engine).generate([2, 3], LONG))
    with pytest.warns(ResourceWarning, match="unclosed event loop"):
        loop.__del__()  # what collecting it does; the engine's own task refers to it
    assert isinstance(caller.ended(), (EngineDead, EngineClosed))


def test_a_task_cancelled_before_it_began_leaves_a_dead_engine():
    async def main() -> AsyncEngine:
        engine = make_engine()
        await engine.start()
        return engine

    engine = asyncio.run(main())  # cancels the engine's task before it has run
    assert not engine.alive
    with pytest.raises((EngineDead, EngineClosed), match="hosted=True"):
        asyncio.run(engine.generate([2, 3], greedy(2)))
    asyncio.run(engine.aclose())


def test_one_engine_in_two_runs_says_what_ended_it():
    async def main() -> tuple[AsyncEngine, TokenStream]:
        engine = make_engine()
        await engine.start()
        stream = engine.stream([2, 3], LONG)
        await anext(stream)
        return engine, stream

    engine, stream = asyncio.run(main())
    with pytest.raises(EngineDead, match=r"asyncio\.run does at its end.*hosted=True"):
        asyncio.run(stream.result())
    with pytest.raises(EngineDead, match=r"asyncio\.run does at its end.*hosted=True"):
        asyncio.run(engine.generate([2, 3], greedy(2)))


def test_another_loop_of_the_same_thread_cannot_wait_for_an_engine_that_stands_still():
    loop = asyncio.new_event_loop()
    engine = started(loop)
    calls = (
        lambda: engine.generate([2, 3], greedy(2)),
        lambda: engine.load_adapter("a", "b"),
        lambda: engine.update_weights("a"),
        lambda: engine.embed(["a"]),
    )
    for call in calls:
        with pytest.raises(WrongLoop, match="another event loop of this thread"):
            asyncio.run(call())  # type: ignore[arg-type]
    assert loop.run_until_complete(engine.generate([2, 3], greedy(2))).token_ids
    loop.run_until_complete(engine.aclose())
    loop.close()


async def test_an_owned_engine_closed_from_another_loop():
    """The engine's own loop runs meanwhile."""
    engine = make_engine()
    await engine.start()
    executor_of(engine).hold(after=3)
    stream = engine.stream([2, 3], LONG)
    await anext(stream)
    closing = asyncio.ensure_future(in_thread(lambda: asyncio.run(engine.aclose())))
    await until(lambda: not engine.alive)
    executor_of(engine).release()
    await closing
    assert (await stream.result()).finish_reason == "abort"
    assert not engine.alive


def test_an_owned_engine_cannot_be_closed_while_its_loop_stands_still():
    loop = asyncio.new_event_loop()
    engine = started(loop)
    with pytest.raises(WrongLoop, match="not running"):
        asyncio.run(engine.aclose())
    loop.run_until_complete(engine.aclose())
    loop.close()


async def test_an_engine_that_ended_leaves_no_watch_on_its_loop(monkeypatch: pytest.MonkeyPatch):
    loop, timers = asyncio.get_running_loop(), list[asyncio.TimerHandle]()
    call_later = loop.call_later

    def noted(*args: Any, **kwargs: Any) -> asyncio.TimerHandle:
        timers.append(call_later(*args, **kwargs))
        return timers[-1]

    monkeypatch.setattr(loop, "call_later", noted)
    async with make_engine():
        assert [timer for timer in timers if not timer.cancelled()]
    assert not [timer for timer in timers if not timer.cancelled() and timer.when() > loop.time()]
