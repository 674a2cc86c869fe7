"""Random lives with a draft model: from pages of its own, under the same numbers, it guesses as it would alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from support.long import TIMES
from worlds.schedule_fuzz import Life
from worlds.speculation_fuzz import planner_for
from worlds.test_planted_speculation_bugs import assert_found

from asyncengine.execution.runner.draft_model import DraftModel, DraftPages
from asyncengine.speculation.costs import StepCosts
from asyncengine.step import MEASURED_SIZES
from asyncengine.testing import FakeExecutor, FakeModel

SEEDS = 8 * TIMES
Plant = Callable[[pytest.MonkeyPatch], None]


class ForgetfulModel(FakeModel):
    """A draft model of which about one guess in `every` is another than the right one; 0: none."""

    def __init__(self, right: FakeModel, every: int) -> None:
        super().__init__(right.vocab_size, right.eos, right.eos_every, right.windows)
        self._every = every

    def next_token(self, tokens: Sequence[int], seed: int = 0, near: Sequence[int] | None = None) -> int:
        token = super().next_token(tokens, seed, near)
        return 2 + token % 90 if self._every and sum(tokens) % self._every == 0 else token


def life_with_draft_model(seed: int, depth: int | None = None, every: int = 0, *, mixed: bool = False) -> Life:
    """A `Life` with a draft model that guesses as `ForgetfulModel` does, from what lies in pages of its own."""
    life = Life(seed, depth, mixed=mixed)
    executor = life.executor
    draft = FakeExecutor(executor.num_pages, executor.page_size, ForgetfulModel(executor.model, every))
    executor.draft_model = DraftModel(draft, 10_000 if seed % 3 else 30, 128 if seed % 2 else 5, (seed % 4 == 1) * 0.4)
    life.scheduler.roster.drafts = planner_for(life, life.expected, StepCosts([1e-6] * len(MEASURED_SIZES), 1.0))
    return life


def check_guesses(life: Life) -> int:
    """Checks that a draft model that knows better was never wrong. Returns how often it was right."""
    assert life.scheduler.speculation is not None
    made, right = life.scheduler.speculation.by_model
    assert right == made, f"{made - right} of {made} guesses are wrong"
    return right


def test_a_draft_model_that_knows_better_is_never_wrong() -> None:
    """It guesses from pages of its own, under the same numbers: were anything in them stale or missing, it would be
    wrong some time. Beside the other drafters, leavers, preemption, shared prefixes, n > 1, depth 1 and 2."""
    made = 0
    for seed in range(SEEDS):
        life = life_with_draft_model(seed)
        life.run()
        made += check_guesses(life)
    assert made > 50 * SEEDS


def test_a_draft_model_that_errs_changes_nothing() -> None:
    made = right = 0
    for seed in range(SEEDS):
        life = life_with_draft_model(seed, every=3)
        life.run()
        assert life.scheduler.speculation is not None
        counts = life.scheduler.speculation.by_model
        made, right = made + counts[0], right + counts[1]
    assert right > 30 * SEEDS
    assert made - right > 10 * SEEDS


def test_a_draft_model_keeps_all_its_pages_where_the_model_keeps_those_of_its_windows() -> None:
    made = 0
    for seed in range(SEEDS // 4):
        life = life_with_draft_model(seed, mixed=True)
        life.run()
        made += check_guesses(life)
    assert made > SEEDS * 5


def take_a_page_for_what_it_was(patch: pytest.MonkeyPatch) -> None:
    """The draft model does not see that a page changes hands."""
    patch.setattr(DraftPages, "overwritten", lambda self, rows: None)


def take_a_guess_for_right(patch: pytest.MonkeyPatch) -> None:
    """The draft model's keys and values of the first guess are taken to hold, whatever came of the guess."""
    overwritten = DraftPages.overwritten

    def broken(self: DraftPages, rows: Any) -> None:
        overwritten(self, [row._replace(start=row.start + 1) for row in rows if row.num_scheduled > 1])

    patch.setattr(DraftPages, "overwritten", broken)


def compute_one_position_less(patch: pytest.MonkeyPatch) -> None:
    first_missing = DraftPages.first_missing

    def broken(self: DraftPages, pages: Any, end: int) -> int:
        return min(end - 1, first_missing(self, pages, end) + 1)

    patch.setattr(DraftPages, "first_missing", broken)


@pytest.mark.parametrize("plant", [take_a_page_for_what_it_was, take_a_guess_for_right, compute_one_position_less])
def test_the_fuzz_finds_stale_pages_of_a_draft_model(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)

    def life(seed: int) -> Life:
        made = life_with_draft_model(seed)
        made.check_end = lambda: check_guesses(made)  # type: ignore[method-assign]
        return made

    assert_found(life, 24)
