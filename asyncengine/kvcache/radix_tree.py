"""The prefix cache: a radix tree whose digit is one page of tokens.

The idea is SGLang's RadixAttention (Zheng et al. 2024): keys and values of finished or running prompts stay in a
tree keyed by their tokens, and a new prompt starts where its longest cached prefix ends. Here every edge is exactly
one full page (`page_size` tokens), so nodes never split, a match costs one dictionary lookup a page, and eviction
works page by page. Tokens are compared, not only hashed (vLLM CVE-2025-25183), and each namespace has a root of its
own, so an adapter's or a tenant's pages are unreachable from any other (a request of another namespace never even
compares with them).

A locked node (`locks > 0`) is in use by `locks` requests below or at it; a lock covers the whole path to the root.

**Windows** (`lookback`): where no layer sees further back than that many positions, a lock covers only the end of a
path, and a page goes when it is its turn, whatever hangs below it. Its node stays as a *hole* (page 0) while it has
children. A prefix is found where all pages are there that its next position sees (SGLang's `SWARadixCache` keeps
tombstones for this). Holes take no page; each is a key of tokens, at most as many above a page as there are pages
before it. A page that its readers have *passed*, out of sight of where a request may want to start, is evicted before
all others.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import NamedTuple

from asyncengine.cache_news import page_hash, root_hash
from asyncengine.errors import InvariantViolation
from asyncengine.kvcache.cache_log import CacheLog

Namespace = tuple[Hashable, ...]
Span = tuple[int, int]
"""Depths of a path: those above the first, up to the second."""
Window = tuple[int, int]
"""(window, chunk) of a layer's attention, as in `attention.base.LayerSpec`; 0: it has none."""


