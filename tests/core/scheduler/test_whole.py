"""Texts that are computed whole: the step's budget, memory, and waiting (`Plan.grant`, `Admission`)."""

from __future__ import annotations

import random

from support.fake_engine import Steps, rows

from asyncengine.request_spec import Pooled
from asyncengine.sampling_params import SamplingParams

WHOLE = Pooled(whole=True, every=True)


def add(steps: Steps, length: int, pooled: Pooled = WHOLE) -> int:
    return steps.add((2,) * length, 0, params=SamplingParams(), pooled=pooled)


def test_a_text_gets_all_of_its_step_or_nothing() -> None:
    steps = Steps(pages=4, max_num_batched_tokens=20, max_num_seqs=8)
    tickets = [add(steps, length) for length in (8, 8, 8, 4, 50, 3)]
    planned = []
    while steps.scheduler.requests:
        planned.append(rows(steps.step()))
    a, b, c, d, long, last = tickets
    assert planned == [{a: 8, b: 8}, {c: 8, d: 4}, {long: 50}, {last: 3}]  # in order, though `d` would have fit before
    assert set(steps.ended.values()) == {"stop"}
    steps.assert_empty()


def test_it_takes_no_page_and_shares_a_step_with_generation() -> None:
    steps = Steps(pages=8, max_num_batched_tokens=64, max_num_seqs=8)
    writer = steps.add(list(range(2, 12)), 8)
    steps.step()
    texts = [add(steps, 20) for _ in range(6)]
    batch = steps.launch()
    assert rows(batch) == {writer: 1, **dict.fromkeys(texts[:3], 20)}
    assert all(not row.pages for row in batch.rows[1:])
    steps.commit()
    steps.run()
    steps.assert_right([writer])
    assert all(steps.ended[text] == "stop" for text in texts)
    steps.assert_empty()


def test_a_long_text_is_not_passed_over() -> None:
    """Short ones keep coming; it goes as soon as a step begins with it."""
    rng = random.Random(0)
    steps = Steps(pages=4, max_num_batched_tokens=16, max_num_seqs=4)
    for _ in range(3):
        add(steps, rng.randrange(1, 9))
    long = add(steps, 500)
    for _ in range(12):
        for _ in range(4):
            add(steps, rng.randrange(1, 9))
        steps.step()
        if long in steps.ended:
            break
    assert steps.ended[long] == "stop"
    behind = [ticket for ticket in steps.ended if ticket > long]
    assert not behind, "nobody that came later was first"
    steps.run()


def test_texts_that_may_not_start_from_the_cache_do_not_wait_for_each_other() -> None:
    """They gain nothing from the page that another one computes; a hundred of a common beginning share one step."""
    steps = Steps(pages=400, page_size=4, max_num_batched_tokens=10_000, max_num_seqs=128)
    tickets = [add(steps, 12, Pooled(every=True)) for _ in range(100)]
    assert rows(steps.step()) == dict.fromkeys(tickets, 12)
    steps.run()
    scored = [
        steps.add([2] * 12, 1, params=SamplingParams(temperature=0.0, prompt_logprobs=True, max_tokens=1))
        for _ in range(5)
    ]
    assert len(rows(steps.step())) == len(scored)
