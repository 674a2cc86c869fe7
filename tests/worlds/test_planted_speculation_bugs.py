"""Would the fuzz notice? Each test plants one bug that speculation invites, and the fuzz must find it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from worlds.schedule_fuzz import Life
from worlds.speculation_fuzz import speculative_grammar_life, speculative_life

from asyncengine.grammar.matcher import Matcher
from asyncengine.scheduler import scheduler as module
from asyncengine.scheduler.request import Request
from asyncengine.scheduler.scheduler import Scheduler
from asyncengine.step import StepResult

Plant = Callable[[pytest.MonkeyPatch], None]


def publish_beyond_the_accepted(patch: pytest.MonkeyPatch) -> None:
    """All that a row computed is taken to hold."""
    commit = Scheduler.commit

    def broken(self: Scheduler, result: StepResult, now: float) -> None:
        for index in result.accepted:
            result.accepted[index] = len(self._in_flight[0].batch.rows[index].drafts)
        commit(self, result, now)

    patch.setattr(Scheduler, "commit", broken)


def count_one_too_many(patch: pytest.MonkeyPatch) -> None:
    """The token that was drawn last is taken to be computed as well."""
    put = StepResult.put

    def broken(self: StepResult, index: int, row: Any, produced: Any) -> None:
        put(self, index, row, produced)
        if row.drafts:
            self.accepted[index] = min(len(row.drafts), self.accepted[index] + 1)

    patch.setattr(StepResult, "put", broken)


def believe_every_draft(patch: pytest.MonkeyPatch) -> None:
    put = StepResult.put

    def broken(self: StepResult, index: int, row: Any, produced: Any) -> None:
        put(self, index, row, [*row.drafts, produced[-1]] if row.drafts else produced)

    patch.setattr(StepResult, "put", broken)


def launch_behind_drafts(patch: pytest.MonkeyPatch) -> None:
    """A request goes on before it is known what its drafts were worth."""

    def broken(request: Request) -> bool:
        return len(request.tokens) + request.num_pending < request.spec.max_total

    patch.setattr(module, "may_overlap", broken)


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


def use_one_mask_for_the_next_position(patch: pytest.MonkeyPatch) -> None:
    """The matcher is not moved between a draft and the next."""
    accept = Matcher.accept

    def broken(self: Matcher, token: int, jump: bool = True) -> list[int]:
        before = getattr(self, "last", None)
        taken = accept(self, token, jump)
        self.last = token  # type: ignore[attr-defined]
        return taken if before is None else [before, *taken[1:]]

    patch.setattr(Matcher, "accept", broken)


def test_the_fuzz_finds_a_wrong_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    use_one_mask_for_the_next_position(monkeypatch)
    assert_found(speculative_grammar_life, 8)
