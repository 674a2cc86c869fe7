"""Pages and snapshots that running requests are about to leave in the cache: others wait for them, and compute less.

Of a model without states that is a page: a request that begins with the page that another computes waits for it.
Of a model with states it is a snapshot: a request waits while a running one will leave one on their common way, behind
where it could start now. Where their ways part is known by then, so that is where the running one is asked to.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

from asyncengine.kvcache import KVCache, PageTable
from asyncengine.kvcache.radix_tree import Namespace, Node
from asyncengine.kvcache.states import WorkingState
from asyncengine.scheduler.request import Request


class Frontiers(Protocol):
    """Made anew for each step."""

    def add(self, request: Request) -> None:
        """`request` runs from now on."""
        ...

    def foresee(self, request: Request, namespace: Namespace, limit: int, leader: Request | None = None) -> None:
        """`request` waits, and may find up to `limit` tokens cached in `namespace`: see that what it will need is left
        behind by those that run, or by `leader` if the others know."""
        ...

    def awaits(self, request: Request, table: PageTable) -> bool:
        """Whether `request`, which could start with `table`, should rather wait."""
        ...


def frontiers(kv: KVCache, running: Iterable[Request]) -> Frontiers:
    """Frontiers of the requests that run now."""
    found: Frontiers = PageFrontiers(kv) if kv.states is None else SnapshotFrontiers(kv.page_size)
    for request in running:
        found.add(request)
    return found


class PageFrontiers:
    """Pages that are about to be computed: each by its parent in the tree and its tokens."""

    def __init__(self, kv: KVCache) -> None:
        self._kv = kv
        self._pages: dict[tuple[Node, tuple[int, ...]], int] = {}

    def add(self, request: Request) -> None:
        """Note the page `request` computes next, if it is a full page of a prompt that will be published."""
        table = request.table
        if table is None or not self._kv.prefix_caching or request.num_computed >= len(request.tokens) - 1:
            return
        page = self._next_page(table, request)
        if len(page[1]) == self._kv.page_size:
            self._pages[page] = request.ticket

    def foresee(self, request: Request, namespace: Namespace, limit: int, leader: Request | None = None) -> None:
        """Whatever a request computes is left behind."""

    def awaits(self, request: Request, table: PageTable) -> bool:
        return self._next_page(table, request) in self._pages

    def _next_page(self, table: PageTable, request: Request) -> tuple[Node, tuple[int, ...]]:
        start = table.num_shared * self._kv.page_size
        return (table.node, tuple(request.tokens[start : start + self._kv.page_size]))


class SnapshotFrontiers:
    """Running requests that have snapshots yet to take."""

    most = 4
    """Snapshots of one request that are yet to come: beyond that, no further branch is noted."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._leaders: list[Request] = []

    def add(self, request: Request) -> None:
        state = None if request.table is None else request.table.state
        if state is not None and (state.marks or state.saving):
            self._leaders.append(request)

    def foresee(self, request: Request, namespace: Namespace, limit: int, leader: Request | None = None) -> None:
        for state, tokens in self._leading(namespace, self._leaders if leader is None else (leader,)):
            if request.ticket in state.common:
                continue
            common = self._common(state, tokens, request.tokens, limit)
            state.common[request.ticket] = common
            if common > state.position and common not in state.marks and len(state.marks) < self.most:
                state.marks = sorted([*state.marks, common])

    def awaits(self, request: Request, table: PageTable) -> bool:
        start = table.num_shared * self._page_size
        for state, _ in self._leading(table.namespace, self._leaders):
            common = state.common.get(request.ticket, 0)
            if any(start < mark <= common for mark in (*state.saving, *state.marks)):
                return True
        return False

    @staticmethod
    def _leading(namespace: Namespace, leaders: Iterable[Request]) -> Iterator[tuple[WorkingState, list[int]]]:
        for leader in leaders:
            table = leader.table
            if table is not None and table.state is not None and table.namespace == namespace:
                yield table.state, leader.tokens

    def _common(self, state: WorkingState, one: list[int], other: list[int], limit: int) -> int:
        """Number of tokens in full pages that the two begin with alike; 0 if less than any snapshot to come."""
        size = self._page_size
        first = state.saving[0] if state.saving else state.position + size
        if first > limit or one[first - size : first] != other[first - size : first]:
            return 0
        return common_pages(one, other, min(limit, len(one) - 1), size)


def common_pages(one: Sequence[int], other: Sequence[int], limit: int, page_size: int) -> int:
    """Number of tokens in full pages that `one[:limit]` and `other[:limit]` begin with alike."""
    same, differs = 0, limit // page_size + 1
    while differs - same > 1:
        middle = (same + differs) // 2
        span = slice(same * page_size, middle * page_size)
        if one[span] == other[span]:
            same = middle
        else:
            differs = middle
    return same * page_size
