"""Device slots: never more adapters than slots, no copy for one that returns, nobody starves, nothing leaks."""

from __future__ import annotations

import pytest
from support.fake_engine import Steps

from asyncengine.errors import InvariantViolation
from asyncengine.lora.admission import AdapterSlots
from asyncengine.step import AdapterSwap


class Device:
    """A device that knows the content of each slot as an executor would, from the steps it gets."""

    def __init__(self) -> None:
        self.content: dict[int, str] = {}
        self.copies: list[tuple[int, str]] = []

    def take(self, swaps: tuple[AdapterSwap, ...]) -> None:
        for slot, digest, weights in swaps:
            assert weights == f"weights of {digest}"
            self.content[slot] = digest
            self.copies.append((slot, digest))


def weights(digest: str) -> str:
    return f"weights of {digest}"


def test_one_that_returns_needs_no_copy_and_the_oldest_idle_goes_first():
    device = Device()
    slots = AdapterSlots(2, weights)
    for digest in "ABA":
        slots.admit(digest, [])
        slots.release(digest)
    device.take(slots.take_swaps())
    assert slots.take_swaps() == ()
    assert device.copies == [(1, "A"), (2, "B")]
    assert slots.admit("C", []) == 2  # B was used before A
    assert slots.resident == {"A": 1, "C": 2}
    assert slots.copies == 3
    slots.check()


def test_books_that_cannot_be_right_are_told():
    slots = AdapterSlots(1)
    with pytest.raises(InvariantViolation):
        slots.release("A")
    with pytest.raises(InvariantViolation):
        slots.admit("B", ["A"])
    with pytest.raises(ValueError, match="at least 1"):
        AdapterSlots(0)


@pytest.mark.parametrize("max_passes", [1, 8])
def test_a_stream_of_one_adapter_does_not_starve_another(max_passes: int):
    """A, B, A, A, ... (SGLang #15129), also where requests without an adapter pass too."""
    slots = AdapterSlots(1)
    steps = Steps(adapters=slots, max_passes=max_passes, max_num_seqs=4, pages=400)
    steps.add([2, 3], 5, adapter="A")
    steps.step()
    victim = steps.add([4, 5], 3, adapter="B")
    passed = 0
    for turn in range(300):
        if victim in steps.scheduler.running:
            break
        steps.add([6 + turn % 50, 7], 5, adapter="A" if turn % 3 else "")
        before = dict(steps.scheduler.running)
        steps.step()
        if victim not in steps.scheduler.running:
            passed += sum(ticket not in before for ticket in steps.scheduler.running)
    assert victim in steps.scheduler.running
    assert passed <= max_passes + 4
    steps.run()
    steps.assert_right()
    slots.check()
