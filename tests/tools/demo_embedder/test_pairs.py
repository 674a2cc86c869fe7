"""The texts the embedder learns from: what is kept from training, and one right answer to each."""

from __future__ import annotations

import random

import pytest

from tools.demo_embedder.pairs import MAKERS, batch, stream
from tools.demo_embedder.reworded import neighbor, situation
from tools.demo_model.words import Words


def test_what_is_held_out_is_never_trained_on() -> None:
    """Words are the same on both sides; which deed is done to which thing is not."""
    sides = []
    for held_out in (False, True):
        w = Words(random.Random(5), held_out)
        drawn = [situation(w) for _ in range(3000)]
        drawn += [neighbor(w, of) for of in drawn[:500]]
        sides.append({(of.deed.key, of.thing.key) for of in drawn})
    train, test = sides
    assert not train & test
    assert {deed for deed, _ in test} <= {deed for deed, _ in train}


@pytest.mark.parametrize("skill", MAKERS)
def test_no_two_pairs_of_a_batch_answer_each_other(skill: str) -> None:
    pairs = batch(stream(9, skill=skill), 64)
    assert len({pair.key for pair in pairs}) == 64
    assert all(pair.query and pair.text for pair in pairs)
    assert not [pair for pair in pairs if "{" in pair.query + pair.text or "~" in pair.query + pair.text]
