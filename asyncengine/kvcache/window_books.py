"""Which pages of the windowed layers hold what, in a model in which other layers see everything.

A page has one number for all layers that see everything, and a request keeps those pages to its end. Layers with a
window or a chunk would waste theirs behind it, so their keys and values lie in a pool of their own, of *window pages*.
A running request has one for each of its pages that its next token's windows see, and for what is being computed; what
no later token sees goes back (`release`). The idea is SGLang's (`SWARadixCache`: two pools, one tree).

**In the tree** a node may have a window page (`Node.window`) or have lost it. A prefix can be started from where all
pages that its next position sees have one (`deepest`); what the tree knows beyond that is computed again, into pages of
the request's own, and publishing fills what had been lost. A node's window page may go while its page stays, never the
other way round.

**What goes first.** A window page that its last reader has gone past is of use to nobody, unless somebody else's way
parts there. So of those that nobody locks, the ones in sight of an *end* are kept longest, least recently used first: a
request's last page, its prompt's last full page, and how far the tree knew it when it came. The others go before them.

**Conservation**: free + cached + shared + held + retiring = capacity, always. The **retire rule** holds here too: what
a launched step names is not handed out before that step has retired.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from asyncengine.errors import InvariantViolation
from asyncengine.kvcache.block_pool import BlockPool
from asyncengine.kvcache.radix_tree import Node
from asyncengine.kvcache.sight import Sight

Span = tuple[int, int]
"""Depths of a path: those above the first, up to the second."""

BESIDE = 3
"""Pages that a request may hold beside as many as its window and what is computed fill: its window may begin and end
anywhere in a page, and one is written next."""


class WindowTable:
    """A running request's window pages: `pages[i]` goes with page `first + i` of its page table.

    `pages` is only appended to, or replaced by a new list: steps in flight hold the old one.
    """

    __slots__ = ("ends", "first", "pages")

    def __init__(self, first: int, pages: list[int], ends: tuple[Span, ...]) -> None:
        self.first = first
        self.pages = pages
        self.ends = ends
        """Of its path, what is in sight of where others may want to start."""

    def own(self, num_shared: int) -> list[int]:
        """Those that are not the tree's, of a request whose first `num_shared` pages are."""
        return self.pages[max(num_shared - self.first, 0) :]


class _Given(NamedTuple):
    """What a request has given up, and a step in flight may name."""

    fence: int
    pages: list[int]
    node: Node
    above: int
    """It is locked from this depth on, down to `node`."""
    ends: tuple[Span, ...]


