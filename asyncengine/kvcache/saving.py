"""Notes of the pages that a prefix cache has published, for a writer that copies them to a disk.

Nothing is locked for that. A page of the tree does not change while its node has it, so a writer on another
thread looks at the node again when its copy is made (`Unsaved.is_intact`): the node loses its page before the page has
another owner, so a copy whose node still has it, by the same creation, is whole. This is a sequence lock (Lameter
2005, "Effective synchronization on Linux/NUMA systems") whose writers pay nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from asyncengine.kvcache.digests import pack_tokens, page_digest
from asyncengine.kvcache.radix_tree import Namespace, Node
from asyncengine.kvcache.states import Snapshot, StateGroup
from asyncengine.step import RecordPart

MOST_UNSAVED = 2**16
"""Notes that wait to be taken, at most; beyond that the oldest are forgotten."""


class Unsaved(NamedTuple):
    """A page, window page or state that may be copied, by its number in the memory of its part."""

    part: RecordPart
    number: int
    parent: bytes
    """Digest of the page before it."""
    tokens: bytes
    """Packed tokens of its page."""
    node: Node
    created: int
    """When the node got the page."""
    snapshot: Snapshot | None = None
    states: StateGroup | None = None

    def is_intact(self) -> bool:
        """Whether a copy that was made before this call is one of what was noted. From any thread."""
        if self.states is not None:
            return self.states.snapshot_of(self.node) is self.snapshot
        return self.node.page == self.number and self.node.created == self.created


class SaveLog:
    """Notes of one cache, oldest first. Written and taken where the cache lives: on one thread."""

    def __init__(self, root: Callable[[Namespace], bytes | None], states: StateGroup | None) -> None:
        """`root`: digest of a namespace; None: nothing of it is stored."""
        self._root = root
        self._states = states
        self._notes: deque[Unsaved] = deque(maxlen=MOST_UNSAVED)
        if states is not None:
            states.hung = []

    def note(self, nodes: Sequence[Node]) -> None:
        """Note the pages of `nodes`, a path, and their window pages, where they are new."""
        for node in nodes:
            for part, owner in ((RecordPart.PAGE, node), (RecordPart.WINDOW, node.twin)):
                if owner is not None and owner.page and owner.noted != owner.created:
                    owner.noted = owner.created
                    self._note(part, owner.page, node, owner)

    def take(self) -> list[Unsaved]:
        """The notes since the last call."""
        if self._states is not None and self._states.hung:
            for snapshot in self._states.hung:
                if self._states.snapshot_of(snapshot.node) is snapshot:
                    self._note(RecordPart.STATE, snapshot.slot, snapshot.node, snapshot.node, snapshot)
            self._states.hung = []
        taken = list(self._notes)
        self._notes.clear()
        return taken

    def _note(self, part: RecordPart, number: int, node: Node, owner: Node, snapshot: Snapshot | None = None) -> None:
        parent = None if node.parent is None else self._digest(node.parent)
        if parent is not None:
            states = None if snapshot is None else self._states
            self._notes.append(
                Unsaved(part, number, parent, pack_tokens(node.tokens), owner, owner.created, snapshot, states)
            )

    def _digest(self, node: Node) -> bytes | None:
        """Digest of a page of the tree; None: it is not stored."""
        path: list[Node] = []
        while not node.digest and node.parent is not None:
            path.append(node)
            node = node.parent
        if node.parent is None:
            if node.namespace is None:
                return None  # it has left the tree
            digest = self._root(node.namespace)
        else:
            digest = node.digest
        if digest is None:
            return None
        for each in reversed(path):
            digest = each.digest = page_digest(digest, pack_tokens(each.tokens))
        return digest
