"""Random lives with a draft model: from pages of its own, under the same numbers, it guesses as it would alone."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import pytest
from support.long import TIMES
from worlds.plants import FOUND, Bug, bugs, live
from worlds.schedule_fuzz import Life
from worlds.speculation_fuzz import planner_for

from asyncengine.execution.runner.draft_model import DraftModel
from asyncengine.speculation.costs import StepCosts
from asyncengine.step import MEASURED_SIZES
from asyncengine.testing import FakeExecutor, FakeModel

SEEDS = 8 * TIMES


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


@pytest.mark.parametrize("bug", bugs("draft model"), ids=lambda bug: bug.name)
def test_the_fuzz_finds_stale_pages_of_a_draft_model(bug: Bug, monkeypatch: pytest.MonkeyPatch) -> None:
    def made(seed: int) -> Life:
        life = life_with_draft_model(seed)
        life.check_end = partial(check_guesses, life)  # type: ignore[method-assign]
        return life

    bug.plant(monkeypatch)
    with pytest.raises(FOUND):
        live(made, range(24))
