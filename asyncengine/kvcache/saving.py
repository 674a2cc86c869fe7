"""Notes of the pages that a prefix cache has published, or evicts, for a writer that copies them to a disk.

Nothing is locked for that. A page of the tree does not change while its node has it, so a writer on another
thread looks at the node again when its copy is made (`Unsaved.is_intact`): the node loses its page before the page has
another owner, so a copy whose node still has it, by the same creation, is whole. This is a sequence lock (Lameter
2005, "Effective synchronization on Linux/NUMA systems") whose writers pay nothing. A page that is evicted is noted as
it goes, and must be copied before the next step is launched.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from asyncengine.kvcache.radix_tree import Namespace, Node
from asyncengine.kvcache.states import Snapshot, StateGroup
from asyncengine.kvcache.store.record import pack_tokens, page_digest
from asyncengine.step import RecordType

if TYPE_CHECKING:
    from asyncengine.kvcache.kv_cache import KVCache

MOST_UNSAVED = 2**16
"""Notes that wait to be taken, at most; beyond that the oldest are forgotten."""


class Unsaved(NamedTuple):
    """A page, window page or state that may be copied, by its number in the memory of its type."""

    type: RecordType
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
    copy: bytes | None = None
    """Its bytes, where they have been copied already."""

    def is_intact(self) -> bool:
        """Whether a copy made before this call has the content that was noted. From any thread."""
        if self.copy is not None:
            return True
        if self.states is not None:  # a slot that is reused gets a new `Snapshot` object
            return self.states.snapshot_of(self.node) is self.snapshot
        return self.node.page == self.number and self.node.created == self.created


class SaveLog:
    """Notes of one cache, oldest first. Written and taken where the cache lives: on one thread."""

    def __init__(self, root: Callable[[Namespace], bytes | None], kv: KVCache, *, evicted: bool = False) -> None:
        """`root`: digest of a namespace; None: nothing of it is stored. `evicted`: pages are noted when they are
        evicted, not when they are published."""
        self._root, self._kv, self._states, self._evicted = root, kv, kv.states, evicted
        self._notes: deque[Unsaved] = deque(maxlen=MOST_UNSAVED)
        if evicted:
            kv.tree.evicting.append(self._note_all)
            if kv.windows is not None:
                kv.windows.tree.evicting.append(lambda node: self._note(RecordType.WINDOW, node.page, node, node))
        if kv.states is not None:
            setattr(kv.states, "evicting" if evicted else "hanging", self._note_state)

    def published(self, nodes: Sequence[Node]) -> None:
        """Take note of new pages in the tree, a path."""
        for node in () if self._evicted else nodes:
            self._note_page(node)

    def take(self, rest: bool = False) -> list[Unsaved]:
        """The notes since the last call. `rest`: all that is cached is about to go."""
        for node in islice(self._kv.tree.nodes(), MOST_UNSAVED) if rest and self._evicted else ():
            self._note_all(node)
        taken = list(self._notes)
        self._notes.clear()
        return taken

    def _note_all(self, node: Node) -> None:
        self._note_page(node)
        if self._states is not None and (snapshot := self._states.snapshot_of(node)) is not None:
            self._note_state(snapshot)

    def _note_state(self, snapshot: Snapshot) -> None:
        self._note(RecordType.STATE, snapshot.slot, snapshot.node, snapshot.node, snapshot)

    def _note_page(self, node: Node) -> None:
        """Note the page of `node` and its window page, where they are new."""
        for type_, owner in ((RecordType.PAGE, node), (RecordType.WINDOW, node.twin)):
            if owner is not None and owner.page and owner.noted != owner.created:
                owner.noted = owner.created
                self._note(type_, owner.page, node, owner)

    def _note(self, type_: RecordType, number: int, node: Node, owner: Node, snapshot: Snapshot | None = None) -> None:
        parent = None if node.parent is None else self._digest(node.parent)
        if parent is not None:
            states = None if snapshot is None else self._states
            self._notes.append(
                Unsaved(type_, number, parent, pack_tokens(node.tokens), owner, owner.created, snapshot, states)
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
        for page in reversed(path):
            digest = page.digest = page_digest(digest, pack_tokens(page.tokens))
        return digest
