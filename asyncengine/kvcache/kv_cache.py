"""The KV cache as the scheduler sees it: open a page table, grow it, publish it, close it.

Composes the free list, the radix tree and the books of recurrent states, and keeps the **retire rule**: whatever a
launched step names (a page, a lock on cached pages, a state) returns only when that step has retired. With one step in
flight everything returns at once; overlap scheduling needs no other code (mini-sglang #89, vLLM-Ascend #16315 are what
happens without it).

**Conservation**: free + cached + held + retiring = capacity, always; `check` proves it page by page.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from asyncengine.errors import InvariantViolation
from asyncengine.kvcache.block_pool import BlockPool
from asyncengine.kvcache.cache_log import CacheLog, CacheNews
from asyncengine.kvcache.eviction import eviction_strategy
from asyncengine.kvcache.page_table import PageTable
from asyncengine.kvcache.radix_tree import Namespace, Node, RadixTree
from asyncengine.kvcache.states import StateBooks, StateCounts


@dataclass(frozen=True, slots=True)
class PageCounts:
    """Pages by state; they add up to `total`."""

    free: int
    cached: int
    """In the radix tree and evictable."""
    shared: int
    """In the radix tree and in use by requests."""
    held: int
    """Owned by single requests."""
    retiring: int
    """Given up, but a step in flight still names them."""
    total: int


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
    ) -> None:
        """`num_states`: slots for recurrent states, slot 0 included; 0: the model keeps none."""
        self.page_size = page_size
        self.prefix_caching = prefix_caching
        self.pool = BlockPool(num_pages)
        self.tree = RadixTree(page_size, eviction_strategy(eviction))
        self._retired = 0
        self._retiring: deque[tuple[int, list[int], Node | None, Namespace]] = deque()
        self._num_retiring = 0
        self.states: StateBooks | None = None
        if num_states:
            self.states = StateBooks(num_states)
            self.tree.losing_state = self.states.forget

    @property
    def num_available(self) -> int:
        """Pages that can be had now, without preempting anybody."""
        return self.pool.num_free + self.tree.num_evictable

    @property
    def anything_retiring(self) -> bool:
        """Pages or locks are on their way back: they need no preemption, only patience."""
        return bool(self._retiring)

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

    def open(self, namespace: Namespace, tokens: Sequence[int], limit: int) -> PageTable:
        """A page table that begins with the longest cached prefix of `tokens[:limit]`, locked.

        `limit` is at most len(tokens) - 1 for a prompt: the last token is always computed, its logits are needed.

        Where states are kept, it begins with as much of that prefix as ends with a snapshot. The rest is computed
        again, into pages of the request's own; publishing exchanges them for those that are there.
        """
        matched = self.tree.match(namespace, tokens, limit)
        node = matched if self.states is None else self.states.deepest(matched)
        self.tree.lock(node)
        table = PageTable(namespace, node, self.tree.path_pages(node))
        table.matched = matched
        return table

    def peek(self, namespace: Namespace, tokens: Sequence[int], limit: int) -> int:
        """How many tokens `open` would find. Changes nothing (policies use it)."""
        node = self.tree.peek(namespace, tokens, limit)
        if node is not None and self.states is not None:
            node = self.states.deepest(node)
        return 0 if node is None else node.depth * self.page_size

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
        table.matched = table.node  # it may be evicted from now on
        return table.state is not None

    def grow(self, table: PageTable, num_tokens: int) -> bool:
        """Make room for `num_tokens` in `table`, evicting cached pages if need be. False: nothing changed."""
        missing = self.pages_for(num_tokens) - len(table.pages)
        if missing <= 0:
            return True
        if missing > self.num_available:
            return False
        short = missing - self.pool.num_free
        if short > 0:
            self.pool.give(self.tree.evict(short))
        table.pages.extend(self.pool.take(missing))
        return True

    def publish(self, table: PageTable, tokens: Sequence[int], computed: int, fence: int, priority: int = 0) -> None:
        """Put the full pages of `tokens[:computed]` into the tree, so that others may start from them.

        Call only after the step that wrote them has committed. Where another request was first, its page replaces
        ours in a new page list, and ours returns once step `fence`, which may still name it, has retired.
        """
        size = self.page_size
        duplicates: list[int] = []
        pages = table.pages
        node = table.node
        for index in range(node.depth, computed // size):
            key = tuple(tokens[index * size : (index + 1) * size])
            node = self.tree.extend(node, key, pages[index], priority)
            if node.page != pages[index]:
                if pages is table.pages:
                    pages = list(pages)
                duplicates.append(pages[index])
                pages[index] = node.page
        table.node = node
        table.pages = pages
        if duplicates:
            self._give_back(duplicates, None, table.namespace, fence)

    def close(self, table: PageTable, fence: int) -> None:
        """The request is done with its pages and its state; they return when step `fence` has retired."""
        if table.state is not None and self.states is not None:
            self.states.close(table.state, table.node, self.page_size, fence)
            table.state = None
        self._give_back(table.own_pages(), table.node, table.namespace, fence)

    def clear(self) -> None:
        """Forget all that is cached, since it would be computed otherwise now. Nothing may be held or retiring."""
        if self._retiring:
            raise InvariantViolation("a cache is cleared while steps in flight name its pages")
        self.pool.give(self.tree.clear())

    def retire(self, step: int) -> None:
        """Steps up to `step` have finished: nothing reads what only they named."""
        self._retired = step
        if self.states is not None:
            self.states.retire(step)
        while self._retiring and self._retiring[0][0] <= step:
            _, pages, node, namespace = self._retiring.popleft()
            self._num_retiring -= len(pages)
            self._return(pages, node, namespace)

    def _give_back(self, pages: list[int], node: Node | None, namespace: Namespace, fence: int) -> None:
        if fence <= self._retired:
            self._return(pages, node, namespace)
        else:
            # In order of giving up; one behind a later fence waits a step longer than it must.
            self._retiring.append((fence, pages, node, namespace))
            self._num_retiring += len(pages)

    def _return(self, pages: list[int], node: Node | None, namespace: Namespace) -> None:
        self.pool.give(pages)
        if node is None:
            return
        self.tree.unlock(node)
        if not self.prefix_caching and self.tree.root(namespace).locks == 0:
            # Caching is off: only samples of one prompt share pages, and the last of them is gone.
            self.pool.give(self.tree.drop(namespace))

    def counts(self, tables: Iterable[PageTable]) -> PageCounts:
        """Pages by state, given all open tables."""
        held = sum(len(table.pages) - table.num_shared for table in tables)
        return PageCounts(
            free=self.pool.num_free,
            cached=self.tree.num_evictable,
            shared=self.tree.num_locked,
            held=held,
            retiring=self._num_retiring,
            total=self.pool.capacity,
        )

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
        pages = self.counts(tables)
        if pages.free + pages.cached + pages.shared + pages.held + pages.retiring != pages.total:
            raise InvariantViolation(f"pages do not add up: {pages}")

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
        for _, pages, _, _ in self._retiring:
            own(pages, "retiring")
        for page in range(1, self.pool.capacity + 1):
            if page not in owner:
                raise InvariantViolation(f"page {page} leaked: neither free, cached, held nor retiring")
        self._check_locks(tables)
        if self.states is not None:
            self.states.check([table.state for table in tables if table.state is not None], self.tree.nodes())

    def _check_locks(self, tables: list[PageTable]) -> None:
        expected: dict[Node, int] = {}
        holders = [table.node for table in tables] + [node for _, _, node, _ in self._retiring if node is not None]
        for holder in holders:
            node: Node | None = holder
            while node is not None:
                expected[node] = expected.get(node, 0) + 1
                node = node.parent
        locked = 0
        for node in self.tree.nodes():
            if node.locks != expected.get(node, 0):
                raise InvariantViolation(f"page {node.page}: {node.locks} locks, {expected.get(node, 0)} holders")
            locked += node.locks > 0
        if locked != self.tree.num_locked:
            raise InvariantViolation(f"{locked} locked pages, counted {self.tree.num_locked}")
        for table in tables:
            if table.pages[: table.num_shared] != self.tree.path_pages(table.node):
                raise InvariantViolation(f"a page table disagrees with the tree at {table.pages[: table.num_shared]}")
