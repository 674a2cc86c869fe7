"""Pages of the layers that look equally far back: one pool and one radix tree.

Every model has one group. Where only some layers have a window or a chunk, these have a second one, of *window pages*:
pages have one number for all layers of a group, so one layer that sees everything would keep all pages of the others
(two pools as in SGLang's `SWARadixCache`; vLLM loops over such managers in its `KVCacheCoordinator`).

**Windows**: where a group looks back only so far (`lookback`), a running request gives back the pages that no later
token sees (`release`): however long it becomes, it holds the pages of its windows and of the tokens being computed.
Pages that it published stay in the tree until they are evicted. A page that its last reader has gone past is of no use
unless another request's path parts there, so of unlocked pages those in sight of an *end* are kept longest. Ends are a
request's last page, its prompt's last full page, and how far the tree knew the prompt when it came.

**Conservation**: free + cached + shared + held + retiring = capacity, always; `check` proves it page by page.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from asyncengine.errors import InvariantViolation
from asyncengine.kvcache.block_pool import BlockPool
from asyncengine.kvcache.page_table import PageTable
from asyncengine.kvcache.radix_tree import EvictionKey, Lookback, Namespace, Node, RadixTree, Span
from asyncengine.kvcache.retiring import Retiring

BESIDE = 3
"""Pages that a request may hold beside those that its window and the tokens being computed fill: a window may begin and
end anywhere in a page, and the page published next is joined to the last one in the tree."""


@dataclass(frozen=True, slots=True)
class PageCounts:
    """Pages by state; they add up to `total`."""

    free: int = 0
    cached: int = 0
    """Pages in the radix tree that may be evicted."""
    shared: int = 0
    """Pages in the radix tree that requests use."""
    held: int = 0
    """Pages of single requests."""
    retiring: int = 0
    """Pages given up that a step in flight still names."""
    total: int = 0


class _Release(NamedTuple):
    """Pages and locks that a request gives up together."""

    pages: Sequence[int]
    """Pages that are not the tree's."""
    node: Node | None
    """The last node of the path that it unlocks, if it unlocks any."""
    above: int
    """The path is not locked up to this depth."""
    ends: tuple[Span, ...]
    closed: Namespace | None = None
    """Namespace of a request that has ended: its root is unlocked as well."""


