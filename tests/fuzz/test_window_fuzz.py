"""A model all of whose layers have windows, under fuzz: what is given back was seen by nobody, and nothing else is.

`ASYNCENGINE_WINDOW_LIVES=180` for 10,000 requests and more. Would it notice? The planted bugs below must be found.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fuzz.grammar_fuzz import GrammarLife
from fuzz.schedule_fuzz import Life, Tally

from asyncengine.errors import InvariantViolation
from asyncengine.kvcache import KVCache
from asyncengine.kvcache.radix_tree import Node, RadixTree
from asyncengine.testing import FakeExecutor, FakeModel, Recording, replay

LIVES = int(os.environ.get("ASYNCENGINE_WINDOW_LIVES", "12"))
Plant = Callable[[pytest.MonkeyPatch], None]


def test_random_requests_of_a_windowed_model() -> None:
    """Windows from one token to more than a page, chunks, both; pools smaller than a request; two steps in flight."""
    tally = Tally()
    windowed = 0
    for seed in range(LIVES):
        life = Life(seed, windows=True)
        life.run()
        life.count(tally)
        windowed += life.windowed
    assert tally.requests >= LIVES * 50
    assert windowed >= LIVES // 2
    # and it was worth it:
    assert tally.beyond_the_pool >= LIVES * 3
    assert tally.preemptions >= LIVES * 15
    assert tally.cached_tokens >= LIVES * 150


def test_random_grammars_of_a_windowed_model() -> None:
    """What was launched on a guess is launched again, from what was computed before."""
    for seed in range(LIVES // 2):
        GrammarLife(seed, 2 if seed % 2 else None, windows=True).run()


def test_a_saved_recording_with_windows_replays_to_the_same_outputs(tmp_path: Path) -> None:
    life = Life(3, depth=2, windows=True)
    life.run()
    assert life.windowed
    loaded = Recording.load(life.recording.save(tmp_path / "life.jsonl"))
    assert loaded.windows == life.recording.windows
    model = FakeModel(eos_every=life.executor.model.eos_every, windows=loaded.windows)
    assert replay(loaded, FakeExecutor(loaded.num_pages, loaded.config.page_size, model)) == life.outputs


def release_early(tokens: int) -> Plant:
    def plant(patch: pytest.MonkeyPatch) -> None:
        release = KVCache.release
        patch.setattr(KVCache, "release", lambda kv, table, n, fence: release(kv, table, n + tokens, fence))

    plant.__name__ = f"released {tokens} token too early"
    return plant


def free_under_a_running_step(patch: pytest.MonkeyPatch) -> None:
    release = KVCache.release
    patch.setattr(KVCache, "release", lambda kv, table, computed, fence: release(kv, table, computed, 0))


def start_behind_a_hole(patch: pytest.MonkeyPatch) -> None:
    """A page that is there is enough, whatever its window lacks."""

    def broken(self: RadixTree, node: Node, tokens: Any, limit: int) -> Node:
        found, size = node, self.page_size
        for start in range(0, limit - size + 1, size):
            if (child := node.children.get(tuple(tokens[start : start + size]))) is None:
                break
            node = child
            found = node if node.page else found
        return found

    patch.setattr(RadixTree, "_walk", broken)


def lock_too_little(patch: pytest.MonkeyPatch) -> None:
    """A request that starts from cached pages leaves one to others that it sees itself."""
    unseen = RadixTree.num_unseen
    patch.setattr(RadixTree, "num_unseen", lambda tree, depth: min(depth, unseen(tree, depth) + 1) if tree.sight else 0)


def never_release(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(KVCache, "release", lambda *args: None)


def forget_the_lock(patch: pytest.MonkeyPatch) -> None:
    """Of the page that what is published was joined to."""
    patch.setattr(KVCache, "_unlocking", staticmethod(lambda node, above, depth: None))


def lives(count: int) -> None:
    for seed in range(count):
        Life(seed, 2, windows=True).run()


@pytest.mark.parametrize(
    "plant",
    [
        release_early(1),
        free_under_a_running_step,
        start_behind_a_hole,
        lock_too_little,
        never_release,
        forget_the_lock,
    ],
    ids=lambda plant: plant.__name__,
)
def test_the_fuzz_finds(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises((AssertionError, InvariantViolation)):
        lives(12)
