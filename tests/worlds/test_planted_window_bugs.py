"""Would the fuzz notice? Each test plants one bug in what is done with windows, and the fuzz must find it."""

from __future__ import annotations

from typing import Any

import pytest
from worlds.plants import Plant, in_place_of
from worlds.schedule_fuzz import Life

from asyncengine.errors import InvariantViolation
from asyncengine.kvcache.block_pool import BlockPool
from asyncengine.kvcache.page_group import PageGroup
from asyncengine.kvcache.page_table import PageTable
from asyncengine.kvcache.radix_tree import Node, RadixTree

# ---------------------------------------------------------------- windows in all layers or in some


def release_a_token_early(patch: pytest.MonkeyPatch) -> None:
    release = PageGroup.release
    patch.setattr(PageGroup, "release", lambda *args: release(*args[:2], args[2] + 1, args[3]))


def release_under_a_running_step(patch: pytest.MonkeyPatch) -> None:
    give = PageGroup._give_back
    patch.setattr(PageGroup, "_give_back", lambda *args: give(*args[:-1], 0))


def never_release(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PageGroup, "release", lambda *args: None)


def start_a_page_too_deep(patch: pytest.MonkeyPatch) -> None:
    """One hole in sight is overlooked: its page is left to others, or the page before it is locked twice."""
    unseen = RadixTree.num_unseen
    patch.setattr(
        RadixTree, "num_unseen", lambda tree, depth: min(depth, unseen(tree, depth) + 1) if tree.lookback else 0
    )


# ---------------------------------------------------------------- windows in all layers


@in_place_of(RadixTree, "_walk")
def start_behind_a_hole(_: Any, self: RadixTree, node: Node, tokens: Any, limit: int) -> Node:
    """A page that is there is enough, whatever its window lacks."""
    found, size = node, self.page_size
    for start in range(0, limit - size + 1, size):
        if (child := node.children.get(tuple(tokens[start : start + size]))) is None:
            break
        node = child
        found = node if node.page else found
    return found


def forget_the_lock(patch: pytest.MonkeyPatch) -> None:
    """Pages that are given back before the end of their request stay locked."""
    unlock = RadixTree.unlock
    patch.setattr(RadixTree, "unlock", lambda *args, root, ends: unlock(*args, root=root, ends=ends) if root else None)


# ---------------------------------------------------------------- windows in some layers, with pages of their own


def start_where_window_pages_are_gone(patch: pytest.MonkeyPatch) -> None:
    """A page that is not there is taken for one that is."""
    walk, path = RadixTree._walk, RadixTree.path_pages

    def broken(tree: RadixTree, node: Node, tokens: Any, limit: int) -> Node:
        if tree.lookback is None:
            return walk(tree, node, tokens, limit)
        for start in range(0, limit, tree.page_size):
            node = tree.pass_over(node, tuple(tokens[start : start + tree.page_size]))
        return node

    patch.setattr(RadixTree, "_walk", broken)
    patch.setattr(RadixTree, "path_pages", lambda *args: [page or 1 for page in path(*args)])


def hand_out_twice(patch: pytest.MonkeyPatch) -> None:
    """Two requests write to one window page, and the free list hides it."""
    take = BlockPool.take

    def broken(pool: BlockPool, count: int) -> list[int]:
        pages = take(pool, count)
        if pool.what == "window page" and len(pages) > 1:
            pool.give(pages[-1:])
            pages[-1] = pages[0]
        return pages

    patch.setattr(BlockPool, "take", broken)
    patch.setattr(PageGroup, "check", lambda *args: None)


@in_place_of(PageGroup, "publish")
def keep_ones_own(publish: Any, group: PageGroup, table: PageTable, *args: Any) -> list[Node]:
    """A request keeps its own copy of a page that another published first, without giving up its window page for it."""
    own = table.pages
    nodes = publish(group, table, *args)
    if group.lookback is not None:
        table.pages = own
    return nodes


def evict_and_leave_it_there(patch: pytest.MonkeyPatch) -> None:
    """Its node still names a window page that is somebody else's now."""
    remove = RadixTree.remove

    def broken(tree: RadixTree, node: Node) -> int:
        if tree.lookback is None:
            return remove(tree, node)
        tree.num_pages -= 1
        return node.page

    patch.setattr(RadixTree, "remove", broken)
    patch.setattr(PageGroup, "check", lambda *args: None)


def forget_the_window_page(patch: pytest.MonkeyPatch) -> None:
    """A page that leaves the tree does not give its window page back."""
    patch.setattr(PageGroup, "drop", lambda *args: None)


IN_BOTH = [release_a_token_early, release_under_a_running_step, never_release, start_a_page_too_deep]
IN_ALL = [start_behind_a_hole, forget_the_lock]
IN_SOME = [
    start_where_window_pages_are_gone, hand_out_twice, keep_ones_own, evict_and_leave_it_there, forget_the_window_page,
]  # fmt: skip


@pytest.mark.parametrize(
    ("plant", "kind"),
    [(plant, "windows") for plant in (*IN_BOTH, *IN_ALL)] + [(plant, "mixed") for plant in (*IN_BOTH, *IN_SOME)],
)
def test_the_fuzz_finds(plant: Plant, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises((AssertionError, InvariantViolation, KeyError, ValueError)):
        live(12, **{kind: True})


def live(seeds: int, **kind: bool) -> None:
    for seed in range(seeds):
        Life(seed, 2, **kind).run()