class Lookback(NamedTuple):
    """Positions that layers see all of which have a window or a chunk: those that no later token sees need not be kept.

    A page has one number for all layers: a single one that sees everything keeps all pages."""

    windows: tuple[Window, ...]

    @classmethod
    def of(cls, windows: Iterable[Window]) -> Lookback | None:
        """Lookback of layers with these windows. None: some see everything, or there are no layers."""
        distinct = tuple(sorted(set(windows)))
        return cls(distinct) if distinct and all(any(window) for window in distinct) else None

    @property
    def span(self) -> int:
        """Largest number of positions before its own that a token sees."""
        return max(min(size for size in window if size) - 1 for window in self.windows)

    def first(self, position: int) -> int:
        """The first position that `position` and those after it see."""
        return min(
            max(position - window + 1 if window else 0, position // chunk * chunk if chunk else 0, 0)
            for window, chunk in self.windows
        )


class Branches:
    """The ends of a session's branches (`kvcache.sessions`), and when it will be back for them."""

    __slots__ = ("back", "closed", "expiry", "patience", "tips")

    def __init__(self) -> None:
        self.tips: dict[Node, int | None] = {}
        """Last pages of its branches, oldest first, with the groups of the requests that left them."""
        self.back = 0
        """Tick at which its next request is expected, or came; 0: it is not known."""
        self.patience = self.expiry = math.inf
        """Seconds after its last request at which it is closed, and the clock reading of that; inf: by its owner."""
        self.closed = False

    def rank(self, last_used: int, now: int) -> int:
        """The tick of last use by which a page of the session ranks. An order by last use expects the next use as far
        ahead as the last one lies back; a page that is wanted at `back` ranks as if it was used as long before now."""
        return min(2 * now - self.back, max(self.back, last_used)) if self.back else last_used


class Node:
    """One cached page; the root of a namespace has depth 0 and no page, nor has a hole."""

    __slots__ = (
        "children", "created", "depth", "digest", "hash", "hits", "last_used", "locks", "namespace", "noted", "owner",
        "page", "parent", "passed", "priority", "private", "queued", "state", "tips", "tokens", "twin",
    )  # fmt: skip

    def __init__(self, parent: Node | None, tokens: tuple[int, ...], page: int, tick: int, priority: int) -> None:
        self.parent = parent
        self.tokens = tokens
        self.page = page
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.children: dict[tuple[int, ...], Node] = {}
        self.locks = 0
        self.hits = 0
        self.created = tick
        self.last_used = tick
        self.priority = priority
        self.queued = False  # has an entry in the eviction heap
        self.state = 0  # slot of the snapshot of the recurrent state after this page (`kvcache.states`); 0: none
        self.twin: Node | None = None  # node of the same tokens in the tree of window pages
        self.passed = False  # no request is expected to start from here
        self.private = False  # only sessions have used it
        self.owner: Branches | None = None  # the session that used it last
        self.tips: tuple[Branches, ...] = ()  # sessions of which a branch ends here
        self.namespace: Namespace | None = None  # roots only
        self.hash = 0  # where logs are kept
        self.digest = b""  # where pages are stored (`kvcache.saving`): that of its records; b"": not known yet
        self.noted = -1  # likewise: when the page was created that was noted last


EvictionKey = Callable[[Node, int], tuple[int, ...]]
"""Key of a cached page and the tick of its last use (`eviction`), of which the smallest goes first when memory is
needed. It may only grow while the node lives: the tree revalidates lazily."""


def tick_of(reading: float) -> int:
    """The tick of a reading of the engine's clock."""
    return int(reading * 1e6)


class RadixTree:
    """Cached pages by (namespace, tokens). Holds page ids only; giving evicted ids back is the caller's business."""

    def __init__(self, page_size: int, strategy: EvictionKey, lookback: Lookback | None = None) -> None:
        """`lookback`: how far back the model looks; None: to the beginning, and there are no holes."""
        self.page_size = page_size
        self.strategy = strategy
        self.lookback = lookback
        self.num_pages = 0
        self.num_locked = 0
        """Pages in the tree, and those of them that a request is using now."""
        self.num_passed = 0
        """Number of pages that no request uses or is expected to start from."""
        self.losing: list[Callable[[Node], None]] = []
        """Called with each node whose page leaves the tree."""
        self.evicting: list[Callable[[Node], None]] = []
        """Called before, where others take its memory."""
        self.passing: list[Callable[[Node], None]] = []
        """Called with each node from which no request is expected to start any more."""
        self.logs: tuple[CacheLog, ...] = ()
        """Told of every page that comes or goes. Without logs no hashes are computed."""
        self.roots: dict[Namespace, Node] = {}
        """The root of each namespace that has pages or is locked."""
        self._heap: list[tuple[object, int, Node]] = []  # what `evict` may take, by a key that may be out of date
        self._tick = self._now = 0

    @property
    def num_evictable(self) -> int:
        """Pages that `evict` can free. Every unlocked page counts: the subtree below it is unlocked too, or the page is
        behind the windows of all readers."""
        return self.num_pages - self.num_locked

    def root(self, namespace: Namespace) -> Node:
        root = self.roots.get(namespace)
        if root is None:
            root = self.roots[namespace] = Node(None, (), 0, self._tick, 0)
            root.namespace = namespace
            if self.logs:
                root.hash = root_hash(namespace)
        return root

    def keep_log(self, limit: int) -> CacheLog:
        """A log that is told of every page that comes or goes from now on, and keeps at most `limit` of them."""
        stack = [] if self.logs else list(self.roots.values())
        for node in stack:  # which grows
            before = root_hash(node.namespace or ()) if node.parent is None else node.parent.hash
            node.hash = before if node.parent is None else page_hash(before, node.tokens)
            stack += node.children.values()
        log = CacheLog(limit)
        self.logs += (log,)
        return log

    def peek(self, namespace: Namespace, tokens: Sequence[int], limit: int) -> Node | None:
        """The node that `match` would find; None: no request of the namespace is known. Changes nothing."""
        node = self.roots.get(namespace)
        return None if node is None else self._walk(node, tokens, limit)

    def match(self, namespace: Namespace, tokens: Sequence[int], limit: int) -> Node:
        """Deepest node whose path spells a prefix of `tokens[:limit]`, marked as used now: of its path, what the
        position after it sees."""
        node = self._walk(self.root(namespace), tokens, limit)
        self._tick += 1
        unseen = self.num_unseen(node.depth)
        step: Node | None = node
        while step is not None and step.depth > unseen:
            step.last_used = self._tick
            step.hits += 1
            step = step.parent
        return node

    def num_unseen(self, depth: int) -> int:
        """Number of the first `depth` pages that the position after them does not see."""
        return 0 if self.lookback is None else self.lookback.first(depth * self.page_size) // self.page_size

    def _walk(self, node: Node, tokens: Sequence[int], limit: int) -> Node:
        size, deepest, hole = self.page_size, node, 0
        for start in range(0, limit - size + 1, size):
            child = node.children.get(tuple(tokens[start : start + size]))
            if child is None:
                break
            node = child
            if not node.page:
                hole = node.depth
            elif not hole or hole <= self.num_unseen(node.depth):  # the next position does not see the hole
                deepest = node
        return deepest

    def path_pages(self, node: Node, above: int = 0) -> list[int]:
        """Pages from the root to `node`, in order of their tokens, without the first `above`."""
        pages = []
        while node.parent is not None and node.depth > above:
            pages.append(node.page)
            node = node.parent
        pages.reverse()
        return pages

    def lock(self, node: Node, above: int = 0) -> None:
        """Protect `node` and its ancestors from eviction, but for the first `above` pages of the path; and its root
        from being forgotten. One `unlock` undoes it."""
        step: Node | None = node
        while step is not None:
            if step.depth > above or step.parent is None:
                if step.locks == 0 and step.parent is not None:
                    self.num_locked += 1
                    self._pass(step, False)
                step.locks += 1
            step = step.parent

    def unlock(self, node: Node, above: int = 0, *, root: bool = True, ends: Sequence[Span] = ()) -> None:
        """Undo `lock`. Without `root`: of the path alone, whose lock goes on from `node` down. `ends`: spans of a path
        from which others may want to start; in a tree with windows, all else of it has been passed."""
        step: Node | None = node
        while step is not None:
            parent = step.parent  # read first: `_settle` may unlink the node
            if step.depth > above or (root and parent is None):
                if step.locks <= 0:
                    raise InvariantViolation(f"page {step.page} unlocked more often than locked")
                step.locks -= 1
                if step.locks == 0:
                    if parent is not None:
                        self.num_locked -= 1
                        behind = self.lookback is not None and not any(a < step.depth <= end for a, end in ends)
                        if behind or self._is_unclaimed(step):
                            self._pass(step, True)
                    self._settle(step)
            step = parent

    def extend(
        self, node: Node, tokens: tuple[int, ...], page: int, priority: int, owner: Branches | None = None
    ) -> Node:
        """The child of `node` for one full page of `tokens`, which must be written (its step committed).

        If another request published the same tokens first, the existing child is returned and the caller must use its
        page in place of its own (mini-sglang #142: not doing so is a use-after-free). The caller holds a lock on
        `node` and it moves to the child: lock counts on the path stay right. `owner`: the session of the request.
        """
        self._tick += 1
        child = self.pass_over(node, tokens)
        if not child.page:
            child.created, child.priority = self._tick, priority
            child.private = owner is not None or node.private
            child.page = page  # set last: a copying thread checks `page` and `created` in `Unsaved.is_intact`
            self.num_pages += 1
            for log in self.logs:
                log.note(child)
        child.last_used = self._tick
        child.owner = owner
        child.priority = min(child.priority, priority)
        if child.locks == 0:
            self.num_locked += 1
            self._pass(child, False)
        child.locks += 1
        return child

    def advance(self, now: float) -> None:
        """Let ticks be microseconds of the clock. Keys that depend on the time stay as they are until the next call."""
        self._now = self._tick = max(self._tick, tick_of(now))

    def share(self, node: Node) -> None:
        """Note that a request outside of sessions has used the path to `node`: it is not theirs alone."""
        while node.private:
            node.private = False
            node = node.parent  # type: ignore[assignment]  # roots are not private

    def pass_unclaimed(self, node: Node) -> None:
        """Note of the end of the path to `node` that no request is expected to start there."""
        while self._is_unclaimed(node):
            self._pass(node, True)
            if self._may_go(node):
                self._queue(node)
            node = node.parent  # type: ignore[assignment]  # roots are not private

    def rank_anew(self, nodes: Iterable[Node]) -> None:
        """The keys of `nodes` have become smaller: note them."""
        for node in nodes:
            if self._may_go(node):
                node.queued = False
                self._queue(node)

    def _is_unclaimed(self, node: Node) -> bool:
        """Whether only sessions have used the page, and no branch of theirs leads there."""
        if not node.private or node.locks or node.tips or not node.page:
            return False
        return all(child.passed or not child.page for child in node.children.values())

    def pass_over(self, node: Node, tokens: tuple[int, ...]) -> Node:
        """The child of `node` for a page of `tokens` that the caller has not any more, as it is; else a hole, which
        something must be joined to."""
        child = node.children.get(tokens)
        if child is None:
            child = node.children[tokens] = Node(node, tokens, 0, self._tick, 0)
            if self.logs:
                child.hash = page_hash(node.hash, tokens)
        return child

    def evict(self, count: int) -> list[int]:
        """Remove up to `count` unlocked pages in the strategy's order; their ids. Leaves go before their parents, but
        where there are windows."""
        pages: list[int] = []
        while len(pages) < count and self._heap:
            key, _, node = heapq.heappop(self._heap)
            node.queued = False
            if not self._may_go(node):
                continue  # used again, or grown, since it was queued; unlocking or losing the child queues it anew
            if self._key(node) != key:
                self._queue(node)
                continue
            for tell in self.evicting:
                tell(node)
            pages.append(self.remove(node))
        return pages

    def drop(self, root: Node) -> list[int]:
        """Remove all pages of the namespace of `root` that no request uses. Their ids."""
        return [self.remove(node) for node in reversed(list(self.nodes([root]))) if not node.locks]

    def nodes(self, roots: Iterable[Node] | None = None) -> Iterator[Node]:
        """Node of every page below `roots`, or of the tree, parents first."""
        stack = list(self.roots.values() if roots is None else roots)
        while stack:
            node = stack.pop()
            if node.page:
                yield node
            stack.extend(node.children.values())

    def _may_go(self, node: Node) -> bool:
        """Whether no request uses the page, and it is a leaf where leaves go first."""
        return not (node.locks or not node.page or node.parent is None or (node.children and self.lookback is None))

    def _settle(self, node: Node) -> None:
        """`node` has just lost its last lock or its last child."""
        while not node.page and not node.children and not node.locks and node.parent is not None:
            parent = node.parent  # a hole that nothing hangs on
            del parent.children[node.tokens]
            node.parent = None
            node = parent
        if self._may_go(node):
            self._queue(node)
        elif node.namespace is not None and not node.locks and not node.children:
            self.roots.pop(node.namespace, None)

    def _key(self, node: Node) -> tuple[bool, tuple[int, ...]]:
        last_used = node.last_used if node.owner is None else node.owner.rank(node.last_used, self._now)
        return not node.passed, self.strategy(node, last_used)

    def _pass(self, node: Node, passed: bool) -> None:
        """Note whether `node` has been passed. Its key becomes smaller, so it must be queued once more."""
        if node.passed != passed:
            node.passed = passed
            self.num_passed += 1 if passed else -1
            for tell in self.passing if passed else ():
                tell(node)
            node.queued = node.queued and not passed

    def _queue(self, node: Node) -> None:
        if node.queued:
            return
        if len(self._heap) > 2 * self.num_pages + 64:  # entries of dropped or relocked nodes pile up: rebuild
            for _, _, stale in self._heap:
                stale.queued = False
            self._heap = []
            for live in self.nodes():
                if self._may_go(live) and live is not node:
                    self._queue(live)
        node.queued = True
        self._tick += 1  # unique: ties are broken by age in the heap, and nodes are never compared
        heapq.heappush(self._heap, (self._key(node), self._tick, node))

    def remove(self, node: Node) -> int:
        """Take the page of the unused `node` out of the tree, with all that goes with it; returns it. A node with
        children becomes a hole."""
        parent = node.parent
        if parent is None or node.locks:
            raise InvariantViolation(f"page {node.page} removed while it is a root, or locked")
        for tell in self.losing:
            tell(node)
        self._pass(node, False)
        for owner in node.tips:  # its branch ends a page earlier now
            group = owner.tips.pop(node)
            if parent.page and parent not in owner.tips:
                owner.tips[parent] = group
                parent.tips += (owner,)
        node.tips, node.owner, node.private = (), None, False
        self.num_pages -= 1
        page, node.page = node.page, 0
        for log in self.logs:
            log.note(node)
        if not node.children:
            del parent.children[node.tokens]
            node.parent = None
            self._settle(parent)
        return page


STRATEGIES: dict[str, EvictionKey] = {
    "lru": lambda node, last_used: (last_used,),
    "lfu": lambda node, last_used: (node.hits, last_used),  # least often matched
    "fifo": lambda node, last_used: (node.created,),  # oldest, used or not
    "priority": lambda node, last_used: (-node.priority, last_used),  # a larger number is a less important request
}
"""Keys by name. `MemorySettings.eviction` has the same names, so that settings need no cache."""
