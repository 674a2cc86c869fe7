"""Requests of a model in which some layers have windows: what is held, and what the prefix cache finds."""

from __future__ import annotations

import random

import pytest
from core.scheduler.test_recurrent_states import served, words

from asyncengine.testing import FakeModel


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
