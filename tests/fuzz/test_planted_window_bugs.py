"""Would the fuzz notice? Each test plants one bug in what is done with windows, and the fuzz must find it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
from fuzz.schedule_fuzz import Life

from asyncengine.errors import InvariantViolation
from asyncengine.kvcache import KVCache
from asyncengine.kvcache.block_pool import BlockPool
from asyncengine.kvcache.radix_tree import Node, RadixTree
from asyncengine.kvcache.window_books import WindowBooks, WindowTable

Plant = Callable[[pytest.MonkeyPatch], None]

# ---------------------------------------------------------------- windows in all layers


def release_early(patch: pytest.MonkeyPatch) -> None:
    """A page is given back one token too early."""
    release = KVCache.release
    patch.setattr(KVCache, "release", lambda kv, table, computed, fence: release(kv, table, computed + 1, fence))


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


# ---------------------------------------------------------------- windows in some layers, with pages of their own


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


IN_ALL = [
    release_early, free_under_a_running_step, start_behind_a_hole, lock_too_little, never_release, forget_the_lock,
]  # fmt: skip
IN_SOME = [
    a_token_early, under_a_running_step, never, start_where_window_pages_are_gone, start_a_page_too_deep,
    hand_out_twice, keep_ones_own, evict_and_leave_it_there, forget_the_window_page,
]  # fmt: skip


@pytest.mark.parametrize("plant", [*IN_ALL, *IN_SOME], ids=lambda plant: plant.__name__)
def test_the_fuzz_finds(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises((AssertionError, InvariantViolation, KeyError, ValueError)):
        live(12, windows=plant in IN_ALL, mixed=plant in IN_SOME)


def live(seeds: int, **kind: bool) -> None:
    for seed in range(seeds):
        Life(seed, 2, **kind).run()
