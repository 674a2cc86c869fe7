"""Page table of one running request: its pages in token order."""

from __future__ import annotations

from dataclasses import dataclass, field

from asyncengine.kvcache.radix_tree import Branches, Namespace, Node, Span
from asyncengine.kvcache.states import WorkingState


@dataclass(slots=True, eq=False)
class PageTable:
    """Pages of one group: `pages[i]` holds positions [(first + i) * page_size, (first + i + 1) * page_size).

    The first `num_shared` pages belong to the radix tree (locked through `node`, the deepest of them); the rest are
    this request's own. `pages` is only appended to, or replaced by a new list: steps in flight hold the old one.

    The first `num_unseen` pages are not its any more, for windows have gone past them. In a list that starts at
    `first` = 0, page 0 stands in their places; a table of window pages starts behind them.
    """

    namespace: Namespace
    node: Node
    pages: list[int]
    num_unseen: int = 0
    first: int = 0
    ends: tuple[Span, ...] = ()
    """Spans of its path that are in sight of where others may want to start: kept longest when it has passed."""
    state: WorkingState | None = None
    """None: the model keeps none, or the request has not started."""
    branches: Branches | None = None
    """The session of its request; None: it belongs to none."""
    window: PageTable | None = None
    """Table of its window pages; None: all layers have the same pages."""
    matched: Node = field(init=False)
    """The deepest cached page when it was opened: below `node` where no request can start from this one, for want of a
    snapshot of the state or of window pages."""

    def __post_init__(self) -> None:
        self.matched = self.node

    @property
    def num_shared(self) -> int:
        return self.node.depth

    @property
    def num_pages(self) -> int:
        """Number of pages up to the last one, including those given back."""
        return self.first + len(self.pages)

    @property
    def num_unlocked(self) -> int:
        """Nodes at the beginning of the path to `node` on which it has no lock: those unseen, but never `node` itself,
        to which the next published page is joined."""
        return min(self.num_unseen, max(self.node.depth - 1, 0))

    def numbered(self, start: int) -> tuple[tuple[int, int], ...]:
        """(index among all pages, page) of those from index `start` on that its windows see."""
        first = max(start, self.num_unseen)
        return tuple(enumerate(self.pages[first - self.first :], first))

    def own_pages(self) -> list[int]:
        return self.pages[max(self.node.depth, self.num_unseen) - self.first :]
