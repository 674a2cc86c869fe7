"""Samples of one prompt take the page that it fills in part as a copy, and compute its last token alone."""

from __future__ import annotations

import pytest
from support.fake_engine import CACHE_KINDS, Steps, greedy, rows

PROMPT = list(range(2, 24))  # of 22 tokens, 20 are in full pages


def first_rows(steps: Steps, tickets: list[int]) -> list[int]:
    """Positions that each of `tickets` computes of the prompt."""
    found = dict.fromkeys(tickets, 0)
    for batch in steps.batches:
        for row in batch.rows:
            found[row.spec.ticket] += max(0, min(row.start + row.num_scheduled, len(PROMPT)) - row.start)
    return list(found.values())


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("caching", [True, False])
def test_every_other_sample_computes_one_token(depth: int, caching: bool):
    steps = Steps(copies=True, max_steps_in_flight=depth, prefix_caching=caching)
    tickets = steps.add_group(PROMPT, 5)
    steps.run()
    steps.assert_right()
    steps.assert_empty()
    assert first_rows(steps, tickets) == [22, 1, 1, 1, 1]
    copies = [copy for batch in steps.batches for copy in batch.copies]
    assert len(copies) == 4
    assert len({page for _, page in copies}) == 4
    assert len({source for source, _ in copies}) == 1


@pytest.mark.parametrize("kind", [kind for kind in CACHE_KINDS if kind != "pages"])
def test_models_whose_states_or_windows_go_with_pages_compute_them(kind: str):
    steps = Steps(copies=True, **CACHE_KINDS[kind])
    tickets = steps.add_group(PROMPT, 3)
    steps.run()
    steps.assert_right()
    assert not any(batch.copies for batch in steps.batches)
    assert first_rows(steps, tickets)[1] > 1


def test_what_must_be_computed_is_not_copied():
    """Prompts in full pages, scores of the prompt, an executor that copies nothing, a first sample that has gone."""
    for settings, prompt, params in (
        ({"copies": True}, PROMPT[:21], greedy(8)),
        ({"copies": True}, PROMPT, greedy(8, prompt_logprobs=True)),
        ({}, PROMPT, greedy(8)),
    ):
        steps = Steps(**settings)
        for index in range(3):
            steps.add(prompt, 8, params=params, group=1, seed=1000 + index)
        steps.run()
        steps.assert_right()
        assert not any(batch.copies for batch in steps.batches)
    steps = Steps(copies=True)
    for index in range(3):  # questions about one state are a group, too
        steps.add([*PROMPT[:-1], 50 + index], 8, group=1)
    steps.run()
    steps.assert_right()
    assert not any(batch.copies for batch in steps.batches)
    steps = Steps(copies=True, max_num_seqs=1)
    steps.add_group(PROMPT, 2)
    steps.run()
    steps.assert_right()
    assert not any(batch.copies for batch in steps.batches)


def test_the_page_stays_until_the_copy_is_made():
    """The first sample leaves while the step that copies its page is in flight: nobody writes to it before."""
    steps = Steps(pages=24, copies=True, max_steps_in_flight=2, prefix_caching=False)
    first, *others = steps.add_group(PROMPT, 3)
    while not steps.batches or not steps.batches[-1].copies:
        steps.launch()
        if not (steps.batches and steps.batches[-1].copies):
            steps.commit()
    [source, *_] = {page for page, _ in steps.batches[-1].copies}
    steps.abort(first)
    assert source in [page for given in steps.kv.pages.retiring for page in given.pages]
    steps.run()
    steps.assert_right(others)
    steps.assert_empty()


def test_a_copy_is_not_made_for_who_gave_way():
    steps = Steps(copies=True)
    first, second = steps.add_group(PROMPT, 2)
    steps.step()
    plan_seen = []
    launch = steps.scheduler._launch

    def watch(plan, now):
        plan.drop(steps.request(second))
        plan_seen.append(dict(plan.copies))
        return launch(plan, now)

    steps.scheduler._launch = watch  # type: ignore[method-assign]
    steps.launch()
    steps.scheduler._launch = launch  # type: ignore[method-assign]
    assert plan_seen == [{}]
    assert rows(steps.batches[-1]).keys() == {first}
