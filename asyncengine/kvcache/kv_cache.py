"""The KV cache as the scheduler sees it: open a page table, grow it, publish it, close it.

It asks the groups that a model has: the pages of its layers (`kvcache.page_group`), window pages where only some layers
have a window, and the states of recurrent layers (`kvcache.states`). A request can start where all of them let it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from asyncengine.cache_news import PrefixCacheReset
from asyncengine.errors import InvariantViolation
from asyncengine.kvcache.block_pool import BlockPool
from asyncengine.kvcache.page_group import BESIDE, PageCounts, PageGroup
from asyncengine.kvcache.page_table import PageTable
from asyncengine.kvcache.radix_tree import STRATEGIES, Lookback, Namespace, Node, Window
from asyncengine.kvcache.states import Snapshot, StateCounts, StateGroup
from asyncengine.step import RecordType

if TYPE_CHECKING:
    from asyncengine.kvcache.saving import SaveLog

TableAndTokens = tuple[PageTable, int]
"""Page table of a running request, and the number of its tokens."""


class KVCache:
    """Pages and states of one engine. Pure bookkeeping: integers in, integers out."""

    def __init__(
        self, num_pages: int, page_size: int, *, prefix_caching: bool = True, eviction: str = "lru",
        num_states: int = 0, windows: Iterable[Window] = (), num_window_pages: int = 0, most_ahead: int = sys.maxsize,
    ) -> None:  # fmt: skip
        """`num_states`: slots for recurrent states, slot 0 included; 0: the model keeps none. `windows`: kinds of its
        attention layers. `num_window_pages`: pages of those with a window, page 0 included; 0: all layers have the same
        pages. `most_ahead`: tokens of a request that launched steps compute at a time, at most."""
        windows = tuple(windows)
        self.page_size = page_size
        self.prefix_caching = prefix_caching
        self.pool = BlockPool(num_pages)
        back = None if num_states else Lookback.of(windows)
        if back is not None and self.pages_for(back.span + page_size) + BESIDE > self.pool.capacity:
            back = None  # the window is nearly the whole pool: releasing pages would gain nothing
        self.lookback = back
        """Positions that layers see; None: all before their own, or as many as there are pages for."""
        strategy = STRATEGIES[eviction]
        self.pages = PageGroup(self.pool, page_size, strategy, self.lookback, most_ahead, keep=prefix_caching)
        self.tree = self.pages.tree
        self.states = StateGroup(num_states) if num_states else None
        if self.states is not None:
            self.tree.losing.append(self.states.forget)
            self.tree.passing.append(self.states.pass_over)
        self.windows: PageGroup | None = None
        """None: all layers have the same pages."""
        self.groups: tuple[PageGroup, ...] = (self.pages,)
        near = Lookback.of(window for window in windows if any(window))
        if num_window_pages and near is not None and not num_states:
            pool = BlockPool(num_window_pages, "window page")
            self.windows = PageGroup(pool, page_size, strategy, near, most_ahead, padded=False, keep=prefix_caching)
            self.tree.losing.append(self._drop_twin)
            self.groups = (self.windows, self.pages)  # in this order window pages go before their nodes
        self.copies = False
        """Requests start with copies of pages that others have filled in part."""
        self.saves: SaveLog | None = None
        """Notes of pages that are to be stored; None: none are."""
        self._pinned: dict[int, tuple[PageTable, Snapshot | None]] = {}
        """Tables without a request, and the snapshots at their ends, by the number of their pin."""

    def _drop_twin(self, node: Node) -> None:
        """A window page goes with the page of its tokens: nothing could be started from it."""
        if self.windows is not None and node.twin is not None:
            self.windows.drop(node.twin)
            node.twin = None

    def _tables(self, group: PageGroup, tables: Iterable[PageTable]) -> list[PageTable]:
        """The tables that `group` keeps for the requests of `tables`."""
        if group is self.pages:
            return list(tables)
        return [table.window for table in tables if table.window is not None]

    def _group_tables(self, table: PageTable) -> tuple[tuple[PageGroup, PageTable], ...]:
        """Each group with its table of the request of `table`, in the order of `groups`."""
        if self.windows is None or table.window is None:
            return ((self.pages, table),)
        return ((self.windows, table.window), (self.pages, table))

    # ---------------------------------------------------------------- room

    @property
    def num_available(self) -> int:
        """Number of pages available without preempting a request."""
        return self.pages.num_available

    @property
    def num_free(self) -> int:
        """Number of pages available without evicting a prefix that a later request may start from."""
        return min(group.pool.num_free + group.tree.num_passed for group in self.groups)

    @property
    def can_start(self) -> bool:
        """A request that starts now finds a slot for its state, if the model keeps states."""
        return self.states is None or self.states.num_available > 0

    def will_have_more(self, computed: int, launched: int) -> bool:
        """Whether waiting yields pages without a preemption: some are retiring, or a request that has computed
        `computed` tokens gives some back when its `launched` tokens are computed."""
        for group in self.groups:
            back = group.lookback
            if group.retiring or (back is not None and back.first(computed) < back.first(launched)):
                return True
        return False

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    @property
    def longest(self) -> int:
        """Tokens that one request can have, at most."""
        return self.pool.capacity * self.page_size if self.lookback is None else sys.maxsize

    def most_at_once(self, num_tokens: int, start: int) -> int:
        """Number of a request's `num_tokens` that it may compute in a step from `start` on. Less than all only where
        they are more than a pool holds, so that the request can run when it is alone."""
        return min(group.most_at_once(num_tokens, start) for group in self.groups)

    def promised(self, running: Iterable[TableAndTokens]) -> list[int]:
        """Pages of each group that `running` requests will need for the tokens they already have, and one each to go on
        decoding.

        Without the latter a newcomer takes the last page and is the first to be preempted, again and again.
        """
        promised = [0] * len(self.groups)
        for table, num_tokens in running:
            for index, (group, group_table) in enumerate(self._group_tables(table)):
                promised[index] += max(1, group.missing(group_table, num_tokens))
        return promised

    def has_room(self, table: PageTable, num_tokens: int, promised: Sequence[int]) -> bool:
        """Whether there are pages for the request of `table`, beside those `promised` to others."""
        for (group, group_table), reserved in zip(self._group_tables(table), promised, strict=True):
            if group.missing(group_table, num_tokens) + reserved > group.num_available:
                return False
        return True

    def could_have_room(self, table: PageTable, num_tokens: int, beside: Sequence[TableAndTokens]) -> bool:
        """Whether there would be pages for the request of `table` if only those `beside` it were running."""
        tables = [table, *(other for other, _ in beside), *self._pinned_tables]
        for (group, group_table), reserved in zip(self._group_tables(table), self.promised(beside), strict=True):
            in_use = {page for open_table in self._tables(group, tables) for page in open_table.pages if page}
            if len(in_use) + group.missing(group_table, num_tokens) + reserved > group.pool.capacity:
                return False
        return True

    # ---------------------------------------------------------------- requests

    def open(self, namespace: Namespace, tokens: Sequence[int], limit: int) -> PageTable:
        """A page table that begins with the longest cached prefix of `tokens[:limit]`, locked.

        `limit` is at most len(tokens) - 1 for a prompt: the last token is always computed, its logits are needed.

        Where states are kept, it begins with as much of that prefix as ends with a snapshot, and where there are window
        pages, with as much as ends with those that are seen there. The rest is computed again, into pages of the
        request's own; publishing exchanges them for those that are there.
        """
        matched = node = self.tree.match(namespace, tokens, limit)
        if self.states is not None:
            node = self.states.deepest(matched)
        window = None
        if self.windows is not None:
            twin = self.windows.tree.match(namespace, tokens, matched.depth * self.page_size)
            window = self.windows.open(namespace, twin, len(tokens), matched.depth)
            while node.depth > twin.depth:
                node = node.parent  # type: ignore[assignment]  # only a root has none, and its depth is 0
        table = self.pages.open(namespace, node, len(tokens), matched.depth)
        table.matched, table.window = matched, window
        return table

    def peek(self, namespace: Namespace, tokens: Sequence[int], limit: int) -> int:
        """Number of tokens that `open` would find. Changes nothing (policies use it)."""
        node = self.tree.peek(namespace, tokens, limit)
        if node is not None and self.states is not None:
            node = self.states.deepest(node)
        if node is not None and self.windows is not None:
            node = self.windows.tree.peek(namespace, tokens, node.depth * self.page_size)
        return 0 if node is None else node.depth * self.page_size

    def take_state(self, table: PageTable, num_tokens: int, *, shared: bool) -> bool:
        """A slot for the state of the request of `table`, which begins to run and has `num_tokens` tokens, if the model
        keeps states. False: there is none now. `shared`: its pages are published, and snapshots are left where others
        may want to start."""
        if self.states is None:
            return True
        start = table.num_shared * self.page_size
        marks: list[int] = []
        if shared:
            if table.matched.children:  # an earlier request went on differently: others may branch here, too
                marks.append(table.matched.depth * self.page_size)
            marks.append((num_tokens - 1) // self.page_size * self.page_size)  # where the same prompt starts again
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
        tables = self._group_tables(table)
        for group, _ in tables:
            if group.num_available < missing:
                return False
        for group, group_table in tables:
            group.grow(group_table, missing)
        return True

    def release(self, table: PageTable, computed: int, fence: int) -> None:
        """Give back pages that no position from `computed` on sees, the first that its request computes from now on.
        `fence`: the last launched step that names them."""
        for group, group_table in self._group_tables(table):
            group.release(group_table, computed, fence)

    def publish(self, table: PageTable, tokens: Sequence[int], computed: int, fence: int, priority: int = 0) -> None:
        """Put the full pages of `tokens[:computed]` into the tree, so that others may start from them.

        Call only after the step that wrote them has committed. `fence`: the last launched step that names them.
        """
        size = self.page_size
        starts = range(table.num_shared * size, computed - size + 1, size)
        keys = [tuple(tokens[start : start + size]) for start in starts]
        nodes = self.pages.publish(table, keys, fence, priority)
        if self.windows is not None and table.window is not None:
            twins = self.windows.publish(table.window, keys, fence, priority)
            for node, twin in zip(nodes[len(nodes) - len(twins) :], twins, strict=True):
                node.twin = twin
        if self.saves is not None:
            self.saves.published(nodes)

    def close(self, table: PageTable, fence: int) -> None:
        """The request is done with its pages and its state; they return when step `fence` has retired."""
        if table.state is not None and self.states is not None:
            self.states.close(table.state, table.node, self.page_size, fence)
            table.state = None
        for group, group_table in self._group_tables(table):
            group.close(group_table, fence)

    def clear(self) -> None:
        """Forget all that is cached: other weights would compute other values. Nothing may be held or retiring."""
        if any(group.retiring for group in self.groups) or self.drop_unused(None).in_use:
            raise InvariantViolation("a cache is cleared while its pages are in use")

    def drop_unused(self, salt: str | None) -> PrefixCacheReset:
        """Forget pages with this salt (None: any) that no request holds, with their states and window pages."""
        for group in self.groups:
            roots = [root for namespace, root in group.tree.roots.items() if salt is None or namespace[1] == salt]
            dropped = [page for root in roots for page in group.tree.drop(root)]
            group.pool.give(dropped)
            counts = len(dropped), sum(1 for _ in group.tree.nodes(roots))
        return PrefixCacheReset(*counts)

    # ---------------------------------------------------------------- pinned prefixes

    def pin(self, number: int, namespace: Namespace, tokens: Sequence[int]) -> None:
        """Lock the cached prefix of `tokens` until `unpin` of the same number, as if a request used it."""
        table = self.open(namespace, tokens, len(tokens))
        self._pinned[number] = table, None if self.states is None else self.states.keep(table.node)

    def unpin(self, number: int) -> None:
        """Undo `pin`. Does nothing where nothing is pinned."""
        table, snapshot = self._pinned.pop(number, (None, None))
        if self.states is not None and snapshot is not None:
            self.states.keep_no_more(snapshot)
        if table is not None:
            self.close(table, 0)  # steps in flight name its pages by locks of their own

    @property
    def pins(self) -> list[int]:
        """Numbers of all pins."""
        return list(self._pinned)

    def is_pinned(self, number: int) -> bool:
        """Whether there is such a pin. From any thread: what was copied of its pages before this is True is whole."""
        return number in self._pinned

    def pinned(self, number: int) -> tuple[Namespace, int, list[tuple[RecordType, int, int]]]:
        """(namespace, number of pages, where their memory is) of a pin; the last as (type of record, index of the page
        in the prefix, index in the pool). From any thread. Raises `KeyError` where there is no such pin any more."""
        table, snapshot = self._pinned[number]
        addresses = [(RecordType.PAGE, *page) for page in table.numbered(0)]
        if table.window is not None:
            addresses += [(RecordType.WINDOW, *page) for page in table.window.numbered(0)]
        if snapshot is not None:
            addresses.append((RecordType.STATE, table.num_shared - 1, snapshot.slot))
        return table.namespace, table.num_shared, addresses

    @property
    def _pinned_tables(self) -> list[PageTable]:
        return [table for table, _ in self._pinned.values()]

    # ---------------------------------------------------------------- pages from elsewhere

    def begin_restore(self, namespace: Namespace, tokens: Sequence[int], num_pages: int) -> PageTable | None:
        """A table like a request's, with new pages for those of the first `num_pages` full pages of `tokens` that are
        not cached. None: all are cached meanwhile, or there are not enough pages. The caller has checked that there is
        room for the request (`has_room`); pages that a window has passed by then are not in the table."""
        size = self.page_size
        table = self.open(namespace, tokens, num_pages * size)
        if table.num_shared < num_pages:
            for depth in range(table.num_shared + 1, num_pages + 1) if self._any_windows else (num_pages,):
                if not self.grow(table, depth * size):
                    break
                self.release(table, depth * size, 0)
            if table.num_pages >= num_pages:
                return table
        self.close(table, 0)
        return None

    def end_restore(self, table: PageTable, tokens: Sequence[int], num_pages: int, priority: int) -> None:
        """The first `num_pages` pages of `tokens` have been read into `table`, and are published; the rest goes back.
        `table.node` is the last of them then."""
        if num_pages < table.num_pages and self._any_windows:
            num_pages = 0  # it ended early, and pages that the windows pass by the full length were not read
        self.publish(table, tokens, num_pages * self.page_size, 0, priority)
        self.tree.share(table.node)
        self.close(table, 0)

    @property
    def _any_windows(self) -> bool:
        return any(group.lookback is not None for group in self.groups)

    def retire(self, step: int) -> None:
        """Steps up to `step` have finished: nothing reads what only they named."""
        if self.states is not None:
            self.states.retire(step)
        for group in self.groups:
            group.retiring.retire(step)

    # ---------------------------------------------------------------- conservation and counts

    def counts(self, tables: Iterable[PageTable]) -> PageCounts:
        """Pages by state, given all open tables."""
        return self.pages.counts(tables)

    def window_counts(self, tables: Iterable[PageTable]) -> PageCounts:
        """Window pages by state, given all open tables; all 0 where there are none."""
        return PageCounts() if self.windows is None else self.windows.counts(self._tables(self.windows, tables))

    def state_counts(self, tables: Iterable[PageTable]) -> StateCounts:
        """Slots of states by use, given all open tables."""
        if self.states is None:
            return StateCounts()
        return self.states.counts(sum(table.state is not None for table in tables))

    def check_sums(self, tables: Iterable[PageTable], *, idle: bool = False) -> None:
        """The cheap form of `check`, for production: pages by state add up, and so do slots of states. O(open tables).

        `idle`: no step is in flight.
        """
        tables = [*tables, *self._pinned_tables]
        if self.states is not None:
            self.states.check_sums(sum(table.state is not None for table in tables), idle=idle)
        for group in self.groups:
            pages = group.counts(self._tables(group, tables))
            if pages.free + pages.cached + pages.shared + pages.held + pages.retiring != pages.total:
                raise InvariantViolation(f"{group.pool.noun}s do not add up: {pages}")

    def check(self, tables: Iterable[PageTable]) -> None:
        """Prove conservation of pages and states. Raises `InvariantViolation` naming the first that does not add up."""
        tables = [*tables, *self._pinned_tables]
        for group in self.groups:
            group.check(self._tables(group, tables))
        if self.states is not None:
            self.states.check([table.state for table in tables if table.state is not None], self.tree.nodes())
        if self.windows is not None:
            if not {node.twin for node in self.tree.nodes()}.issuperset(self.windows.tree.nodes()):
                raise InvariantViolation("a window page is cached, and the page of its tokens is not")
            if [each.num_pages for each in self._tables(self.windows, tables)] != [len(each.pages) for each in tables]:
                raise InvariantViolation("a page in sight has no window page, or one has no page")
