"""A load that lacks memory closes shared engines that are kept without a user."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from support.fake_engine import greedy, make_core

import asyncengine
from asyncengine.engine.process import PROCESS
from asyncengine.errors import OutOfMemory
from asyncengine.shared import _Registry
from asyncengine.testing import ManualClock

# -------------------------------------------------------------------- shared engines


# -------------------------------------------------------------------- shared engines without a handle


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Iterator[ManualClock]:
    """The clock of a registry of the test's own."""
    clock = ManualClock(1000.0)
    registry = _Registry(clock)
    monkeypatch.setattr("asyncengine.shared._REGISTRY", registry)
    monkeypatch.setattr(PROCESS, "make_room", registry.make_room)
    yield clock
    registry.make_room()


async def use(**settings: Any) -> asyncengine.AsyncEngine:
    """A handle made, used and given back, as by a handler that makes a model object in each request."""
    handle = asyncengine.shared_engine("m", **settings)
    engine = await handle.aget()
    assert (await engine.generate([2, 3], greedy(3))).token_ids
    handle.close()
    return engine


async def test_a_load_that_lacks_memory_closes_what_is_kept_and_tries_again(
    time: ManualClock, monkeypatch: pytest.MonkeyPatch
):
    tried: list[str] = []

    def load(path: str, *rest: Any) -> Any:
        tried.append(path)
        if path == "large" and any(engine.alive for engine in (kept, used)[: 1 + ("used" in lacking)]):
            raise OutOfMemory("the model does not fit")
        return make_core()

    lacking: set[str] = set()
    monkeypatch.setattr("asyncengine.assembly.wiring._load_on_own_thread", load)
    handle = asyncengine.shared_engine("m", max_num_seqs=3)
    used, kept = await handle.aget(), await use()
    async with await asyncengine.AsyncEngine.from_pretrained("large") as engine:
        assert engine.alive
        assert not kept.alive
        assert used.alive
    assert tried == ["m", "m", "large", "large"]
    lacking.add("used")
    with pytest.raises(OutOfMemory):  # the one in use is nobody's to close
        await asyncengine.AsyncEngine.from_pretrained("large")
    assert used.alive
    assert tried == ["m", "m", "large", "large", "large"]
    handle.close()


# -------------------------------------------------------------------- stats


# -------------------------------------------------------------------- what a blocking stream promises
