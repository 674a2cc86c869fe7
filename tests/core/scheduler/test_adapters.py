"""Adapters share few device slots: one that does not fit is skipped, and none starves."""

import pytest
from support.fake_engine import Steps, rows

from asyncengine.lora.admission import AdapterSlots
from asyncengine.scheduler.messages import AdapterReady


def test_an_adapter_without_a_slot_is_skipped_and_does_not_block():
    steps = Steps(adapters=AdapterSlots(1))
    first = steps.add([2, 3], 6, adapter="A")
    steps.step()
    skipped, behind, plain = steps.add([4, 5], 3, adapter="B"), steps.add([6, 7], 3, adapter="A"), steps.add([8, 9], 3)
    assert rows(steps.step()) == {first: 1, behind: 2, plain: 2}
    steps.run()
    steps.assert_right()
    order = [row.spec.ticket for batch in steps.batches for row in batch.rows]
    assert order.index(skipped) > order.index(behind)


def test_an_adapter_is_released_only_when_no_step_in_flight_names_it():
    slots = AdapterSlots(1)
    steps = Steps(adapters=slots, max_steps_in_flight=2)
    ticket = steps.add([2, 3], 20, adapter="A")
    steps.launch()
    steps.launch()
    steps.abort(ticket)
    assert slots.in_use == {"A": 1}
    steps.commit()
    assert slots.in_use == {"A": 1}
    steps.commit()
    assert slots.in_use == {}


@pytest.mark.parametrize("max_passes", [1, 8])
def test_a_starving_adapter_drains_a_running_one(max_passes: int):
    """A, B, A, A, ... must not keep B waiting for ever (SGLang #15129)."""
    steps = Steps(adapters=AdapterSlots(1), max_passes=max_passes, max_num_seqs=4, pages=400)
    steps.add([2, 3], 5, adapter="A")
    steps.step()
    victim = steps.add([4, 5], 3, adapter="B")
    passed = 0
    for turn in range(500):
        if victim in steps.scheduler.running:
            break
        steps.add([6 + turn % 50, 7], 5, adapter="A")
        before = set(steps.scheduler.running)
        steps.step()
        if victim not in steps.scheduler.running:
            passed += len(set(steps.scheduler.running) - before)
    assert victim in steps.scheduler.running
    assert passed <= max_passes + 4
    steps.run()
    steps.assert_right()


def test_only_the_slot_that_a_starving_adapter_waits_for_drains():
    """The one of two running adapters that ends first takes no more requests; the other goes on taking them."""
    steps = Steps(adapters=AdapterSlots(2), max_passes=2, pages=400, max_num_seqs=32)
    wanted = {"S": 6, "L": 60}
    for adapter, count in wanted.items():
        steps.add([2, 3], count, adapter=adapter)
    steps.step()
    victim = steps.add([6, 7], 3, adapter="B")
    started = {"S": 0, "L": 0}
    for turn in range(20):
        if victim in steps.scheduler.running:
            break
        later = {steps.add([8 + turn, 9], count, adapter=adapter): adapter for adapter, count in wanted.items()}
        steps.step()
        if turn >= 2:  # by now it has been passed over often enough
            for ticket, adapter in later.items():
                started[adapter] += ticket in steps.scheduler.running
    assert victim in steps.scheduler.running
    assert started["S"] == 0
    assert started["L"] > 0
    assert {request.adapter_digest for request in steps.scheduler.running.values()} == {"L", "B"}


def test_requests_behind_those_of_blocked_adapters_fill_the_batch():
    """400 requests that take turns over 64 adapters, 8 at once: those of one adapter find each other."""
    steps = Steps(adapters=AdapterSlots(8), pages=2000, max_num_seqs=64, max_num_batched_tokens=512, check_every=50)
    for index in range(400):
        steps.add([2 + index % 60, 3, 5], 20, adapter=f"a{index % 64}")
    steps.run()
    steps.assert_right()
    assert sum(len(batch.rows) for batch in steps.batches) / len(steps.batches) > 32


def test_an_adapter_acts_from_its_invocation_on_and_shares_what_is_before():
    """A step computes the prompt up to the last place of the invocation, without the adapter; pages before it are the
    base model's, those behind the adapter's own."""
    prompt, one, other = [2, 3, 9, 4, 5, 6, 7, 8, 10, 9, 4, 11, 12, 13], "a1" * 32, "b2" * 32
    slots = AdapterSlots(2)
    steps = Steps(adapters=slots, page_size=4)

    def spans(digest: str | None, invocation: tuple[int, ...] = (9, 4)) -> list[tuple[int, int, int]]:
        """(start, count, slot) of each row that computes the prompt."""
        ticket = steps.add(prompt, 3, adapter=digest, adapter_loading=digest is not None)
        if digest is not None:
            steps.apply(AdapterReady(ticket, digest, invocation=invocation))
        steps.run()
        mine = [row for batch in steps.batches for row in batch.rows if row.spec.ticket == ticket]
        return [(row.start, row.num_scheduled, row.adapter_slot) for row in mine if row.start < len(prompt)]

    assert spans(one) == [(0, 9, 0), (9, 5, 1)]
    assert spans(one) == [(12, 2, 1)], "its own pages"
    assert spans(None) == [(8, 6, 0)], "the two pages before"
    assert spans(other) == [(8, 1, 0), (9, 5, 2)]
    assert spans(other, (9, 5)) == [(12, 2, 0)], "the prompt has no such tokens: the base model's pages"
    assert spans(other, (2, 3)) == [(0, 14, 2)], "from the first token on"
    assert slots.in_use == {}
    steps.assert_right()
