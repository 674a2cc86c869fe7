"""Would the grammar fuzz notice? Each test plants one bug of constrained generation, and the fuzz must find it."""

from __future__ import annotations

from typing import Any

import pytest
from support.long import LONG
from worlds.grammar_fuzz import Breaking, GrammarLife
from worlds.plants import Plant, in_place_of

from asyncengine.errors import EngineError
from asyncengine.grammar.closing.closing import Closing
from asyncengine.grammar.matcher import Matcher
from asyncengine.scheduler import results
from asyncengine.scheduler.request import Request
from asyncengine.scheduler.results import InFlight, Results
from asyncengine.scheduler.roster import Roster
from asyncengine.step import StepResult
from asyncengine.testing import FakeExecutor


@in_place_of(Results, "apply")
def append_forced_tokens_twice(apply: Any, self: Results, flown: InFlight, result: StepResult, now: float) -> None:
    result.further = {row: (*forced, *forced) for row, forced in result.further.items()}
    apply(self, flown, result, now)


@in_place_of(Results, "apply")
def lose_the_last_forced_token(apply: Any, self: Results, flown: InFlight, result: StepResult, now: float) -> None:
    result.further = {row: forced[:-1] for row, forced in result.further.items()}
    apply(self, flown, result, now)


@in_place_of(Results, "apply")
def believe_forced_tokens_are_computed(
    apply: Any, self: Results, flown: InFlight, result: StepResult, now: float
) -> None:
    """Their keys and values were not computed yet."""
    apply(self, flown, result, now)
    for request in (flown.requests[row] for row in result.further):
        if request.table is not None and self._roster.kv.grow(request.table, len(request.tokens)):
            request.num_computed = request.num_launched = len(request.tokens) - 1


@in_place_of(FakeExecutor, "sample")
def go_on_after_a_matcher_failed(sample: Any, self: FakeExecutor, index: int, row: Any, result: Any) -> None:
    """The row whose matcher raised, and which may have moved, is given what the model sampled."""
    sample(self, index, row, result)
    if index in result.errors:
        del result.errors[index]
        result.tokens[index] = self.model.next_token(self.context(row), row.spec.seed)


@in_place_of(FakeExecutor, "execute")
def move_the_matcher_before_the_row_fails(execute: Any, self: FakeExecutor, batch: Any) -> Any:
    """A matcher that was moved for a row without a token is one token ahead of its request for ever."""
    for row in batch.rows:
        if row.grammar is not None and not row.samples and not isinstance(row.grammar, Breaking):
            row.grammar.accept(self.constrain(row.grammar, 5), False)
    return execute(self, batch)


def apply_no_mask(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(FakeExecutor, "constrain", lambda self, grammar, token: token)


@in_place_of(FakeExecutor, "sample")
def forget_the_mask_of_prompts(constrain: Any, self: FakeExecutor, index: int, row: Any, result: Any) -> None:
    """The first token, sampled by a row of several positions, is free."""
    constrain(self, index, row._replace(grammar=None) if row.num_scheduled > 1 else row, result)


@in_place_of(Matcher, "accept")
def count_no_forced_tokens(accept: Any, self: Matcher, token: int, jump: bool = True, others: Any = None) -> list[int]:
    """The way to the end is thought to fit because forced tokens are left out of the budget."""
    tokens = accept(self, token, jump, others)
    self._left += len(tokens) - 1
    return tokens


def close_one_token_late(patch: pytest.MonkeyPatch) -> None:
    advance = Closing.advance
    patch.setattr(Closing, "advance", lambda self, token, at_most: advance(self, token, at_most + 1))


@in_place_of(Roster, "preempt")
def reset_the_matcher_of_who_is_preempted(preempt: Any, self: Roster, request: Any) -> None:
    preempt(self, request)
    if request.matcher is not None and not isinstance(request.matcher, Breaking):
        request.matcher = request.matcher.fresh()


@in_place_of(Roster, "preempt")
def lose_the_matcher_of_who_is_preempted(preempt: Any, self: Roster, request: Any) -> None:
    preempt(self, request)
    request.matcher = None


def believe_what_was_launched_for_another_token(patch: pytest.MonkeyPatch) -> None:
    """With two steps in flight the second row was computed for a token that its grammar replaced."""
    patch.setattr(Request, "discard_launched", lambda self: None)


@in_place_of(Request, "discard_launched")
def compute_nothing_again_after_a_discarded_row(discard: Any, self: Request) -> None:
    launched = self.num_launched
    discard(self)
    self.num_launched = launched


@in_place_of(FakeExecutor, "sample")
def move_the_matcher_for_a_discarded_row(sample: Any, self: FakeExecutor, index: int, row: Any, result: Any) -> None:
    if row.grammar is not None and row.in_flight and not row.grammar.is_terminated():
        self.confirmed[row.slot] = True
    sample(self, index, row, result)


@in_place_of(results, "constrained_end")
def ask_the_matcher_whether_it_is_done(end: Any, request: Any, token: Any, reason: Any) -> Any:
    """It may be past the token in question: the next step is launched."""
    return end(request, token._replace(complete=request.matcher.is_terminated()), reason)


@in_place_of(Roster, "leave_queue")
def start_before_the_grammar_is_there(leave: Any, self: Roster, queue: Any, ticket: int, error: Any) -> None:
    """A request whose adapter is loaded starts, whether its grammar is compiled or not."""
    if queue is self.adapter_queue:
        self.grammar_queue.pop(ticket, None)
    leave(self, queue, ticket, error)


@in_place_of(results, "constrained_end")
def ignore_that_the_budget_ran_out(end: Any, matcher: Any, token: Any, reason: Any) -> Any:
    """`on_budget="error"` gives half an output and says nothing."""
    return end(matcher, token, reason) if token.complete else (reason, None)


def go_on_after_the_end(patch: pytest.MonkeyPatch) -> None:
    """An output that nothing may follow is not ended."""
    patch.setattr(results, "constrained_end", lambda matcher, token, reason: (reason, None))


PLANTS = [plant for plant in [*vars().values()] if "patch" in getattr(plant, "__annotations__", ())]
"""All functions above that take a `patch`."""
SELDOM_MET: list[Plant] = [believe_what_was_launched_for_another_token, move_the_matcher_for_a_discarded_row]
"""Bugs that the short form of the random lives does not meet. It finds all others: half of them suffice here."""
SHORT = [plant for place, plant in enumerate(PLANTS) if place % 2 == 0 or plant in SELDOM_MET]


@pytest.mark.parametrize("plant", PLANTS if LONG else SHORT, ids=lambda plant: plant.__name__)
def test_the_fuzz_finds(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises((AssertionError, EngineError, ValueError, IndexError, KeyError)):
        live(40)


FIRST = (13, 7, 4)
"""Lives that show what others seldom do: they are lived first, to be quick."""


def live(seeds: int) -> None:
    for seed in (*FIRST, *range(seeds)):
        GrammarLife(seed, depth=2 + seed % 2).run()
