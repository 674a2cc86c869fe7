"""Requests of a model in which some layers have windows: what is held, and what the prefix cache finds."""

from __future__ import annotations

import random
from typing import Any

import pytest
from core.scheduler.test_recurrent_states import served, words
from support.fake_engine import Steps

from asyncengine.testing import FakeModel


def near(*others: tuple[int, int], **settings: Any) -> Steps:
    """A model with windows of 10 in all layers, or in some."""
    pages = {"pages": 100, "num_window_pages": 14 if others else 0}
    return Steps(model=FakeModel(windows=((10, 0), *others)), **{**pages, **settings})


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize(("shared", "own"), [(1500, 700), (1600, 600)])
def test_prefixes_of_any_length_are_found(shared: int, own: int, at_once: bool) -> None:
    """vllm #45238, in window pages of a few prompts: what a dense model would find, but where the second prompt shows
    that ways part."""
    chance = random.Random(1)
    prefix = words(shared, chance)
    prompts = [prefix + words(own, chance) for _ in range(24)]
    dense = 23 * (shared // 16) * 16
    model = FakeModel(windows=((512, 0), (0, 0)))
    counters = served(prompts, 0, at_once=at_once, model=model, num_window_pages=250).scheduler.counters
    assert counters.cached_tokens >= 0.95 * dense
    assert counters.computed_tokens <= sum(map(len, prompts)) + 24 * 4 - counters.cached_tokens


def test_as_many_window_pages_as_a_window_for_a_long_generation() -> None:
    steps, most = near((0, 0), pages=128, num_window_pages=8), 0
    steps.add(range(2, 12), 400)
    while steps.scheduler.requests:
        steps.step()
        held = steps.kv.window_counts(r.table for r in steps.scheduler.running.values())
        most = max(most, held.held + held.shared + held.retiring)
    steps.assert_right()
    assert most <= 5  # four that ten positions may lie in, and the one that its output will be joined to


models = pytest.mark.parametrize("others", [(), ((0, 0),)], ids=["in all layers", "in some layers"])


@models
def test_a_preempted_request_finds_its_window(others: Any) -> None:
    steps = near(*others, preempt_every=30)
    steps.add(range(2, 50), 100)
    steps.run()
    steps.assert_right()
    counters = steps.scheduler.counters
    assert counters.preemptions >= 2
    assert counters.computed_tokens < 48 + 100 + 4 * counters.preemptions + 1


@models
def test_the_next_turn_of_a_chat_starts_behind_the_answer(others: Any) -> None:
    steps = near(*others)
    first = steps.add(range(2, 40), 60)
    steps.run()
    again = steps.add([*range(2, 40), *steps.tokens[first], 5, 6, 7], 4)
    steps.step()
    assert steps.request(again).cached_tokens == 96
    steps.run()
    steps.assert_right()
