"""A load that lacks memory closes shared engines that are kept without a user."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from support.engine_watches import own_registry, use_shared
from support.fake_engine import make_core

import asyncengine
from asyncengine.errors import OutOfMemory
from asyncengine.testing import ManualClock


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Iterator[ManualClock]:
    """The clock of a registry of the test's own."""
    with own_registry(monkeypatch) as clock:
        yield clock


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
    used, kept = await handle.aget(), await use_shared()
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
