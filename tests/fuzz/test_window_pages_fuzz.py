"""Models some of whose layers have windows and pages of their own, under fuzz: both kinds of pages add up at each turn,
and what windows see in theirs is what is there.

`ASYNCENGINE_WINDOW_PAGES_LIVES=180` for 10,000 requests and more. Would it notice? The bugs below must be found.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from fuzz.grammar_fuzz import GrammarLife
from fuzz.schedule_fuzz import Life, Tally
from fuzz.speculation_fuzz import check_guesses, life_with_draft_model, speculative_life
from fuzz.update_fuzz import UpdateLife

from asyncengine.errors import InvariantViolation
from asyncengine.kvcache.block_pool import BlockPool
from asyncengine.kvcache.radix_tree import Node
from asyncengine.kvcache.window_books import WindowBooks, WindowTable
from asyncengine.testing import FakeExecutor, FakeModel, Recording, replay

LIVES = int(os.environ.get("ASYNCENGINE_WINDOW_PAGES_LIVES", "12"))
Plant = Callable[[pytest.MonkeyPatch], None]


def test_random_requests() -> None:
    """Windows from one token to more than a page, chunks, both; as few window pages as one request needs, and many;
    leavers, preemption, n > 1, two steps in flight."""
    tally = Tally()
    for seed in range(LIVES):
        life = Life(seed, mixed=True)
        life.run()
        life.count(tally)
    assert tally.requests >= LIVES * 50
    # and it was worth it:
    assert tally.preemptions >= LIVES * 15
    assert tally.cached_tokens >= LIVES * 150
    assert tally.depth2 >= LIVES // 6


def test_random_requests_with_grammars_texts_and_other_weights() -> None:
    for seed in range(LIVES // 4):
        GrammarLife(seed, 2 if seed % 2 else None, mixed=True).run()
        Life(seed, vectors=0.6, mixed=True).run()
        UpdateLife(seed, mixed=True).run()


def test_random_requests_with_drafts() -> None:
    """A draft model keeps all its pages, under the numbers of the others."""
    accepted = made = 0
    for seed in range(LIVES // 4):
        life = speculative_life(seed, mixed=True)
        life.run()
        assert life.scheduler.speculation is not None
        accepted += life.scheduler.speculation.accepted
        guessing = life_with_draft_model(seed, mixed=True)
        guessing.run()
        made += check_guesses(guessing)
    assert accepted > LIVES * 10
    assert made > LIVES * 5


def test_a_saved_recording_replays_to_the_same_outputs(tmp_path: Path) -> None:
    life = Life(3, depth=2, mixed=True)
    life.run()
    loaded = Recording.load(life.recording.save(tmp_path / "life.jsonl"))
    assert loaded.num_window_pages == life.recording.num_window_pages > 0
    model = FakeModel(eos_every=life.executor.model.eos_every, windows=loaded.windows)
    size, own = loaded.config.page_size, loaded.num_window_pages
    assert replay(loaded, FakeExecutor(loaded.num_pages, size, model, num_window_pages=own)) == life.outputs


def a_token_early(patch: pytest.MonkeyPatch) -> None:
    release = WindowBooks.release
    patch.setattr(WindowBooks, "release", lambda *args: release(*args[:3], args[3] + 1, args[4]))


def under_a_running_step(patch: pytest.MonkeyPatch) -> None:
    give = WindowBooks._give_back
    patch.setattr(WindowBooks, "_give_back", lambda books, given: give(books, given._replace(fence=0)))


def never(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(WindowBooks, "release", lambda *args: None)


def start_where_window_pages_are_gone(patch: pytest.MonkeyPatch) -> None:
    """What is not there is taken for something."""

    def open_all(books: WindowBooks, node: Node, ends: Iterable[int]) -> WindowTable:
        path, step, first = [], node, books.unseen(node.depth)
        while step.parent is not None and step.depth > first:
            path.append(step.window or 1)
            if step.window:
                books._lock(step)
            step = step.parent
        return WindowTable(first, path[::-1], ())

    patch.setattr(WindowBooks, "deepest", lambda books, node: node)
    patch.setattr(WindowBooks, "open", open_all)


def start_a_page_too_deep(patch: pytest.MonkeyPatch) -> None:
    """One hole in sight is overlooked: the page before it is locked twice."""
    unseen = WindowBooks.unseen
    patch.setattr(WindowBooks, "unseen", lambda books, depth: min(depth, unseen(books, depth) + 1))


def hand_out_twice(patch: pytest.MonkeyPatch) -> None:
    """Two requests write to one window page, and the free list hides it."""
    take = BlockPool.take

    def broken(pool: BlockPool, count: int) -> list[int]:
        pages = take(pool, count)
        if pool._what == "window page" and len(pages) > 1:
            pool.give(pages[-1:])
            pages[-1] = pages[0]
        return pages

    patch.setattr(BlockPool, "take", broken)
    patch.setattr(WindowBooks, "check", lambda *args: None)
    patch.setattr(WindowBooks, "_unlist", lambda *args: None)


def keep_ones_own(patch: pytest.MonkeyPatch) -> None:
    """Of a page that somebody else published first, without giving up one's window page for it."""
    join = WindowBooks.join

    def broken(books: WindowBooks, table: WindowTable, nodes: Iterable[Node], fence: int) -> None:
        own = list(table.pages)
        join(books, table, nodes, fence)
        table.pages = own

    patch.setattr(WindowBooks, "join", broken)


def evict_and_leave_it_there(patch: pytest.MonkeyPatch) -> None:
    """Its node still names a window page that is somebody else's now."""

    def broken(books: WindowBooks) -> None:
        listed = books._passed or books._kept
        page = next(iter(listed))
        del listed[page]
        books.pool.give((page,))

    patch.setattr(WindowBooks, "_evict", broken)
    patch.setattr(WindowBooks, "check", lambda *args: None)


def forget_the_window_page(patch: pytest.MonkeyPatch) -> None:
    """Of a page that leaves the tree."""
    patch.setattr(WindowBooks, "forget", lambda *args: None)


def lives(count: int) -> None:
    for seed in range(count):
        Life(seed, 2, mixed=True).run()


@pytest.mark.parametrize(
    "plant",
    [
        a_token_early,
        under_a_running_step,
        never,
        start_where_window_pages_are_gone,
        start_a_page_too_deep,
        hand_out_twice,
        keep_ones_own,
        evict_and_leave_it_there,
        forget_the_window_page,
    ],
    ids=lambda plant: plant.__name__,
)
def test_the_fuzz_finds(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises((AssertionError, InvariantViolation, KeyError, ValueError)):
        lives(12)
