"""Requests of a model that sees no further than its windows: bounded memory, however long they are."""

from __future__ import annotations

import pytest
from support.fake_engine import Steps, greedy

from asyncengine.request_spec import Pooled, RequestSpec
from asyncengine.testing import FakeModel


def windowed(window: int = 10, **settings) -> Steps:
    return Steps(model=FakeModel(windows=((window, 0),)), **settings)


def most_in_use(steps: Steps) -> int:
    """The most pages at once of the layers that have a window."""
    counts = steps.kv.window_counts if steps.kv.windows else steps.kv.counts
    most = 0
    while steps.scheduler.requests:
        steps.step()
        pages = counts(r.table for r in steps.scheduler.running.values())
        most = max(most, pages.held + pages.shared + pages.retiring)
    steps.assert_right()
    return most


def test_a_long_generation_holds_its_window():
    steps = windowed(pages=64)
    steps.add(range(2, 12), 400)
    assert most_in_use(steps) <= 5  # 3 pages for 10 tokens wherever they begin, one to write, one of the prompt


@pytest.mark.parametrize("num_window_pages", [0, 64], ids=["all layers", "some"])
def test_a_generation_of_accepted_drafts_holds_its_window(num_window_pages: int):
    """Drafts take the next page before the row has filled its own: what is passed is given back then, too."""
    windows = ((10, 0), (0, 0)) if num_window_pages else ((10, 0),)
    costs = {"speculation_costs": (1.0, 1.1, 1.2), "speculation_tokens": 3}  # with the token before them, a page
    steps = Steps(model=FakeModel(windows=windows), pages=128, num_window_pages=num_window_pages, **costs)
    prompt = list(range(2, 12))
    answer = steps.executor.model.oracle(prompt, 400, 0, frozenset())
    steps.add(prompt, 400, prediction=tuple(answer))
    assert most_in_use(steps) <= 5
    assert len(steps.batches) <= 101, "four tokens a step"


def test_a_prompt_larger_than_the_pool_runs_in_chunks():
    steps = windowed(pages=12, max_num_batched_tokens=1000)
    assert steps.kv.longest > 10_000
    steps.add(list(range(2, 90)) * 3, 5)
    steps.add(list(range(2, 90)) * 2, 5)
    assert most_in_use(steps) <= 11
    assert not steps.scheduler.counters.preemptions
    assert max(batch.num_tokens for batch in steps.batches) > 10


def test_more_requests_run_beside_each_other():
    """Twenty-four pages hold one request of sixty tokens; of those with a window, three."""
    for model, most in ((FakeModel(), 1), (FakeModel(windows=((6, 0),)), 3)):
        steps = Steps(pages=25, model=model, max_num_batched_tokens=8, long_prefill_token_threshold=2)
        for start in range(5):
            steps.add([start + 2, *range(2, 59)], 4)
        running = 0
        while steps.scheduler.requests:
            steps.step()
            running = max(running, len(steps.scheduler.running))
        steps.assert_right()
        assert running >= most
        assert most > 1 or running == 1


def test_a_text_that_is_computed_whole_may_be_longer_than_the_pool():
    """Nothing is kept of it."""
    steps = windowed(pages=12, max_num_batched_tokens=1000)
    pooled = Pooled(whole=True, every=True)
    steps.apply(RequestSpec(1, tuple(range(2, 90)), greedy(1), 88, pooled=pooled))
    steps.run()
    assert [batch.num_tokens for batch in steps.batches] == [88]
    assert steps.ended == {1: "stop"}
