"""The KV cache as the scheduler sees it: open a page table, grow it, publish it, close it.

Composes the free list, the radix tree and the books of recurrent states, and keeps the **retire rule**: whatever a
launched step names (a page, a lock on cached pages, a state) returns only when that step has retired. With one step in
flight everything returns at once; overlap scheduling needs no other code (mini-sglang #89, vLLM-Ascend #16315 are what
happens without it).

**Windows**: where every layer has one (`kvcache.sight`), a running request gives back what nobody will see any more
(`release`), so that however long it becomes, it holds the pages of its windows and of what is being computed. Where
only some have one, these have pages of their own (`kvcache.window_books`), which go back alike.

**Conservation**: free + cached + held + retiring = capacity, always; `check` proves it page by page.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from asyncengine.errors import InvariantViolation
from asyncengine.kvcache.block_pool import BlockPool
from asyncengine.kvcache.cache_log import CacheLog, CacheNews
from asyncengine.kvcache.eviction import eviction_strategy
from asyncengine.kvcache.page_table import PageTable
from asyncengine.kvcache.radix_tree import Namespace, Node, RadixTree
from asyncengine.kvcache.sight import Sight, Window
from asyncengine.kvcache.states import StateBooks, StateCounts
from asyncengine.kvcache.window_books import BESIDE, WindowBooks


@dataclass(frozen=True, slots=True)
class PageCounts:
    """Pages by state; they add up to `total`."""

    free: int = 0
    cached: int = 0
    """In the radix tree and evictable."""
    shared: int = 0
    """In the radix tree and in use by requests."""
    held: int = 0
    """Owned by single requests."""
    retiring: int = 0
    """Given up, but a step in flight still names them."""
    total: int = 0

    @property
    def add_up(self) -> bool:
        return self.free + self.cached + self.shared + self.held + self.retiring == self.total


class _Lock(NamedTuple):
    """That a path is in use, as far as it is to be undone."""

    node: Node
    above: int
    """It is not locked up to this depth."""
    closed: Namespace | None
    """Of a request that has ended: its root is unlocked as well."""


class KVCache:
    """Pages of one engine. Pure bookkeeping: integers in, integers out."""

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        *,
        prefix_caching: bool = True,
        eviction: str = "lru",
        num_states: int = 0,
        windows: Iterable[Window] = (),
        num_window_pages: int = 0,
        most_ahead: int = sys.maxsize,
    ) -> None:
        """`num_states`: slots for recurrent states, slot 0 included; 0: the model keeps none. `windows`: kinds of its
        attention layers. `num_window_pages`: pages of those with a window, page 0 included; 0: all layers have the same
        pages. `most_ahead`: tokens of a request that launched steps compute at a time, at most."""
        windows = tuple(windows)
        self.page_size = page_size
        self.prefix_caching = prefix_caching
        self.pool = BlockPool(num_pages)
        self.sight = self._worthwhile(Sight.of(windows)) if not num_states else None
        """How far back the model looks; None: all the way, or as far as there are pages."""
        self.most_ahead = most_ahead
        self.tree = RadixTree(page_size, eviction_strategy(eviction), self.sight)
        self._retired = 0
        self._retiring: deque[tuple[int, list[int], _Lock | None]] = deque()
        self._num_retiring = 0
        self.states: StateBooks | None = None
        if num_states:
            self.states = StateBooks(num_states)
            self.tree.losing_state = self.states.forget
        self.windows: WindowBooks | None = None
        """None: all layers have the same pages."""
        near = Sight.of(kind for kind in windows if any(kind))
        if num_window_pages and near is not None and self.states is None:
            self.windows = WindowBooks(num_window_pages, page_size, near, most_ahead)
            self.tree.losing_window = self.windows.forget

    @property
    def num_available(self) -> int:
        """Pages that can be had now, without preempting anybody."""
        return self.pool.num_free + self.tree.num_evictable

    @property
    def num_free(self) -> int:
        """Pages for which nothing has to go that somebody may want to start from."""
        return self.pool.num_free if self.windows is None else min(self.pool.num_free, self.windows.num_idle)

    @property
    def anything_retiring(self) -> bool:
        """Pages or locks are on their way back: they need no preemption, only patience."""
        return bool(self._retiring) or (self.windows is not None and self.windows.anything_retiring)

    def keep_log(self, limit: int) -> None:
        """From now on, take note of pages that come and go, for `news`; at most `limit` of them. Before the first."""
        if self.tree.num_pages:
            raise InvariantViolation("a log is kept from the start or not at all")
        self.tree.log = CacheLog(limit)

    def news(self) -> CacheNews:
        """Pages published and evicted since the last call. Nothing where no log is kept."""
        log = self.tree.log
        return CacheNews() if log is None else log.drain(node.hash for node in self.tree.nodes())

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def _worthwhile(self, sight: Sight | None) -> Sight | None:
        """Where a window is nearly all of the pool, nothing is won."""
        return sight if sight is not None and self._pages_around(sight, self.page_size) <= self.pool.capacity else None

    def _pages_around(self, sight: Sight, ahead: int) -> int:
        """Most pages that a request holds of which `ahead` tokens are being computed: those its next position sees,
        wherever that is in a page, the last full one, and the one in the tree that the next is joined to."""
        return self.pages_for(sight.span + ahead) + BESIDE

    @property
    def longest(self) -> int:
        """Tokens that one request can have, at most."""
        return self.pool.capacity * self.page_size if self.sight is None else sys.maxsize

    def most_at_once(self, num_tokens: int, start: int) -> int:
        """Of a request's `num_tokens`, how many from `start` on it may compute in a step. Less than all only of one
        that is longer than the pool, so that it can run when it is alone."""
        wanted = num_tokens - start
        if self.windows is not None and self.pages_for(num_tokens) >= self.windows.pool.capacity:
            return min(wanted, self.windows.most_at_once)
        if self.sight is None or self.pages_for(num_tokens) < self.pool.capacity:
            return wanted
        return min(wanted, (self.pool.capacity - BESIDE) * self.page_size - self.sight.span)

    def missing(self, table: PageTable, num_tokens: int) -> int:
        """How many pages more than `table` has its request will hold at a time, to have `num_tokens` computed."""
        missing = self.pages_for(num_tokens) - len(table.pages)
        if self.sight is None:
            return missing
        most = min(self._pages_around(self.sight, min(self.most_ahead, num_tokens)), self.pool.capacity)
        return min(missing, most - table.num_in_use)

    def missing_windows(self, table: PageTable, num_tokens: int) -> int:
        """The same of window pages; 0 where there are none."""
        if self.windows is None or table.window is None:
            return 0
        return self.windows.missing(table.window, num_tokens)

    def has_room(self, pages: int, windows: int) -> bool:
        """Can so many pages and window pages be had now, without preempting anybody?"""
        return pages <= self.num_available and (self.windows is None or windows <= self.windows.num_available)

    def open(self, namespace: Namespace, tokens: Sequence[int], limit: int) -> PageTable:
        """A page table that begins with the longest cached prefix of `tokens[:limit]`, locked.

        `limit` is at most len(tokens) - 1 for a prompt: the last token is always computed, its logits are needed.

        Where states are kept, it begins with as much of that prefix as ends with a snapshot, and where there are window
        pages, with as much as ends with those that are seen there. The rest is computed again, into pages of the
        request's own; publishing exchanges them for those that are there.
        """
        matched = self.tree.match(namespace, tokens, limit)
        node = self._start(matched)
        unseen = min(self.tree.num_unseen(node.depth), max(node.depth - 1, 0))
        self.tree.lock(node, unseen)
        table = PageTable(namespace, node, [0] * unseen + self.tree.path_pages(node, unseen), unseen)
        table.matched = matched
        if self.windows is not None:
            table.window = self.windows.open(node, (matched.depth, (len(tokens) - 1) // self.page_size))
        return table

    def _start(self, matched: Node) -> Node:
        """Behind which a request can start that has found `matched`."""
        if self.states is not None:
            return self.states.deepest(matched)
        return matched if self.windows is None else self.windows.deepest(matched)

    def peek(self, namespace: Namespace, tokens: Sequence[int], limit: int) -> int:
        """How many tokens `open` would find. Changes nothing (policies use it)."""
        node = self.tree.peek(namespace, tokens, limit)
        return 0 if node is None else self._start(node).depth * self.page_size

    def take_state(self, table: PageTable, num_tokens: int, *, shared: bool) -> bool:
        """A slot for the state of the request of `table`, which begins to run and has `num_tokens` tokens. False: there
        is none now. `shared`: its pages are published, and snapshots are left where others may want to start."""
        assert self.states is not None
        start = table.num_shared * self.page_size
        marks: list[int] = []
        if shared:
            if table.matched.children:  # it goes another way than somebody before it
                marks.append(table.matched.depth * self.page_size)
            marks.append((num_tokens - 1) // self.page_size * self.page_size)
            marks = sorted({mark: None for mark in marks if mark > start})
        table.state = self.states.start(table.node, start, marks)
        if table.state is not None:
            table.state.follows = shared
        table.matched = table.node  # it may be evicted from now on
        return table.state is not None

    def grow(self, table: PageTable, num_tokens: int) -> bool:
        """Make room for `num_tokens` in `table`, evicting cached pages if need be. False: nothing changed."""
        missing = self.pages_for(num_tokens) - len(table.pages)
        if missing <= 0:
            return True
        if not self.has_room(missing, missing):
            return False
        short = missing - self.pool.num_free
        if short > 0:
            self.pool.give(self.tree.evict(short))
        table.pages.extend(self.pool.take(missing))
        if self.windows is not None and table.window is not None:
            self.windows.grow(table.window, missing)
        return True

    def release(self, table: PageTable, computed: int, fence: int) -> None:
        """Give back what no position from `computed` on sees: all that its request computes from now on. Pages in the
        tree stay there until they are evicted; its own are free once step `fence`, which may name them, has retired."""
        if self.windows is not None and table.window is not None:
            self.windows.release(table.window, table.node, computed, fence)
        if self.sight is None:
            return
        last_full = computed // self.page_size - 1
        unseen = min(self.sight.first(computed) // self.page_size, last_full)
        if unseen <= table.num_unseen:
            return
        locked_from, held_from = table.num_unlocked, max(table.num_unseen, table.node.depth)
        own = table.pages[held_from:unseen]
        table.pages = [0] * unseen + table.pages[unseen:]
        table.num_unseen = unseen
        self._give_back(own, self._unlocking(table.node, locked_from, table.num_unlocked), fence)

    def will_release(self, computed: int, launched: int) -> bool:
        """Can a request give back pages when what is launched of it has been computed?"""
        sight = self.sight if self.windows is None else self.windows.sight
        return sight is not None and sight.first(computed) < sight.first(launched)

    @staticmethod
    def _unlocking(node: Node, above: int, depth: int) -> _Lock | None:
        """The lock on the path to `node` between `above` and `depth`."""
        if depth <= above:
            return None
        while node.depth > depth:
            node = node.parent  # type: ignore[assignment]  # only a root has none, and its depth is 0
        return _Lock(node, above, None)

    def publish(self, table: PageTable, tokens: Sequence[int], computed: int, fence: int, priority: int = 0) -> None:
        """Put the full pages of `tokens[:computed]` into the tree, so that others may start from them.

        Call only after the step that wrote them has committed. Where another request was first, its page replaces
        ours in a new page list, and ours returns once step `fence`, which may still name it, has retired.
        """
        size = self.page_size
        duplicates: list[int] = []
        pages = table.pages
        first, locked_from = table.node, table.num_unlocked
        node = first
        joining: list[Node] = []
        for index in range(node.depth, computed // size):
            key = tuple(tokens[index * size : (index + 1) * size])
            if index < table.num_unseen:
                node = self.tree.pass_over(node, key)
                continue
            node = self.tree.extend(node, key, pages[index], priority)
            if node.page != pages[index]:
                if pages is table.pages:
                    pages = list(pages)
                duplicates.append(pages[index])
                pages[index] = node.page
            joining.append(node)
        table.node = node
        table.pages = pages
        if self.windows is not None and table.window is not None:
            self.windows.join(table.window, joining, fence)
        joined = self._unlocking(first, locked_from, min(table.num_unlocked, first.depth))
        if duplicates or joined is not None:
            self._give_back(duplicates, joined, fence)

    def close(self, table: PageTable, fence: int) -> None:
        """The request is done with its pages and its state; they return when step `fence` has retired."""
        if table.state is not None and self.states is not None:
            self.states.close(table.state, table.node, self.page_size, fence)
            table.state = None
        if self.windows is not None and table.window is not None:
            self.windows.close(table.window, table.node, fence)
        self._give_back(table.own_pages(), _Lock(table.node, table.num_unlocked, table.namespace), fence)

    def clear(self) -> None:
        """Forget all that is cached, since it would be computed otherwise now. Nothing may be held or retiring."""
        if self.anything_retiring:
            raise InvariantViolation("a cache is cleared while steps in flight name its pages")
        self.pool.give(self.tree.clear())

    def retire(self, step: int) -> None:
        """Steps up to `step` have finished: nothing reads what only they named."""
        self._retired = step
        if self.states is not None:
            self.states.retire(step)
        if self.windows is not None:
            self.windows.retire(step)  # before the pages, without which nothing holds what it unlocks
        while self._retiring and self._retiring[0][0] <= step:
            _, pages, lock = self._retiring.popleft()
            self._num_retiring -= len(pages)
            self._return(pages, lock)

    def _give_back(self, pages: list[int], lock: _Lock | None, fence: int) -> None:
        if fence <= self._retired:
            self._return(pages, lock)
        else:
            # In order of giving up; one behind a later fence waits a step longer than it must.
            self._retiring.append((fence, pages, lock))
            self._num_retiring += len(pages)

    def _return(self, pages: list[int], lock: _Lock | None) -> None:
        self.pool.give(pages)
        if lock is None:
            return
        self.tree.unlock(lock.node, lock.above, root=lock.closed is not None)
        if lock.closed is not None and not self.prefix_caching and self.tree.root(lock.closed).locks == 0:
            # Caching is off: only samples of one prompt share pages, and the last of them is gone.
            self.pool.give(self.tree.drop(lock.closed))

    def counts(self, tables: Iterable[PageTable]) -> PageCounts:
        """Pages by state, given all open tables."""
        held = sum(len(table.own_pages()) for table in tables)
        return PageCounts(
            free=self.pool.num_free,
            cached=self.tree.num_evictable,
            shared=self.tree.num_locked,
            held=held,
            retiring=self._num_retiring,
            total=self.pool.capacity,
        )

    def window_counts(self, tables: Iterable[PageTable]) -> PageCounts:
        """Window pages by state, given all open tables; all 0 where there are none."""
        if self.windows is None:
            return PageCounts()
        own = (len(table.window.own(table.num_shared)) for table in tables if table.window is not None)
        return PageCounts(*self.windows.counts(sum(own)))

    def state_counts(self, tables: Iterable[PageTable]) -> StateCounts:
        """Slots of states by use, given all open tables."""
        if self.states is None:
            return StateCounts()
        return self.states.counts(sum(table.state is not None for table in tables))

    def check_sums(self, tables: Iterable[PageTable], *, idle: bool = False) -> None:
        """The cheap form of `check`, for production: pages by state add up, and so do slots of states. O(open tables).

        `idle`: no step is in flight.
        """
        tables = list(tables)
        if self.states is not None:
            self.states.check_sums(sum(table.state is not None for table in tables), idle=idle)
        if not (pages := self.counts(tables)).add_up:
            raise InvariantViolation(f"pages do not add up: {pages}")
        if not (pages := self.window_counts(tables)).add_up:
            raise InvariantViolation(f"window pages do not add up: {pages}")

    def check(self, tables: Iterable[PageTable]) -> None:
        """Prove conservation: every page has exactly one owner and every lock exactly one holder.

        Raises `InvariantViolation` naming the first page that does not add up.
        """
        tables = list(tables)
        owner: dict[int, str] = {}

        def own(pages: Iterable[int], who: str) -> None:
            for page in pages:
                if page in owner:
                    raise InvariantViolation(f"page {page} is {owner[page]} and {who}")
                owner[page] = who

        own(self.pool.free_pages(), "free")
        own((node.page for node in self.tree.nodes()), "cached")
        for table in tables:
            own(table.own_pages(), "held")
        for _, pages, _ in self._retiring:
            own(pages, "retiring")
        for page in range(1, self.pool.capacity + 1):
            if page not in owner:
                raise InvariantViolation(f"page {page} leaked: neither free, cached, held nor retiring")
        self._check_locks(tables)
        if self.states is not None:
            self.states.check([table.state for table in tables if table.state is not None], self.tree.nodes())
        if self.windows is not None:
            opened = [(table.window, table.node) for table in tables if table.window is not None]
            self.windows.check(opened, self.tree.nodes())
            known = [len(table.window.pages) + table.window.first for table in tables if table.window is not None]
            if known != [len(table.pages) for table in tables]:
                raise InvariantViolation("a page in sight has no window page, or one has no page")

    def _check_locks(self, tables: list[PageTable]) -> None:
        expected: dict[Node, int] = {}
        holders = [(table.node, table.num_unlocked) for table in tables]
        holders += [(lock.node, lock.above) for _, _, lock in self._retiring if lock is not None]
        for deepest, above in holders:
            step = deepest
            while step.parent is not None and step.depth > above:
                expected[step] = expected.get(step, 0) + 1
                step = step.parent
        locked = 0
        for node in self.tree.nodes():
            if node.locks != (holders_of := expected.pop(node, 0)):
                raise InvariantViolation(f"page {node.page}: {node.locks} locks, {holders_of} holders")
            locked += node.locks > 0
        if expected:
            raise InvariantViolation(f"{len(expected)} pages are locked and not in the tree")
        if locked != self.tree.num_locked:
            raise InvariantViolation(f"{locked} locked pages, counted {self.tree.num_locked}")
        for table in tables:
            shared = table.pages[table.num_unseen : table.num_shared]
            if shared != self.tree.path_pages(table.node, table.num_unseen):
                raise InvariantViolation(f"a page table disagrees with the tree at {shared}")
