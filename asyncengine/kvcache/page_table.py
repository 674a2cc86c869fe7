"""One running request's pages, in token order."""

from __future__ import annotations

from asyncengine.kvcache.radix_tree import Namespace, Node
from asyncengine.kvcache.states import WorkingState
from asyncengine.kvcache.window_books import WindowTable


class PageTable:
    """`pages[i]` holds positions [i * page_size, (i+1) * page_size).

    The first `num_shared` pages belong to the radix tree (locked through `node`, the deepest of them); the rest are
    this request's own. `pages` is only appended to, or replaced by a new list: steps in flight hold the old one.

    The first `num_unseen` pages are not its any more: windows have gone past them, and page 0 stands in their places.
    """

    __slots__ = ("matched", "namespace", "node", "num_unseen", "pages", "state", "window")

    def __init__(self, namespace: Namespace, node: Node, pages: list[int], num_unseen: int = 0) -> None:
        self.namespace = namespace
        self.node = node
        self.pages = pages
        self.num_unseen = num_unseen
        self.matched = node
        """The deepest cached page when it was opened: below `node` where nobody can start from this one, for want of a
        snapshot of the state or of window pages."""
        self.state: WorkingState | None = None
        """None: the model keeps none, or the request has not started."""
        self.window: WindowTable | None = None
        """Its pages in layers with windows; None: they are those of all layers."""

    @property
    def num_shared(self) -> int:
        return self.node.depth

    @property
    def num_unlocked(self) -> int:
        """How many of the first nodes on the path to `node` it has no lock on: those unseen, but never `node` itself,
        to which what is published next is joined."""
        return min(self.num_unseen, max(self.node.depth - 1, 0))

    @property
    def num_in_use(self) -> int:
        """Pages that it keeps others from."""
        return len(self.pages) - self.num_unseen + (0 < self.node.depth <= self.num_unseen)

    def own_pages(self) -> list[int]:
        return self.pages[max(self.node.depth, self.num_unseen) :]
