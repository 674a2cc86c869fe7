"""Would the fuzz notice? Each test plants one bug that speculation invites, and the fuzz must find it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from worlds.plants import Plant, in_place_of
from worlds.schedule_fuzz import Life
from worlds.speculation_fuzz import speculative_grammar_life, speculative_life

from asyncengine.grammar.matcher import Matcher
from asyncengine.scheduler import scheduler as module
from asyncengine.scheduler.request import Request
from asyncengine.scheduler.scheduler import Scheduler
from asyncengine.step import StepResult


@in_place_of(Scheduler, "commit")
def publish_beyond_the_accepted(commit: Any, self: Scheduler, result: StepResult, now: float) -> None:
    """All that a row computed is taken to hold."""
    for index in result.accepted:
        result.accepted[index] = len(self._in_flight[0].batch.rows[index].drafts)
    commit(self, result, now)


@in_place_of(StepResult, "put")
def count_one_too_many(put: Any, self: StepResult, index: int, row: Any, produced: Any) -> None:
    """The token that was drawn last is taken to be computed as well."""
    put(self, index, row, produced)
    if row.drafts:
        self.accepted[index] = min(len(row.drafts), self.accepted[index] + 1)


@in_place_of(StepResult, "put")
def believe_every_draft(put: Any, self: StepResult, index: int, row: Any, produced: Any) -> None:
    put(self, index, row, [*row.drafts, produced[-1]] if row.drafts else produced)


@in_place_of(module, "may_overlap")
def launch_behind_drafts(_: Any, request: Request) -> bool:
    """A request goes on before it is known what its drafts were worth."""
    return len(request.tokens) + request.num_pending < request.spec.max_total


def assert_found(make: Callable[[int], Life], seeds: int) -> None:
    """Passes if any seed raises, whatever it is that comes to light."""
    for seed in range(seeds):
        try:
            make(seed).run()
        except Exception:
            return
    raise AssertionError("the fuzz notices nothing")


PLAIN = [publish_beyond_the_accepted, count_one_too_many, believe_every_draft]


@pytest.mark.parametrize("plant", PLAIN, ids=lambda plant: plant.__name__)
def test_the_fuzz_finds(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    assert_found(speculative_life, 12)


@pytest.mark.parametrize("plant", [launch_behind_drafts], ids=lambda plant: plant.__name__)
def test_the_fuzz_finds_with_two_steps_in_flight(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    assert_found(lambda seed: speculative_life(seed, depth=2), 12)


@in_place_of(Matcher, "accept")
def use_one_mask_for_the_next_position(accept: Any, self: Matcher, token: int, jump: bool = True) -> list[int]:
    """The matcher is not moved between a draft and the next."""
    before = getattr(self, "last", None)
    taken = accept(self, token, jump)
    self.last = token  # type: ignore[attr-defined]
    return taken if before is None else [before, *taken[1:]]


def test_the_fuzz_finds_a_wrong_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    use_one_mask_for_the_next_position(monkeypatch)
    assert_found(speculative_grammar_life, 8)
