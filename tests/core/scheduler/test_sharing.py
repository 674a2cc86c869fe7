"""Work that is done once: prefixes shared by simultaneous requests, prompts shared by n samples."""

import pytest
from support.fake_engine import Steps, rows


@pytest.mark.parametrize("budget", [64, 256, 1024, 8192])
def test_a_prefix_shared_by_simultaneous_requests_is_computed_once(budget: int):
    prefix = [2 + i % 90 for i in range(1024)]
    steps = Steps(pages=2000, page_size=16, max_num_batched_tokens=budget, max_num_seqs=64)
    for i in range(32):
        steps.add([*prefix, 5 + i, 6], 4)
    steps.run()
    steps.assert_right()
    prompt_tokens = 1024 + 32 * 2
    decodes = 32 * 3
    assert steps.scheduler.counters.computed_tokens == prompt_tokens + decodes
    assert steps.scheduler.counters.cached_tokens == 31 * 1024


def test_unrelated_requests_do_not_wait_for_a_prefix_being_computed():
    steps = Steps(pages=200, max_num_batched_tokens=16)
    prefix = list(range(2, 62))
    steps.add([*prefix, 3], 2)
    follower = steps.add([*prefix, 4], 2)
    other = steps.add([90, 91], 2)
    steps.step()
    steps.step()
    running = steps.scheduler.running
    assert follower not in running
    steps.step()
    steps.run()
    order = [row.spec.ticket for batch in steps.batches for row in batch.rows]
    assert order.index(other) < order.index(follower)
    steps.assert_right()


def test_salts_and_adapters_do_not_share():
    steps = Steps(pages=200)
    prompt = list(range(2, 42))
    for salt in ("", "a", "b"):
        steps.add(prompt, 1, salt=salt)
        steps.run()
    assert steps.scheduler.counters.cached_tokens == 0
    steps.add(prompt, 1, salt="b")
    steps.run()
    assert steps.scheduler.counters.cached_tokens == 36


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("budget", [7, 64, 1000])
def test_samples_of_one_prompt_compute_it_once(caching: bool, budget: int):
    steps = Steps(pages=200, prefix_caching=caching, max_num_batched_tokens=budget)
    prompt = list(range(2, 42))
    tickets = steps.add_group(prompt, 5, max_tokens=6)
    steps.run()
    steps.assert_right(tickets)
    assert len({tuple(steps.tokens[t]) for t in tickets}) == 5
    # 40 prompt tokens once; each other sample computes the last page again, for its last token's logits.
    assert steps.scheduler.counters.computed_tokens == 40 + 4 * 4 + 5 * 5
    steps.assert_empty()


@pytest.mark.parametrize("caching", [True, False])
def test_samples_hold_the_prompt_pages_together(caching: bool):
    steps = Steps(pages=200, prefix_caching=caching)
    tickets = steps.add_group(list(range(2, 42)), 4, max_tokens=8)
    while not all(t in steps.scheduler.running and steps.tokens[t] for t in tickets):
        steps.step()
    first = steps.request(tickets[0]).table
    assert first is not None
    for ticket in tickets[1:]:
        table = steps.request(ticket).table
        assert table is not None
        assert table.pages[:9] == first.pages[:9]
    steps.run()


def test_without_caching_nothing_outlives_the_samples():
    steps = Steps(pages=200, prefix_caching=False)
    steps.add_group(list(range(2, 42)), 3)
    steps.run()
    assert steps.kv.counts([]).cached == 0
    assert not steps.kv.tree.roots


def test_without_caching_different_requests_share_nothing():
    steps = Steps(pages=200, prefix_caching=False)
    for _ in range(2):
        steps.add(list(range(2, 42)), 2)
    steps.run()
    assert steps.scheduler.counters.cached_tokens == 0
    steps.assert_right()


def test_a_hit_needs_whole_pages_and_leaves_the_last_token():
    steps = Steps()
    steps.add([2, 3, 4, 5, 6, 7, 8, 9], 1)
    steps.run()
    again = steps.add([2, 3, 4, 5, 6, 7, 8, 9], 1)
    assert rows(steps.step()) == {again: 4}
    longer = steps.add([2, 3, 4, 5, 6, 7, 8, 9, 10], 1)
    assert rows(steps.step()) == {longer: 1}
    steps.assert_right()


def test_a_long_conversation_finds_its_own_past():
    steps = Steps(pages=300)
    history = list(range(2, 30))
    for turn in range(5):
        ticket = steps.add(history, 12)
        steps.run()
        history += [*steps.tokens[ticket], 40 + turn, 41, 42]
        if turn:
            assert steps.scheduler.counters.cached_tokens
    steps.assert_right()
    assert steps.scheduler.counters.computed_tokens < 28 + 5 * (12 + 3 + 2 * 4)
