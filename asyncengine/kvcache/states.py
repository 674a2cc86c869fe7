"""Slots of recurrent states: those of running requests, and snapshots that others start from.

A state (`layers.states`) is all that state layers keep of a sequence after some number of its tokens. It can be
copied, but not cut: a request can start behind a cached prefix only where an earlier request left a snapshot of the
state. One pool of slots serves both. A running request always wins over a snapshot; a snapshot takes a free slot or
that of the least recently used one. A state is large, so there are few, and they are taken only where they will be
found: at a prompt's last full page, and where paths branch.

Snapshots hang on nodes of the radix tree (`Node.state`) and go with them. One that its only reader has gone past, on a
path that does not branch there (an earlier turn of a chat), goes first: with plain LRU, a user of the end of such a
chain keeps all of it fresh, and the chains of others lose their ends (SGLang #36935).

**Trails.** Where an answer will end is not known, and its state there is what the next turn of a chat would start from.
So at each page that an answer fills, its request goes on in another slot and leaves the state in the one it had.
Nothing is copied, and the state at the last full page is there when the request ends. There are few trails, and a
request that is to run takes the slot of one, if need be.

**Guesses.** A state cannot be taken back, so a row with drafts leaves the state before each of them in a slot of its
own, and goes on in the slot before the first wrong one. Nothing is copied or computed again.

**Conservation**: free + working + snapshots + saving + retiring = capacity, always.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import chain

from asyncengine.errors import InvariantViolation
from asyncengine.kvcache.block_pool import BlockPool
from asyncengine.kvcache.radix_tree import Node
from asyncengine.kvcache.retiring import Retiring
from asyncengine.step import StateUse


@dataclass(frozen=True, slots=True)
class StateCounts:
    """Slots of recurrent states by use; the first five add up to `total`. All 0: the model keeps none."""

    free: int = 0
    working: int = 0
    """Slots of running requests, of the trails of their answers, and of states between guesses."""
    snapshots: int = 0
    saving: int = 0
    """Slots of snapshots that launched steps are taking, or that are read from a disk."""
    retiring: int = 0
    """Slots given up that a step in flight still names."""
    total: int = 0
    hits: int = 0
    """Admissions that started from a snapshot, since the start."""
    evictions: int = 0
    """Snapshots that made room for something else, since the start."""


@dataclass(slots=True, eq=False)
class Snapshot:
    """The state after a node's last token."""

    slot: int
    node: Node
    readers: int = 0
    """Requests whose first step reads it and has not retired."""


@dataclass(slots=True, eq=False)
class WorkingState:
    """State of a running request: its slot, and the positions where it will leave snapshots."""

    slot: int
    source: int
    """Slot that its next row starts from: a snapshot's, or 0, the state before any token; then its own."""
    position: int
    """Tokens that its state has taken in once all launched steps have run, but for guesses. It only moves forward."""
    origin: Node
    """The last node of its path that had a snapshot when it passed."""
    marks: list[int]
    """Positions behind `position` at which snapshots are to be taken, ascending."""
    saving: list[int] = field(default_factory=list)
    """Positions at which launched steps are taking one."""
    unread: Snapshot | None = None
    """The snapshot it starts from, until a step is launched that reads it."""
    common: dict[int, int] = field(default_factory=dict)
    """Ticket of a waiting request -> how many tokens of full pages the two have in common."""
    follows: bool = False
    """Others may want to start from where it ends."""
    trail: int = 0
    """A slot with its state at `trail_position`, the last full page of its answer; 0: it has none."""
    trail_position: int = 0
    trail_step: int = 0
    """The launched step that reads it."""


_SHARE = 4
"""One slot of this many may be a trail, and one lie between guesses: else there might be no room for snapshots."""


