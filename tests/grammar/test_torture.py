"""A slice of the torture in CI; `torture.py` runs all of it (see docs/performance.md for the last full run)."""

from __future__ import annotations

import pytest
from support.big_tokenizers import LARGE, SMALL

from .corpus import compilable
from .torture import real_vocabulary, torture


@pytest.mark.parametrize(("size", "step", "seeds"), [(SMALL, 8, 1), (LARGE, 40, 1)])
def test_random_logits_and_budgets_give_valid_outputs(size: int, step: int, seeds: int) -> None:
    vocabulary = real_vocabulary(size)
    for first in range(seeds):
        tally = torture(vocabulary, compilable()[first::step], [first])
        assert tally.lost == []
        assert tally.wrong == []
        assert tally.walks > 10
        assert 0 < tally.steered < tally.walks, "both kinds of ending must occur"
