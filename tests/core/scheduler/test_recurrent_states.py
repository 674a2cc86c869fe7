"""A model that keeps recurrent states: what its cache finds, who waits for a state, how one is lost and found again."""

from __future__ import annotations

import random
from typing import Any

import pytest
from support.fake_engine import Steps
from support.long import LONG, by_turns
from worlds.speculation_fuzz import FuzzDrafter, free_costs

from asyncengine.request_spec import RequestSpec
from asyncengine.speculation import DraftPlanner
from asyncengine.testing import FakeModel

PAGES = {"pages": 9000, "page_size": 16, "check_every": 50}
COMERS = 64 if LONG else 18
"""Requests that share a prefix: more than run at once."""


def words(count: int, chance: random.Random) -> list[int]:
    return [chance.randrange(2, 97) for _ in range(count)]


def served(prompts: list[list[int]], num_states: int, *, at_once: bool, **settings: Any) -> Steps:
    steps = Steps(**{**PAGES, "max_num_seqs": 16, "num_states": num_states, **settings})
    for prompt in prompts:
        steps.add(prompt, 4)
        if not at_once:
            steps.run()
    steps.run()
    steps.assert_right()
    steps.assert_empty()
    return steps


@pytest.mark.parametrize(("at_once", "sizes"), by_turns([True, False], [(1500, 700), (1600, 600)]))
def test_prefixes_of_any_length_are_found(at_once: bool, sizes: tuple[int, int]) -> None:
    """vllm #45238: with a checkpoint at the last block boundary alone, one of these two finds nothing."""
    chance, (shared, own) = random.Random(1), sizes
    prefix = words(shared, chance)
    prompts = [prefix + words(own, chance) for _ in range(COMERS)]
    dense = served(prompts, 0, at_once=at_once).scheduler.counters
    assert dense.cached_tokens == (COMERS - 1) * (shared // 16) * 16
    for num_states in (20, 2 * COMERS + 1):
        states = served(prompts, num_states, at_once=at_once).scheduler.counters
        assert_nearly_as_much(states, dense, at_once)


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize(("shared", "own"), [(1500, 700), (1600, 600)])
def test_prefixes_of_any_length_are_found_in_window_pages(shared: int, own: int, at_once: bool) -> None:
    """The same in window pages of a few prompts, of a model in which some layers have windows: what a dense model would
    find, but where the second prompt shows that ways part."""
    chance = random.Random(1)
    prefix = words(shared, chance)
    prompts = [prefix + words(own, chance) for _ in range(24)]
    model = FakeModel(windows=((512, 0), (0, 0)))
    counters = served(prompts, 0, at_once=at_once, model=model, num_window_pages=250).scheduler.counters
    assert counters.cached_tokens >= 0.95 * 23 * (shared // 16) * 16
    assert counters.computed_tokens <= sum(map(len, prompts)) + 24 * 4 - counters.cached_tokens


def assert_nearly_as_much(states: Any, dense: Any, at_once: bool) -> None:
    """Counters of the two: the cache of states finds what pages alone would find."""
    # one after another, the second shows where ways part; those that come together are known beforehand
    assert states.cached_tokens >= dense.cached_tokens - (0 if at_once else dense.cached_tokens // (COMERS - 1))
    assert states.computed_tokens - dense.computed_tokens <= dense.cached_tokens - states.cached_tokens


def chats(
    num_states: int, *, conversations: int, turns: int, answer: int = 24, drafts: bool = False, **settings: Any
) -> tuple[int, int]:
    """(cached tokens, prompt tokens) of chats that take turns; each answer is part of the next prompt. `drafts`: most
    of their tokens are guessed."""
    chance = random.Random(2)
    system = words(500, chance)
    steps = Steps(**{**PAGES, "max_num_seqs": 4, "num_states": num_states, **settings})

    def drafter(spec: RequestSpec, *_: object) -> FuzzDrafter:
        return FuzzDrafter("nearly", steps.expected[spec.ticket], len(spec.prompt), chance)

    if drafts:
        steps.scheduler.roster.drafts = DraftPlanner(free_costs(), 6, make_proposer=drafter)
    histories = [system + words(60, chance) for _ in range(conversations)]
    for _ in range(turns):
        for index, history in enumerate(histories):
            ticket = steps.add(history, answer)
            steps.run()
            histories[index] = history + steps.tokens[ticket] + words(60, chance)
    steps.assert_right()
    steps.assert_empty()
    counters = steps.scheduler.counters
    if drafts:
        assert steps.scheduler.speculation is not None
        assert steps.scheduler.speculation.accepted > counters.generated_tokens // 3
    return counters.cached_tokens, counters.prompt_tokens


@pytest.mark.parametrize("depth", [1, 2] if LONG else [2])
def test_long_answers_are_found_by_the_next_turn(depth: int) -> None:
    """All that is lost is where the second chat parts from the first: the third one starts there."""
    sizes = {"conversations": 3, "turns": 3, "answer": 100, "max_steps_in_flight": depth}
    dense, _ = chats(0, **sizes)
    states, _ = chats(24, **sizes)
    assert dense - states == 500 // 16 * 16
    assert chats(24, **sizes, drafts=True)[0] == states