class StateGroup:
    """Slots of one engine's states, 1 .. num_slots - 1. Slot 0 is the state before any token, and has no owner."""

    def __init__(self, num_slots: int) -> None:
        self.pool = BlockPool(num_slots, "state slot")
        self.capacity = self.pool.capacity
        self.snapshots: dict[int, Snapshot] = {}
        """Snapshots by slot, least recently used first."""
        self._passed: dict[int, Snapshot] = {}
        """Snapshots that no request is expected to start from again, likewise."""
        self.saving: dict[int, None] = {}
        """Slots into which a launched step saves a state."""
        self._trails: dict[int, WorkingState] = {}
        """States of running requests by the slot of their trail, oldest first."""
        self._most_trails = self.capacity // _SHARE
        self._guessed: set[int] = set()
        """Slots between the guesses of launched steps."""
        self._retiring: Retiring[int] = Retiring(lambda slot: self.pool.give((slot,)))
        self.reading: Retiring[Snapshot] = Retiring(lambda snapshot: self._pin(snapshot, -1))
        """Snapshots that launched steps read, pinned until then."""
        self._arriving: dict[int, None] = {}
        """Slots into which a stored state is being read."""
        self._kept: list[Snapshot] = []
        """Snapshots of pinned prefixes."""
        self.hanging: Callable[[Snapshot], None] | None = None
        """Called with each new snapshot."""
        self.evicting: Callable[[Snapshot], None] | None = None
        """Called with each snapshot whose slot is taken for something else."""
        self._num_pinned = 0
        self._hits = self._evictions = 0

    # ---------------------------------------------------------------- running requests

    @property
    def num_available(self) -> int:
        """Slots that a request could have now."""
        at_once = self.pool.num_free + len(self.snapshots) + len(self._passed) - self._num_pinned
        retired = self._retiring.retired
        return at_once + sum(working.trail_step <= retired for working in self._trails.values())

    def start(self, node: Node, position: int, marks: list[int]) -> WorkingState | None:
        """A working slot for a request that starts from the snapshot of `node` (a root: from no token at all), to be
        taken from a snapshot if need be. None: not now."""
        snapshot = self.snapshot_of(node)
        self._pin(snapshot, 1)  # or `_take` might evict the snapshot that the request starts from
        slot = self._take() or self._take_trail()
        if not slot:
            self._pin(snapshot, -1)
            if snapshot is None or snapshot.readers:
                return None
            self._evict(snapshot)  # no slot but the one it starts from: it takes that
            slot, working = snapshot.slot, WorkingState(snapshot.slot, snapshot.slot, position, node, marks)
        else:
            working = WorkingState(slot, node.state, position, node, marks)
            working.unread = snapshot
        if snapshot is not None:
            self._hits += 1
            self._touch(node)
        return working

    @property
    def most_guesses(self) -> int:
        """Number of guesses that a step may carry now, all rows together."""
        evictable = len(self.snapshots) + len(self._passed) - self._num_pinned
        return min(self.capacity // _SHARE - len(self._guessed), self.pool.num_free + evictable)

    def use(
        self, working: WorkingState, start: int, end: int, step: int, full: bool = False, guesses: int = 0
    ) -> StateUse:
        """Slots that a row over the positions [start, end) of launched step `step` reads and writes, with up to
        `guesses` guesses behind them, fewer where slots are short. `full`: it begins with a page of the answer, so that
        a trail may be left there."""
        if working.position != start:
            raise InvariantViolation(f"a row starts at {start}, but its state is that of position {working.position}")
        if working.unread is not None:
            self.reading.add(working.unread, step)
            working.unread = None
        saves = self._plan_saves(working, end) if working.marks and working.marks[0] <= end else ()
        if full and working.follows and working.source == working.slot:
            self._move_on(working, start, step)
        between = tuple(self._take() for _ in range(min(guesses, self.most_guesses))) if guesses else ()
        self._guessed.update(between)
        use = StateUse(working.slot, working.source, saves, between)
        working.source = working.slot
        working.position = end
        return use

    def _plan_saves(self, working: WorkingState, end: int) -> tuple[tuple[int, int], ...]:
        saves = []
        while working.marks and working.marks[0] <= end:
            position = working.marks.pop(0)
            slot = self._take()
            if slot:
                self.saving[slot] = None
                working.saving.append(position)
                saves.append((position, slot))
        return tuple(saves)

    def _move_on(self, working: WorkingState, position: int, step: int) -> None:
        """Leave the state of `position` where it is, and go on in the slot of the trail before it, or in another."""
        slot = self._trails.pop(working.trail, working).trail
        if not slot and len(self._trails) < self._most_trails:
            slot = self._take()
        if slot:
            working.trail, working.slot = working.slot, slot
            working.trail_position, working.trail_step = position, step
            self._trails[working.trail] = working

    def settle_guesses(
        self, use: StateUse, working: WorkingState | None = None, accepted: int = 0, computed: int = 0,
        trail: int | None = None,
    ) -> None:  # fmt: skip
        """Take back the slots between guesses of a retired step, of which `computed` were computed and `accepted` were
        right. `working`: the request's state, which goes on from the last right one; None: the result does not count.
        `trail`: number of accepted guesses up to the last page that they fill of its answer; None: they fill none."""
        free = set(use.guesses)
        self._guessed -= free
        if working is not None:
            if trail is not None and working.follows and (working.trail or len(self._trails) < self._most_trails):
                free.add(self._trails.pop(working.trail, working).trail)
                working.trail, working.trail_position = use.guesses[trail], working.position + trail
                working.trail_step = self._retiring.retired
                self._trails[working.trail] = working
            if accepted < computed:
                free.add(working.slot)
                working.slot = working.source = use.guesses[accepted]
            working.position += accepted
            free -= {working.trail, working.slot}
        self.pool.give(sorted(free - {0}))

    def _take_trail(self) -> int:
        """The slot of the oldest trail that no launched step reads; 0: there is none."""
        retired = self._retiring.retired
        working = next((state for state in self._trails.values() if state.trail_step <= retired), None)
        if working is None:
            return 0
        slot, working.trail = working.trail, 0
        del self._trails[slot]
        self._evictions += 1
        return slot

    def _leave_trail(self, working: WorkingState, node: Node, page_size: int) -> None:
        """The request ends: its trail becomes a snapshot, if the page it belongs to is published and has none."""
        slot, depth = working.trail, working.trail_position // page_size
        working.trail = 0
        del self._trails[slot]
        while node.depth > depth:
            node = node.parent  # type: ignore[assignment]  # only a root has none, and its depth is 0
        if (node.depth != depth or node.state) and working.trail_step > self._retiring.retired:
            self._retiring.add(slot, working.trail_step)
            return
        self._hang(slot, working, node, depth)
        if (snapshot := self.snapshot_of(node)) is not None:
            self._pin(snapshot, 1)
            self.reading.add(snapshot, working.trail_step)

    def settle(self, saves: Iterable[tuple[int, int]], working: WorkingState, node: Node, page_size: int) -> None:
        """The step that took `saves` has retired. They hang on the path to `node`, the last published page, now."""
        for position, slot in saves:
            del self.saving[slot]
            working.saving.remove(position)
            self._hang(slot, working, node, position // page_size)

    def discard(self, saves: Iterable[tuple[int, int]]) -> None:
        """Give back `saves` of a request that has ended, or whose results do not count."""
        for _, slot in saves:
            del self.saving[slot]
            self.pool.give((slot,))

    def close(self, working: WorkingState, node: Node, page_size: int, fence: int) -> None:
        """The request is done with its slot, which returns when step `fence` has retired.

        If nothing is in flight and its state is that of its last published page, it becomes that page's snapshot.
        """
        self._pin(working.unread, -1)
        working.unread = None
        if working.trail:
            self._leave_trail(working, node, page_size)
        if fence <= self._retiring.retired and working.position and working.position == node.depth * page_size:
            self._hang(working.slot, working, node, node.depth)
        else:
            self._retiring.add(working.slot, fence)

    def retire(self, step: int) -> None:
        """Steps up to `step` have finished: nothing reads or writes what only they named."""
        self.reading.retire(step)
        self._retiring.retire(step)

    # ---------------------------------------------------------------- snapshots

    @staticmethod
    def deepest(node: Node) -> Node:
        """The deepest node with a snapshot on the way from `node` up; the root if there is none."""
        while node.parent is not None and not node.state:
            node = node.parent
        return node

    def _touch(self, node: Node) -> None:
        """Note that a request starts from here: this one, and those at branch points above, are used now."""
        used = [self._passed.pop(node.state)] if node.state in self._passed else []
        step: Node | None = node
        while step is not None:
            if step.state in self.snapshots:
                used.append(self.snapshots.pop(step.state))
            step = step.parent
        for snapshot in reversed(used):
            self.snapshots[snapshot.slot] = snapshot

    def forget(self, node: Node) -> None:
        """`node` leaves the tree, and its snapshot with it."""
        snapshot = self.snapshot_of(node)
        if snapshot is None:
            return
        if snapshot.readers:
            raise InvariantViolation(f"state slot {snapshot.slot} is read, and its page leaves the cache")
        self._remove(snapshot)
        self.pool.give((snapshot.slot,))
        self._evictions += 1

    def pass_over(self, node: Node) -> None:
        """No request is expected to start from the snapshot of `node`, if it has one."""
        if node.state in self.snapshots:
            self._passed[node.state] = self.snapshots.pop(node.state)

    def reserve(self) -> int:
        """A slot for a state that is read from somewhere else; 0: there is none now."""
        slot = self._take()
        if slot:
            self._arriving[slot] = None
        return slot

    def settle_reserved(self, slot: int, node: Node | None) -> None:
        """The reserved slot is the snapshot of `node` now, if that has none; None: it goes back to the free ones."""
        del self._arriving[slot]
        self._attach(slot, node)  # it may come from elsewhere than where they are kept

    def snapshot_of(self, node: Node) -> Snapshot | None:
        """The snapshot that hangs on `node`: another object for each time that one was taken."""
        return self.snapshots.get(node.state) or self._passed.get(node.state)

    def keep(self, node: Node) -> Snapshot | None:
        """Keep the snapshot of `node`, if it has one, until `keep_no_more`."""
        snapshot = self.snapshot_of(node)
        if snapshot is not None:
            self._kept.append(snapshot)
            self._pin(snapshot, 1)
        return snapshot

    def keep_no_more(self, snapshot: Snapshot) -> None:
        """Undo `keep`."""
        self._kept.remove(snapshot)
        self._pin(snapshot, -1)

    def _hang(self, slot: int, working: WorkingState, node: Node, depth: int) -> None:
        """Make `slot` the snapshot of the node in `depth` pages on the path to `node`, if that has none."""
        while node.depth > depth:
            node = node.parent  # type: ignore[assignment]  # only a root has none, and its depth is 0
        self._attach(slot, None if node.depth < depth else node)
        origin = working.origin
        if node.depth > origin.depth and len(origin.children) < 2:
            self.pass_over(origin)
        working.origin = node

    def _attach(self, slot: int, node: Node | None) -> None:
        """Make `slot` the snapshot of `node`; free again where there is none, or it has one."""
        if node is None or node.state:
            self.pool.give((slot,))
            return
        node.state = slot
        self.snapshots[slot] = Snapshot(slot, node)
        if self.hanging is not None:
            self.hanging(self.snapshots[slot])

    def _take(self) -> int:
        """A free slot, else the one of the snapshot that is least worth keeping; 0: all are in use."""
        if not self.pool.num_free:
            in_order = chain(self._passed.values(), self.snapshots.values())
            victim = next((snapshot for snapshot in in_order if not snapshot.readers), None)
            if victim is None:
                return 0
            self._evict(victim)
            return victim.slot
        return self.pool.take(1)[0]

    def _evict(self, snapshot: Snapshot) -> None:
        if self.evicting is not None:
            self.evicting(snapshot)
        self._remove(snapshot)
        self._evictions += 1

    def _remove(self, snapshot: Snapshot) -> None:
        snapshot.node.state = 0
        if self.snapshots.pop(snapshot.slot, None) is None:
            del self._passed[snapshot.slot]

    def _pin(self, snapshot: Snapshot | None, count: int) -> None:
        """One reader more, or one less: a snapshot with any is not evicted."""
        if snapshot is None:
            return
        before = snapshot.readers
        snapshot.readers += count
        if snapshot.readers < 0:
            raise InvariantViolation(f"state slot {snapshot.slot} has a negative number of readers")
        self._num_pinned += (snapshot.readers > 0) - (before > 0)

    # ---------------------------------------------------------------- conservation and counts

    def counts(self, num_working: int) -> StateCounts:
        return StateCounts(
            free=self.pool.num_free, working=num_working + len(self._trails) + len(self._guessed),
            snapshots=len(self.snapshots) + len(self._passed), saving=len(self.saving) + len(self._arriving),
            retiring=len(self._retiring), total=self.capacity, hits=self._hits, evictions=self._evictions,
        )  # fmt: skip

    def check_sums(self, num_working: int, *, idle: bool) -> None:
        """The cheap form of `check`. `idle`: no step is in flight."""
        counts = self.counts(num_working)
        if counts.free + counts.working + counts.snapshots + counts.saving + counts.retiring != counts.total:
            raise InvariantViolation(f"state slots do not add up: {counts}")
        if idle and (self.saving or self._guessed or counts.retiring or self.reading):
            raise InvariantViolation(f"state slots wait for a step, and none is in flight: {counts}")

    def check(self, working: Iterable[WorkingState], nodes: Iterable[Node]) -> None:
        """Prove that every slot has exactly one owner and every snapshot its node and its readers.

        `nodes`: all of the tree's. Raises `InvariantViolation` naming the first slot that does not add up.
        """
        working = list(working)
        hung = {node.state: node for node in nodes if node.state}
        owned: list[tuple[str, Iterable[int]]] = [("working", [each.slot for each in working])]
        owned += [("a trail", [each.trail for each in working if each.trail]), ("saving", self.saving)]
        owned += [("a snapshot", self.snapshots), ("a snapshot", self._passed), ("retiring", self._retiring)]
        owned += [("arriving", self._arriving), ("between guesses", self._guessed)]
        self.pool.check(owned)
        if self._trails != {each.trail: each for each in working if each.trail}:
            raise InvariantViolation(f"trails {sorted(self._trails)} are not those of running requests")
        snapshots = {**self._passed, **self.snapshots}
        if {slot: each.node for slot, each in snapshots.items()} != hung:
            raise InvariantViolation(f"snapshots {sorted(snapshots)}, but the tree's are {sorted(hung)}")
        readers = [*self._kept, *self.reading, *(each.unread for each in working if each.unread is not None)]
        for snapshot in snapshots.values():
            if snapshot.readers != (count := readers.count(snapshot)):
                raise InvariantViolation(
                    f"state slot {snapshot.slot}: {snapshot.readers} readers, of which {count} are"
                )
        if self._num_pinned != sum(each.readers > 0 for each in snapshots.values()):
            raise InvariantViolation(f"{self._num_pinned} snapshots counted as read")
