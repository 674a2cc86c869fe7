"""Objects that are there when an engine begins to serve are not looked through for garbage until one ends."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest
from support.fake_engine import greedy, make_engine

from asyncengine.engine import device_thread
from asyncengine.engine.process import FrozenHeap


@pytest.fixture(autouse=True)
def nothing_frozen() -> Iterator[None]:
    gc.unfreeze()
    yield
    gc.collect()
    gc.freeze()  # as tests/conftest.py has it


class Knot:
    """Garbage that only the collector finds."""

    def __init__(self) -> None:
        self.itself = self


def collect() -> None:
    gc.collect()


async def test_while_an_engine_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_thread, "HEAP", FrozenHeap())  # an engine of another test may never have ended
    async with make_engine() as engine:
        await engine.generate([2, 3], greedy(2))
        assert gc.get_freeze_count() > 10_000, "all of pytest, for one"
        later = weakref.ref(Knot())
        gc.collect()
        assert later() is None, "what is made meanwhile is collected"
    assert gc.get_freeze_count() == 0


def test_what_an_engine_had_is_collected_when_it_closes_and_the_rest_stays_frozen() -> None:
    heap = FrozenHeap()
    had = Knot()
    seen = weakref.ref(had)
    heap.begin()
    heap.begin()
    del had
    gc.collect()
    assert seen() is not None
    heap.end(collect)
    assert seen() is None
    assert gc.get_freeze_count() > 10_000, "the other serves"
    heap.end(lambda: None)
    assert gc.get_freeze_count() == 0


def test_a_close_that_fails_leaves_the_books_right() -> None:
    heap = FrozenHeap()
    heap.begin()

    def fail() -> None:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        heap.end(fail)
    assert gc.get_freeze_count() == 0
    heap.begin()
    assert gc.get_freeze_count() > 10_000
    heap.end(lambda: None)


def test_a_program_that_froze_its_objects_is_left_alone() -> None:
    heap = FrozenHeap()
    gc.freeze()
    made = Knot()
    seen = weakref.ref(made)
    heap.begin()
    del made
    gc.collect()
    assert seen() is None, "nothing more was frozen"
    heap.end(lambda: None)
    assert gc.get_freeze_count() > 10_000, "nor anything less"
