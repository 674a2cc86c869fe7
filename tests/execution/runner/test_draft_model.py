"""A draft model guesses as long as it is sure."""

from __future__ import annotations

import math

import pytest

from asyncengine import SamplingParams
from asyncengine.execution.runner.draft_model import DraftModel, least_chance
from asyncengine.request_spec import RequestSpec
from asyncengine.step import OPEN, Batch, Row
from asyncengine.testing import FakeExecutor, FakeModel


def guesses(least: float, params: SamplingParams) -> tuple[int, ...]:
    """The fake model gives token t a probability of exp(-t / 100)."""
    model = DraftModel(FakeExecutor(9, 4, FakeModel(100)), 100, least_chance=least)
    row = Row(RequestSpec(0, (5, 6, 7), params, 40), 0, 2, 9, [5, 6, 7], False, [1, 2, 3], True, drafts=(OPEN,) * 8)
    found = model.guess(Batch(0, (row,))).rows[0]
    assert found.num_scheduled == 1 + len(found.drafts)
    return found.drafts


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(logprobs=True, top_logprobs=3)])
def test_guesses_end_where_they_get_unsure(params: SamplingParams) -> None:
    everything = guesses(0.0, params)
    assert len(everything) == 8
    lengths = []
    for least in (1.0, 0.8, 0.5, 0.2, 0.02):
        found = guesses(least, params)
        assert found == everything[: len(found)]
        chances = [math.exp(-sum(found[:count]) / 100) for count in range(1, len(found) + 1)]
        assert all(chance >= least for chance in chances[:-1])
        assert len(found) == 8 or chances[-1] < least
        lengths.append(len(found))
    assert lengths == sorted(lengths)
    assert len(set(lengths)) > 2


def test_a_guess_has_to_bring_more_than_it_costs() -> None:
    assert least_chance((2.0, 2.7, 4.0), (0.3,) * 3) == pytest.approx(0.2)
    assert least_chance((2.0, 1.0, 1.0), (0.3,) * 3) == pytest.approx(0.15)
    assert least_chance((2.0,) * 3, (3.0,) * 3) == 1.0