class PageGroup:
    """Pure bookkeeping of one group of layers: integers in, integers out."""

    def __init__(
        self, pool: BlockPool, page_size: int, strategy: EvictionKey, lookback: Lookback | None = None,
        most_ahead: int = sys.maxsize, *, padded: bool = True, keep: bool = True,
    ) -> None:  # fmt: skip
        """`lookback`: how far back its layers look; None: to the beginning. `most_ahead`: tokens of a request that
        launched steps compute at a time, at most. `padded`: tables begin with page 0 for what was given back. `keep`:
        pages stay in the tree when the last request of their namespace has ended.

        Raises `ValueError` if the pool is too small for a single request."""
        self.pool = pool
        self.lookback = lookback
        self.tree = RadixTree(page_size, strategy, lookback)
        self.retiring: Retiring[_Release] = Retiring(self._return)
        self._size = page_size
        self._most_ahead = most_ahead
        self._padded = padded
        self._keep = keep
        if self.most_alone < 1:
            raise ValueError(f"{pool.capacity + 1} {pool.noun}s of {page_size} tokens do not hold what a token sees")

    # ---------------------------------------------------------------- room

    @property
    def num_available(self) -> int:
        """Number of pages available without preempting a request."""
        return self.pool.num_free + self.tree.num_evictable

    @property
    def most_alone(self) -> int:
        """Tokens that a request of any length may compute in a step, so that it can run when it is alone."""
        if self.lookback is None:
            return sys.maxsize
        return (self.pool.capacity - BESIDE) * self._size - self.lookback.span

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._size)

    def most_at_once(self, num_tokens: int, start: int) -> int:
        """Number of a request's `num_tokens` that it may compute in a step from `start` on. Less than all only where
        they are more than the pool holds."""
        longer = self.pages_for(num_tokens) >= self.pool.capacity
        return min(num_tokens - start, self.most_alone) if longer else num_tokens - start

    def missing(self, table: PageTable, num_tokens: int) -> int:
        """Number of pages more than `table` has that its request will hold at a time, to have `num_tokens` computed."""
        missing = self.pages_for(num_tokens) - table.num_pages
        if self.lookback is None:
            return missing
        ahead = min(self._most_ahead, num_tokens)
        most = min(self.pages_for(self.lookback.span + ahead) + BESIDE, self.pool.capacity)
        occupied = table.num_pages - table.num_unseen + (0 < table.num_shared <= table.num_unseen)
        return min(missing, most - occupied)

    # ---------------------------------------------------------------- requests

    def open(self, namespace: Namespace, node: Node, prompt_len: int, matched: int) -> PageTable:
        """Table of a request that starts behind `node`, locked. `matched`: pages of its prompt that the tree knew."""
        unseen = min(self.tree.num_unseen(node.depth), max(node.depth - 1, 0))
        self.tree.lock(node, unseen)
        pages = self.tree.path_pages(node, unseen)
        ends = () if self.lookback is None else (self._in_view(matched), self._in_view((prompt_len - 1) // self._size))
        if self._padded:
            return PageTable(namespace, node, [0] * unseen + pages, unseen, ends=ends)
        return PageTable(namespace, node, pages, unseen, unseen, ends)

    def grow(self, table: PageTable, count: int) -> None:
        """Add `count` pages to `table`, evicting cached ones if need be. The caller has checked `num_available`."""
        short = count - self.pool.num_free
        if short > 0:
            self.pool.give(self.tree.evict(short))
        table.pages.extend(self.pool.take(count))

    def release(self, table: PageTable, computed: int, fence: int) -> None:
        """Give back pages that no position from `computed` on sees. Pages in the tree stay there until they are
        evicted; its own are free once step `fence`, which may name them, has retired."""
        if self.lookback is None:
            return
        unseen = min(self.lookback.first(computed), computed - self._size) // self._size
        if unseen <= table.num_unseen:
            return
        first, locked_from, owned_from = table.first, table.num_unlocked, max(table.num_unseen, table.node.depth)
        unpublished = table.pages[owned_from - first : unseen - first]
        kept = table.pages[unseen - first :]
        table.num_unseen = unseen
        if self._padded:
            table.pages = [0] * unseen + kept
        else:
            table.pages, table.first = kept, unseen
        self._give_back(unpublished, table, table.node, locked_from, table.num_unlocked, fence)

    def publish(self, table: PageTable, keys: Sequence[tuple[int, ...]], fence: int, priority: int) -> list[Node]:
        """Put the next pages of `table`, whose tokens are `keys`, into the tree; returns the nodes of those it has.

        Where another request was first, its page replaces ours in a new page list, and ours returns once step `fence`,
        which may still name it, has retired.
        """
        pages, before, locked_from = table.pages, table.node, table.num_unlocked
        node, duplicates, joined = before, [], []
        for index, key in enumerate(keys, node.depth):
            if index < table.num_unseen:
                node = self.tree.pass_over(node, key)
                continue
            slot = index - table.first
            node = self.tree.extend(node, key, pages[slot], priority, table.branches)
            if node.page != pages[slot]:
                if pages is table.pages:
                    pages = list(pages)
                duplicates.append(pages[slot])
                pages[slot] = node.page
            joined.append(node)
        table.node, table.pages = node, pages
        self._give_back(duplicates, table, before, locked_from, min(table.num_unlocked, before.depth), fence)
        return joined

    def close(self, table: PageTable, fence: int) -> None:
        """The request is done with its pages, which return when step `fence` has retired."""
        ends = table.ends if self.lookback is None else (*table.ends, self._in_view(table.num_shared))
        release = _Release(table.own_pages(), table.node, table.num_unlocked, ends, table.namespace)
        self.retiring.add(release, fence)

    def drop(self, node: Node) -> None:
        """Give up the page of `node`, which nothing can be started from any more."""
        if node.page:
            self.pool.give((self.tree.remove(node),))

    def _in_view(self, depth: int) -> Span:
        return self.tree.num_unseen(depth), depth

    def _give_back(self, pages: list[int], table: PageTable, node: Node, above: int, depth: int, fence: int) -> None:
        """Give up `pages` and the lock on the path to `node` between the depths `above` and `depth`."""
        locked = depth > above
        while locked and node.depth > depth:
            node = node.parent  # type: ignore[assignment]  # only a root has none, and its depth is 0
        if pages or locked:
            self.retiring.add(_Release(pages, node if locked else None, above, table.ends), fence)

    def _return(self, release: _Release) -> None:
        self.pool.give(release.pages)
        if release.node is None:
            return
        self.tree.unlock(release.node, release.above, root=release.closed is not None, ends=release.ends)
        root = None if release.closed is None or self._keep else self.tree.roots.get(release.closed)
        if root is not None and not root.locks:
            # Caching is off: only samples of one prompt share pages, and the last of them is gone.
            self.pool.give(self.tree.drop(root))

    # ---------------------------------------------------------------- conservation and counts

    def counts(self, tables: Iterable[PageTable]) -> PageCounts:
        """Pages by state, given all open tables."""
        return PageCounts(
            free=self.pool.num_free, cached=self.tree.num_evictable, shared=self.tree.num_locked,
            held=sum(len(table.own_pages()) for table in tables),
            retiring=sum(len(release.pages) for release in self.retiring), total=self.pool.capacity,
        )  # fmt: skip

    def check(self, tables: Sequence[PageTable]) -> None:
        """Prove conservation: every page has exactly one owner and every lock exactly one holder.

        `tables` are all that are open. Raises `InvariantViolation` naming the first page that does not add up.
        """
        owned: list[tuple[str, Iterable[int]]] = [("cached", [node.page for node in self.tree.nodes()])]
        owned += [("held", table.own_pages()) for table in tables]
        owned += [("retiring", release.pages) for release in self.retiring]
        self.pool.check(owned)
        self._check_locks(tables)

    def _check_locks(self, tables: Sequence[PageTable]) -> None:
        expected: dict[Node, int] = {}
        holders: list[tuple[Node, int]] = [(table.node, table.num_unlocked) for table in tables]
        holders += [(release.node, release.above) for release in self.retiring if release.node is not None]
        for deepest, above in holders:
            step = deepest
            while step.parent is not None and step.depth > above:
                expected[step] = expected.get(step, 0) + 1
                step = step.parent
        noun, nodes = self.pool.noun, list(self.tree.nodes())
        for node in nodes:
            if node.locks != (count := expected.pop(node, 0)):
                raise InvariantViolation(f"{noun} {node.page}: {node.locks} locks, {count} holders")
        if expected:
            raise InvariantViolation(f"{len(expected)} {noun}s are locked and not in the tree")
        counted, actual = (self.tree.num_locked, self.tree.num_passed), [0, 0]
        for node in nodes:
            actual[0] += node.locks > 0
            actual[1] += node.passed
        if tuple(actual) != counted:
            raise InvariantViolation(f"(locked, passed) {noun}s are {actual}, counted {counted}")
        for table in tables:
            shared = table.pages[table.num_unseen - table.first : max(table.num_shared - table.first, 0)]
            if shared != self.tree.path_pages(table.node, table.num_unseen):
                raise InvariantViolation(f"a table of {noun}s disagrees with the tree at {shared}")
