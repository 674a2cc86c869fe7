"""Would the fuzz notice? Each test plants one bug in what is done with states, and the fuzz must find it.

Books and the fake device find them at once. Where both look away (`lenient`), the tokens must show it: they depend on
states.
"""

from __future__ import annotations

from typing import Any

import pytest
from support.long import LONG
from worlds.grammar_fuzz import GrammarLife
from worlds.plants import Plant, in_place_of
from worlds.schedule_fuzz import Life

from asyncengine.errors import InvariantViolation
from asyncengine.kvcache.states import Snapshot, StateGroup
from asyncengine.scheduler import rows, scheduler
from asyncengine.scheduler.request import Request
from asyncengine.step import StateUse
from asyncengine.testing.fake_runner import FakeStates


@in_place_of(StateGroup, "use")
def share_a_state(use: Any, self: StateGroup, working: Any, *args: Any) -> Any:
    """Two requests are told that slot 1 is theirs."""
    made = use(self, working, *args)
    return StateUse(1, 1 if made.source == made.slot else made.source, made.saves)


def move_a_snapshot_by(tokens: int) -> Plant:
    def plant(patch: pytest.MonkeyPatch) -> None:
        use, settle = StateGroup.use, StateGroup.settle

        def broken(self: StateGroup, working: Any, start: int, end: int, *args: Any) -> StateUse:
            made = use(self, working, start, end, *args)
            saves = ((min(position + tokens, end), slot) for position, slot in made.saves)
            return StateUse(made.slot, made.source, tuple(saves))

        def settled(self: StateGroup, saves: Any, *args: Any) -> None:
            settle(self, [(max(1, position // args[2]) * args[2], slot) for position, slot in saves], *args)

        patch.setattr(StateGroup, "use", broken)
        patch.setattr(StateGroup, "settle", settled)

    plant.__name__ = f"take a snapshot {tokens} token late"
    return plant


@in_place_of(StateGroup, "settle")
def hang_it_on_another_page(settle: Any, self: StateGroup, saves: Any, working: Any, node: Any, page_size: int) -> None:
    """A snapshot is that of the page before."""
    before = {position: max(page_size, position - page_size) for position, _ in saves}
    working.saving = [before.get(position, position) for position in working.saving]
    settle(self, [(before[position], slot) for position, slot in saves], working, node, page_size)


def free_under_a_running_step(patch: pytest.MonkeyPatch) -> None:
    """A slot is handed out again while a launched step still writes it."""
    close = StateGroup.close
    patch.setattr(StateGroup, "close", lambda *args: close(*args[:-1], 0))


def evict_what_is_read(patch: pytest.MonkeyPatch) -> None:
    """A snapshot is given up while the step that starts from it has not run."""
    patch.setattr(Snapshot, "readers", property(lambda self: 0, lambda self, count: None))


def keep_the_snapshots_of_who_failed(patch: pytest.MonkeyPatch) -> None:
    """A snapshot that was being taken for somebody who has left is never given back."""
    patch.setattr(StateGroup, "discard", lambda self, saves: None)


@in_place_of(StateGroup, "close")
def a_snapshot_of_a_moved_state(
    close: Any, self: StateGroup, working: Any, node: Any, page_size: int, fence: int
) -> None:
    """A state counts as that of the last published page wherever it is."""
    if fence <= self._retiring.retired and node.depth:
        working.position = node.depth * page_size
    close(self, working, node, page_size, fence)


def launch_on_a_guess(patch: pytest.MonkeyPatch) -> None:
    """A constrained row is launched before its last token is known, and again once a grammar has replaced that."""

    def overlaps(request: Request) -> bool:
        return len(request.tokens) + request.num_pending < request.spec.max_total

    patch.setattr(rows, "may_overlap", overlaps)
    patch.setattr(scheduler, "may_overlap", overlaps)
    use = StateGroup.use

    def broken(self: StateGroup, working: Any, start: int, *args: Any) -> Any:
        working.position = start
        return use(self, working, start, *args)

    patch.setattr(StateGroup, "use", broken)


@in_place_of(StateGroup, "use")
def a_trail_that_is_another_state(use: Any, self: StateGroup, working: Any, *args: Any) -> StateUse:
    """A request stays in the slot that it should leave, and the other one counts as what it left."""
    before = working.slot
    made = use(self, working, *args)
    if working.slot == before:
        return made
    working.slot = working.source = before
    working.trail = made.slot
    self._trails = {each.trail: each for each in self._trails.values()}
    return StateUse(before, made.source, made.saves)


@in_place_of(StateGroup, "close")
def a_trail_a_page_further(close: Any, self: StateGroup, working: Any, node: Any, page_size: int, fence: int) -> None:
    """It counts as that of the next page, if there is one."""
    working.trail_position += page_size
    close(self, working, node, page_size, fence)


PLANTS: list[Plant] = [
    a_trail_that_is_another_state, a_trail_a_page_further, share_a_state, move_a_snapshot_by(1),
    hang_it_on_another_page, free_under_a_running_step, evict_what_is_read, a_snapshot_of_a_moved_state,
]  # fmt: skip
IN_ORDER = [free_under_a_running_step]
"""Bugs that the books and the retire rule alone see: the fake device runs one step after another, as a stream does."""
IN_TOKENS = [plant for plant in PLANTS if plant not in IN_ORDER]
FOUND = (AssertionError, InvariantViolation, ValueError, IndexError, KeyError)


def lenient(patch: pytest.MonkeyPatch) -> None:
    init = FakeStates.__init__

    def careless(self: FakeStates, num_slots: int) -> None:
        init(self, num_slots)
        self.strict = False

    patch.setattr(FakeStates, "__init__", careless)
    patch.setattr(StateGroup, "check", lambda self, working, nodes: None)
    patch.setattr(StateGroup, "check_sums", lambda self, num_working, *, idle: None)
    patch.setattr(Life, "check_retire_rule", lambda self, batch: None)


FIRST = (33, 9, 14)
"""Lives that show what others seldom do: they are lived first, to be quick."""


def lives(kind: type[Life], count: int) -> None:
    for seed in (*FIRST, *range(count)):
        kind(seed, depth=2, states=True).run()


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.__name__)
def test_the_fuzz_finds(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises(FOUND):
        lives(Life, 40)


@pytest.mark.parametrize("plant", IN_TOKENS if LONG else IN_TOKENS[::2], ids=lambda plant: plant.__name__)
def test_the_tokens_alone_tell(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    lenient(monkeypatch)
    with pytest.raises(AssertionError, match="wrong tokens"):
        lives(Life, 40)


def test_the_fuzz_finds_snapshots_that_are_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    keep_the_snapshots_of_who_failed(monkeypatch)
    with pytest.raises(InvariantViolation, match="state slot"):
        lives(Life, 20)


@pytest.mark.parametrize("careful", [True, False])
def test_the_fuzz_with_grammars_finds_what_is_launched_on_a_guess(
    careful: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch_on_a_guess(monkeypatch)
    if not careful:
        lenient(monkeypatch)
    with pytest.raises(AssertionError):
        lives(GrammarLife, 40)
