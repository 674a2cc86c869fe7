"""Samples and forks of one prompt take the page that it fills in part as a copy, and compute its last token alone."""

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
    assert len({page for _, _, page in copies}) == 4
    assert len({source for _, source, _ in copies}) == 1


@pytest.mark.parametrize("kind", CACHE_KINDS)
@pytest.mark.parametrize("depth", [1, 2])
def test_forks_copy_what_their_groups_of_layers_have(kind: str, depth: int):
    """Requests of their own; a state within a page is not kept: models with states compute from their snapshot on."""
    steps = Steps(copies=True, max_steps_in_flight=depth, **CACHE_KINDS[kind])
    tickets = [steps.add(PROMPT, 8, seed=number) for number in range(3)]
    steps.run()
    steps.assert_right()
    steps.assert_empty()
    first, *others = first_rows(steps, tickets)
    copied = {part.name for batch in steps.batches for part, _, _ in batch.copies}
    assert copied == {"states": set(), "window pages": {"PAGE", "WINDOW"}}.get(kind, {"PAGE"})
    assert (first, others) == (22, [2, 2] if kind == "states" else [1, 1])


def test_nothing_is_copied_between_namespaces():
    """Equal tokens of two salts, of a prompt that fills no page, and of one that has full pages before."""
    for prompt in (PROMPT[:3], PROMPT):
        steps = Steps(copies=True)
        for salt in ("one", "two"):
            steps.add(prompt, 8, salt=salt)
            steps.step()
        steps.add(prompt, 8, salt="two")
        steps.run()
        steps.assert_right()
        assert sum(len(batch.copies) for batch in steps.batches) == 1


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
    for index in range(3):  # they part before the last token
        steps.add([*PROMPT[:-2], 50 + index, 60], 8)
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
    source = steps.batches[-1].copies[0][1]
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