class WindowBooks:
    """Window pages of one engine. Pure bookkeeping, as that of `KVCache`, which owns the tree."""

    def __init__(self, num_pages: int, page_size: int, sight: Sight, most_ahead: int) -> None:
        """`num_pages` with page 0. `sight`: of the layers with windows. `most_ahead`: tokens that launched steps
        compute at a time. Raises `ValueError` if a request alone could not go on."""
        self.pool = BlockPool(num_pages, "window page")
        self.sight = sight
        self._size = page_size
        self._most_ahead = most_ahead
        if self.most_at_once < 1:
            raise ValueError(f"{num_pages} window pages of {page_size} tokens do not hold what a token sees")
        self._kept: dict[int, Node] = {}
        """In the tree and nobody's, by page, least recently used first."""
        self._passed: dict[int, Node] = {}
        """Likewise, those that nobody is expected to start from."""
        self.num_locked = 0
        """Nodes whose window page a request is using."""
        self._retired = 0
        self._retiring: list[_Given] = []
        """By fence."""
        self._num_retiring = 0

    # ---------------------------------------------------------------- room

    @property
    def num_available(self) -> int:
        """That can be had now."""
        return self.pool.num_free + len(self._kept) + len(self._passed)

    @property
    def num_idle(self) -> int:
        """Free, or of use to nobody."""
        return self.pool.num_free + len(self._passed)

    @property
    def anything_retiring(self) -> bool:
        return bool(self._retiring)

    @property
    def most_at_once(self) -> int:
        """Tokens that a request may compute in a step, so that it can run when it is alone."""
        return (self.pool.capacity - BESIDE) * self._size - self.sight.span

    def missing(self, table: WindowTable, num_tokens: int) -> int:
        """How many more than `table` has its request will hold at a time, to have `num_tokens` computed."""
        ahead = min(self._most_ahead, num_tokens)
        most = min(-(-(self.sight.span + ahead) // self._size) + BESIDE, self.pool.capacity)
        return min(-(-num_tokens // self._size) - table.first, most) - len(table.pages)

    # ---------------------------------------------------------------- running requests

    def open(self, node: Node, ends: Iterable[int]) -> WindowTable:
        """Of a request that starts behind `node`, which `deepest` has found: what its next position sees, locked.
        `ends`: depths behind which others may want to start."""
        first = self.unseen(node.depth)
        pages = []
        for each in _up(node, first):
            self._lock(each)
            pages.append(each.window)
        return WindowTable(first, pages[::-1], tuple((self.unseen(end), end) for end in ends))

    def grow(self, table: WindowTable, count: int) -> None:
        """`count` more pages, evicting others if need be. The caller has checked `num_available`."""
        for _ in range(count - self.pool.num_free):
            self._evict()
        table.pages.extend(self.pool.take(count))

    def release(self, table: WindowTable, node: Node, computed: int, fence: int) -> None:
        """Give back what no position from `computed` on sees. `node`: the request's last page in the tree. Its own
        pages are free, and those of the tree unlocked, once step `fence`, which may name them, has retired."""
        unseen = self.sight.first(computed) // self._size
        if unseen <= table.first:
            return
        shared, first = node.depth, table.first
        own = table.pages[max(shared - first, 0) : unseen - first]
        table.pages = table.pages[unseen - first :]
        table.first = unseen
        last = node
        while last.depth > unseen:
            last = last.parent  # type: ignore[assignment]  # only a root has none, and its depth is 0
        self._give_back(_Given(fence, own, last, min(first, last.depth), table.ends))

    def join(self, table: WindowTable, nodes: Iterable[Node], fence: int) -> None:
        """The request has published `nodes`, one behind the other: its window pages are theirs, where they have none.
        Where they do, these take the place of its own, which return when step `fence` has retired."""
        pages, duplicates, last = table.pages, [], None
        for node in nodes:
            place, last = node.depth - 1 - table.first, node
            if place < 0:
                continue
            if not node.window:
                node.window = pages[place]
                node.window_locks = 1
                self.num_locked += 1
                continue
            self._lock(node)
            if pages is table.pages:
                pages = list(pages)
            duplicates.append(pages[place])
            pages[place] = node.window
        table.pages = pages
        if duplicates and last is not None:
            self._give_back(_Given(fence, duplicates, last, last.depth, ()))

    def close(self, table: WindowTable, node: Node, fence: int) -> None:
        """The request is done with its pages; they return when step `fence` has retired."""
        ends = (*table.ends, (self.unseen(node.depth), node.depth))
        self._give_back(_Given(fence, table.own(node.depth), node, min(table.first, node.depth), ends))

    def retire(self, step: int) -> None:
        """Steps up to `step` have finished: nothing reads what only they named."""
        self._retired = step
        done = 0
        while done < len(self._retiring) and self._retiring[done].fence <= step:
            self._num_retiring -= len(self._retiring[done].pages)
            self._return(self._retiring[done])
            done += 1
        del self._retiring[:done]

    def _give_back(self, given: _Given) -> None:
        if given.fence <= self._retired:
            self._return(given)
            return
        # In order of fences, so that no lock is here when the request's pages have left the tree.
        place = len(self._retiring)
        while place and self._retiring[place - 1].fence > given.fence:
            place -= 1
        self._retiring.insert(place, given)
        self._num_retiring += len(given.pages)

    def _return(self, given: _Given) -> None:
        self.pool.give(given.pages)
        for node in _up(given.node, given.above):
            if node.window_locks <= 0:
                raise InvariantViolation(f"window page {node.window} unlocked more often than locked")
            node.window_locks -= 1
            if not node.window_locks:
                self.num_locked -= 1
                kept = any(above < node.depth <= end for above, end in given.ends)
                (self._kept if kept else self._passed)[node.window] = node

    # ---------------------------------------------------------------- the tree

    def unseen(self, depth: int) -> int:
        """How many of the first `depth` pages the position after them does not see."""
        return self.sight.first(depth * self._size) // self._size

    def deepest(self, node: Node) -> Node:
        """The deepest node on the way from `node` up behind which a request can start: all that its next position sees
        is there."""
        found, step, unseen = node, node, self.unseen(node.depth)
        while step.parent is not None and step.depth > unseen:
            if not step.window:
                found = step.parent
                unseen = self.unseen(found.depth)
            step = step.parent
        return found

    def forget(self, node: Node) -> None:
        """`node` leaves the tree, and its window page with it."""
        if node.window_locks:
            raise InvariantViolation(f"window page {node.window} is in use, and its page leaves the cache")
        self._unlist(node)
        self.pool.give((node.window,))
        node.window = 0

    def _lock(self, node: Node) -> None:
        if not node.window_locks:
            self._unlist(node)
            self.num_locked += 1
        node.window_locks += 1

    def _unlist(self, node: Node) -> None:
        if self._kept.pop(node.window, None) is None and self._passed.pop(node.window, None) is None:
            raise InvariantViolation(f"window page {node.window} is nobody's, and not in the cache")

    def _evict(self) -> None:
        """Free the window page that is least worth keeping."""
        listed = self._passed or self._kept
        page = next(iter(listed))
        listed.pop(page).window = 0
        self.pool.give((page,))

    # ---------------------------------------------------------------- books

    def counts(self, num_held: int) -> tuple[int, int, int, int, int, int]:
        """(free, cached, shared, held, retiring, total); `num_held`: requests' own."""
        cached = len(self._kept) + len(self._passed)
        return self.pool.num_free, cached, self.num_locked, num_held, self._num_retiring, self.pool.capacity

    def check(self, tables: Iterable[tuple[WindowTable, Node]], nodes: Iterable[Node]) -> None:
        """Prove that every window page has one owner and every lock its holder. `tables`: of all open page tables, with
        their last nodes; `nodes`: all of the tree's. Raises `InvariantViolation` naming the first that does not add up.
        """
        owner: dict[int, str] = {}

        def own(pages: Iterable[int], who: str) -> None:
            for page in pages:
                if page in owner:
                    raise InvariantViolation(f"window page {page} is {owner[page]} and {who}")
                owner[page] = who

        tables, nodes = list(tables), [node for node in nodes if node.window or node.window_locks]
        own(self.pool.free_pages(), "free")
        own((node.window for node in nodes), "cached")
        for table, node in tables:
            own(table.own(node.depth), "held")
        for given in self._retiring:
            own(given.pages, "retiring")
        for page in range(1, self.pool.capacity + 1):
            if page not in owner:
                raise InvariantViolation(f"window page {page} leaked: neither free, cached, held nor retiring")
        listed = {**self._kept, **self._passed}
        if listed != {node.window: node for node in nodes if not node.window_locks}:
            raise InvariantViolation(f"window pages {sorted(listed)} are listed as cached")
        self._check_locks(tables, nodes)

    def _check_locks(self, tables: list[tuple[WindowTable, Node]], nodes: list[Node]) -> None:
        expected: dict[Node, int] = {}
        holders = [(node, table.first) for table, node in tables]
        for deepest, above in [*holders, *((given.node, given.above) for given in self._retiring)]:
            for step in _up(deepest, above):
                expected[step] = expected.get(step, 0) + 1
        for node in nodes:
            if node.window_locks != (count := expected.pop(node, 0)):
                raise InvariantViolation(f"window page {node.window}: {node.window_locks} locks, {count} holders")
        if expected:
            raise InvariantViolation(f"{len(expected)} window pages are locked and not in the tree")
        if self.num_locked != (locked := sum(node.window_locks > 0 for node in nodes)):
            raise InvariantViolation(f"{locked} locked window pages, counted {self.num_locked}")
        for table, node in tables:
            shared = [each.window for each in _up(node, table.first)][::-1]
            if table.pages[: len(shared)] != shared:
                raise InvariantViolation(f"a table of window pages disagrees with the tree at {shared}")


def _up(node: Node, above: int) -> Iterator[Node]:
    """From `node` up to the depth after `above`."""
    while node.parent is not None and node.depth > above:
        parent = node.parent
        yield node
        node = parent
