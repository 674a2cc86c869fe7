"""Names and contents: claims outlive names, memory keeps its budget, failures change nothing, nobody starves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from typing import Any

import pytest
from support.fake_adapters import FakeLoader, digest_of

from asyncengine.errors import AdapterError, AdapterInUse, AdapterNotFound
from asyncengine.lora.registry import AdapterRegistry


def error_in(outcome: str | Exception) -> Exception | None:
    return outcome if isinstance(outcome, Exception) else None


class Desk:
    """A registry, its loader, and what was told to whom."""

    def __init__(self, *, room: int = 4, **settings: Any) -> None:
        self.loader = FakeLoader()
        self.registry = AdapterRegistry(self.loader, max_bytes=800 * room, **settings)
        self.told: dict[int, Future[Exception | None]] = {}
        self._tickets = 0

    def load(self, *names: str, **settings: Any) -> None:
        for name in names:
            self.registry.load(name, name, **settings).result(120)

    def claim(self, name: str) -> int:
        self._tickets += 1
        self.registry.claim([self._tickets], name)
        return self._tickets

    def start(self, ticket: int) -> Future[Exception | None]:
        self.told[ticket] = Future()
        self.registry.start(ticket, lambda ticket, outcome: self.told[ticket].set_result(error_in(outcome)))
        return self.told[ticket]

    def request(self, name: str) -> int:
        """A claim that was granted."""
        ticket = self.claim(name)
        assert self.start(ticket).result(120) is None
        return ticket

    def holds(self, content: str) -> bool:
        """True if this content is in memory, under whatever name or none."""
        try:
            self.registry.get(digest_of(content))
        except AdapterNotFound:
            return False
        return True

    def in_memory(self) -> list[str]:
        return [info.name for info in self.registry.list() if info.in_memory]


@pytest.fixture
def desk_of() -> Iterator[Callable[..., Desk]]:
    desks: list[Desk] = []

    def make(**settings: Any) -> Desk:
        desks.append(Desk(**settings))
        return desks[-1]

    yield make
    for desk in desks:
        desk.loader.gate.set()
        desk.registry.check()
        desk.registry.close()


Make = Callable[..., Desk]


def test_a_failed_load_changes_nothing(desk_of: Make):
    desk = desk_of(room=2)
    desk.load("a", "b")
    desk.loader.contents.update({"broken": "bad", "bug": "bug"})
    desk.loader.sizes["huge"] = 8000
    before = desk.registry.list()
    for path, field in (("broken", "rank_pattern"), ("bug", "adapter"), ("huge", "adapter_memory")):
        for name in ("a", "new"):
            error = desk.registry.load(name, path).exception(120)
            assert isinstance(error, AdapterError)
            assert error.field == field
    assert desk.registry.list() == before
    desk.request("a")
    desk.request("b")
    error = desk.registry.load("c", "c").exception(120)
    assert isinstance(error, AdapterInUse)
    assert desk.in_memory() == ["a", "b"]
    assert isinstance(desk.registry.load("a", "c").exception(120), AdapterInUse)
    assert [i.digest for i in desk.registry.list()] == [i.digest for i in before]


def test_least_recently_used_goes_first_and_comes_back(desk_of: Make):
    desk = desk_of(room=2)
    desk.load("a", "b")
    desk.registry.cancel(desk.request("a"))
    desk.load("c")
    assert desk.in_memory() == ["a", "c"]
    ticket = desk.request("b")  # read again
    assert desk.registry.get(digest_of("b")).name == "b"
    assert desk.in_memory() == ["b", "c"]
    desk.registry.cancel(ticket)


def test_pinned_and_used_adapters_stay(desk_of: Make):
    desk = desk_of(room=3)
    desk.load("pinned", pinned=True)
    desk.load("used", "other")
    desk.request("used")
    desk.load("x", "y", "z")
    assert desk.in_memory() == ["pinned", "used", "z"]


def test_what_cannot_fit_beside_the_pinned_is_refused(desk_of: Make):
    desk = desk_of(room=2)
    desk.load("a")
    desk.load("p", "q", pinned=True)
    error = desk.start(desk.claim("a")).result(120)
    assert isinstance(error, AdapterError)
    assert error.field == "adapter_memory"


def test_changed_content_is_a_new_identity_and_old_requests_keep_the_old(desk_of: Make):
    desk = desk_of()
    desk.load("a")
    running, waiting = desk.request("a"), desk.claim("a")
    desk.loader.contents["a"] = "a, changed"
    desk.load("a")
    newer = desk.request("a")
    assert desk.start(waiting).result(120) is None
    assert desk.registry.get(digest_of("a")) is not desk.registry.get(digest_of("a, changed"))
    assert desk.registry.list()[0].digest == digest_of("a, changed")
    for ticket in (running, waiting):
        assert desk.holds("a")
        desk.registry.cancel(ticket)
    assert not desk.holds("a")
    desk.registry.cancel(newer)


def test_a_claimed_content_without_a_name_is_not_evicted(desk_of: Make):
    """It could not be read again."""
    desk = desk_of(room=2)
    desk.load("a")
    claimed = desk.claim("a")
    desk.loader.contents["a"] = "changed"
    desk.load("a", "b", "c")
    assert desk.start(claimed).result(120) is None


def test_files_that_changed_behind_the_registrys_back(desk_of: Make):
    desk = desk_of(room=1)
    desk.load("a", "b")
    desk.loader.contents["a"] = "changed"
    first, second = desk.claim("a"), desk.claim("a")
    errors = [desk.start(first).result(120), desk.start(second).result(20)]
    assert all(isinstance(error, AdapterError) and "load it again" in str(error) for error in errors)
    assert errors[0] is not errors[1]
    desk.load("a")
    assert desk.start(desk.claim("a")).result(120) is None


def test_one_content_is_read_once_at_a_time(desk_of: Make):
    desk = desk_of(workers=4)
    desk.loader.gate.clear()
    loads = [desk.registry.load(name, "path") for name in ("a", "b", "c", "d")]
    while not desk.loader.reads:
        pass
    desk.loader.gate.set()
    wait(loads, 120)
    assert len({load.result().digest for load in loads}) == 1
    desk.loader.reads.clear()
    desk.load("e", "f", "g", "h")  # evict it
    tickets = [desk.claim(name) for name in ("a", "b", "c", "a")]
    desk.loader.reads.clear()
    assert all(told.result(120) is None for told in [desk.start(ticket) for ticket in tickets])
    assert desk.loader.reads == ["path"]


def test_starting_does_not_wait_for_files(desk_of: Make):
    desk = desk_of(room=1)
    desk.load("a", "b")
    desk.loader.gate.clear()
    told = desk.start(desk.claim("a"))
    late = desk.start(cancelled := desk.claim("a"))
    desk.registry.cancel(cancelled)
    assert not told.done()
    desk.loader.gate.set()
    assert told.result(120) is None
    assert not late.done()


def test_nobody_starves_for_memory(desk_of: Make):
    """One place, held by overlapping requests of A for ever: B passes at most `max_passes` of them."""
    desk = desk_of(room=1, max_passes=5)
    desk.load("b", "a")
    running = [desk.request("a")]
    victim = desk.start(desk.claim("b"))
    passed = 0
    for _ in range(50):
        ticket = desk.claim("a")
        if not desk.start(ticket).done():
            break
        passed += 1
        running.append(ticket)
        desk.registry.cancel(running.pop(0))
    assert passed == 5
    for ticket in running:
        desk.registry.cancel(ticket)
    assert victim.result(120) is None
