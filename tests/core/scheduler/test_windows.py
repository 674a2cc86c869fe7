"""Requests of a model that sees no further than its windows: bounded memory, however long they are."""

from __future__ import annotations

import pytest
from support.fake_engine import Steps

from asyncengine.testing import FakeModel


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
