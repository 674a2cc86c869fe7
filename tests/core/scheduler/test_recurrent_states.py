"""A model that keeps recurrent states: what its cache finds, who waits for a state, how one is lost and found again."""

from __future__ import annotations

import random
from typing import Any

import pytest
from support.fake_engine import Steps, rows
from support.long import LONG, by_turns
from support.plug_points import Letters

from asyncengine.scheduler.messages import GrammarReady

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


def assert_nearly_as_much(states: Any, dense: Any, at_once: bool) -> None:
    """Counters of the two: the cache of states finds what pages alone would find."""
    # one after another, the second shows where ways part; those that come together are known beforehand
    assert states.cached_tokens >= dense.cached_tokens - (0 if at_once else dense.cached_tokens // (COMERS - 1))
    assert states.computed_tokens - dense.computed_tokens <= dense.cached_tokens - states.cached_tokens


def chats(num_states: int, *, conversations: int, turns: int, answer: int = 24, **settings: Any) -> tuple[int, int]:
    """(cached tokens, prompt tokens) of chats that take turns; each answer is part of the next prompt."""
    chance = random.Random(2)
    system = words(500, chance)
    steps = Steps(**{**PAGES, "max_num_seqs": 4, "num_states": num_states, **settings})
    histories = [system + words(60, chance) for _ in range(conversations)]
    for _ in range(turns):
        for index, history in enumerate(histories):
            ticket = steps.add(history, answer)
            steps.run()
            histories[index] = history + steps.tokens[ticket] + words(60, chance)
    steps.assert_right()
    steps.assert_empty()
    counters = steps.scheduler.counters
    return counters.cached_tokens, counters.prompt_tokens


def test_chats_find_what_a_dense_model_does() -> None:
    dense, asked = chats(0, conversations=6, turns=5)
    states, _ = chats(40, conversations=6, turns=5)
    assert dense > 0.75 * asked
    assert states > 0.97 * dense


@pytest.mark.parametrize("depth", [1, 2] if LONG else [2])
def test_long_answers_are_found_by_the_next_turn(depth: int) -> None:
    """All that is lost is where the second chat parts from the first: the third one starts there."""
    sizes = {"conversations": 3, "turns": 3, "answer": 100, "max_steps_in_flight": depth}
    dense, _ = chats(0, **sizes)
    states, _ = chats(24, **sizes)
    assert dense - states == 500 // 16 * 16


def test_a_trail_costs_no_copy_and_gives_way_to_who_wants_to_run() -> None:
    """Eight slots: two trails at most, none of which keeps the others from running."""
    steps = Steps(pages=400, num_states=9, max_num_seqs=16)
    for index in range(2):
        steps.add([2 + index] * 6, 60)
    for _ in range(12):
        steps.step()
    assert steps.kv.state_counts(r.table for r in steps.scheduler.running.values()).working == 4
    for index in range(6):
        steps.add([12 + index] * 6, 12)
    steps.step()
    assert len(steps.scheduler.running) == 8
    steps.run()
    steps.assert_right()
    steps.assert_empty()
    assert not any(save for batch in steps.batches for row in batch.rows if row.state and row.start >= 6
                   for save in row.state.saves)  # fmt: skip


def test_a_small_budget_loses_the_oldest_turns_and_no_chat() -> None:
    """Snapshots for each chat, one where they part, and two to work with (SGLang #36935: collapse under LRU)."""
    large, _ = chats(60, conversations=6, turns=5)
    small, _ = chats(6 + 1 + 3, conversations=6, turns=5)
    assert small >= 0.95 * large


def test_fewer_chats_than_there_are_still_find_what_they_share() -> None:
    found, _ = chats(4, conversations=6, turns=5)
    assert found >= 0.9 * 29 * (500 // 16 * 16)


def test_without_anything_shared_no_chunk_is_cut_and_nobody_waits() -> None:
    chance = random.Random(3)
    prompts = [words(200, chance) for _ in range(8)]
    plans = []
    for num_states in (0, 20):
        steps = served(prompts, num_states, at_once=True, max_num_batched_tokens=256)
        plans.append([rows(batch) for batch in steps.batches])
    assert plans[0] == plans[1]


def test_states_limit_how_many_run_at_once() -> None:
    steps = Steps(pages=200, num_states=4)
    for index in range(8):
        steps.add([2 + index] * 6, 5)
    steps.step()
    assert len(steps.scheduler.running) == 3
    steps.run()
    steps.assert_right()
    assert max(len(batch.rows) for batch in steps.batches) == 3


def test_who_is_preempted_starts_from_its_last_snapshot() -> None:
    steps = Steps(pages=200, num_states=9, preempt_every=12)
    chance = random.Random(5)
    ticket = steps.add(words(41, chance), 20)
    steps.run()
    steps.assert_right()
    assert steps.scheduler.counters.preemptions == 1
    again = [row.start for batch in steps.batches for row in batch.rows if row.num_scheduled > 1]
    assert len(again) == 2
    assert again[0] == 0
    assert again[1] >= 40, ticket


def test_a_state_that_ends_on_a_page_is_kept_when_its_request_is_preempted() -> None:
    steps = Steps(pages=200, num_states=9)
    ticket = steps.add([2, 3, 4, 5, 6], 9)
    while steps.scheduler.requests and steps.request(ticket).num_computed != 8:
        steps.step()
    steps.scheduler.roster.preempt(steps.request(ticket))
    steps.run()
    steps.assert_right()
    begins = [row.start for batch in steps.batches for row in batch.rows if row.state and not row.moves_state]
    assert begins == [0, 8, 12]  # from 12 on it goes on in another slot


def test_grammars_are_not_run_ahead_of() -> None:
    """Another token than the one sampled may come of it, and a state that has taken that in cannot be taken back."""
    steps = Steps(pages=200, num_states=9, max_steps_in_flight=2)
    free = steps.add([2, 3, 4], 8)
    bound = steps.add([5, 6, 7], 8, needs_grammar=True)
    steps.apply(GrammarReady(bound, Letters([10, 11], 8)))
    steps.run()
    ahead = {row.spec.ticket for batch in steps.batches for row in batch.rows if row.in_flight}
    assert ahead == {free}
    assert len(steps.tokens[bound]) == 8


def test_a_lost_state_is_computed_again_and_lost_twice_is_an_error() -> None:
    steps = Steps(pages=200, num_states=9, max_steps_in_flight=2)
    once, always, other = (steps.add([start] * 9, 12) for start in (2, 3, 4))
    seen = {once: 0, always: 0, other: 0}

    def lose(row: Any) -> bool:
        seen[row.spec.ticket] += 1
        return row.spec.ticket == always or (row.spec.ticket == once and seen[once] == 3)

    steps.executor.lose = lose
    steps.run()
    steps.assert_right([once, other])
    assert (steps.ended[always], steps.errors[always]) == (
        "error", "the device has not enough memory for this request's steps",
    )  # fmt: skip
    assert steps.scheduler.counters.preemptions >= 2
    steps.assert_empty()
