"""All ways to apply the adapters of a step give what one product for each row gives, and touch no other row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from support.device_modes import DEVICE, NoWaiting

from asyncengine.execution.layers.step import LoraTarget
from asyncengine.kernels.cpu import compiler_missing
from asyncengine.lora.layers import stack as stack_module
from asyncengine.lora.layers.slots import CompiledStack, KernelStack, MaskedStack, MaskedStep
from asyncengine.lora.layers.stack import LoraStack, RowStack, RowStep, padded_rank

SLOTS = 6
PARTS = {"one": [24], "q, k and v": [32, 8, 8], "gate and up": [40, 40], "odd widths": [9, 6]}
RANKS = {0: 3, 1: 16, 2: 8, 4: 1}
"""Ranks of the slots that hold something."""
CPU = torch.device("cpu")


def target_of(widths: Sequence[int], inputs: int = 20, **fields: Any) -> LoraTarget:
    return LoraTarget(inputs, tuple((f"part{index}", width) for index, width in enumerate(widths)), **fields)


def fill(stack: LoraStack) -> dict[int, torch.Tensor]:
    """Random factors in every slot of RANKS; what each adds to the weight, [out, in]."""
    generator = torch.Generator().manual_seed(3)
    deltas = {}
    for slot, rank in RANKS.items():
        rows = []
        for part, (_, width) in enumerate(stack.target.modules):
            a = torch.randn(rank, stack.target.in_features, generator=generator)
            b = torch.randn(width, rank, generator=generator)
            if slot != 2 or part == 0:  # slot 2 changes only a part of a merged product
                stack.write(slot, part, a, b)
                rows.append(b @ a)
            else:
                rows.append(torch.zeros(width, a.shape[1]))
        deltas[slot] = torch.cat(rows)
    return deltas


def make(form: str, target: LoraTarget, rank: int = 16) -> LoraStack:
    if form == "compiled" and compiler_missing(torch.float32, CPU) is not None:
        pytest.skip("no compiler")
    kind = {"rows": RowStack, "compiled": CompiledStack, "kernels": KernelStack}.get(form, MaskedStack)
    return kind(target, SLOTS, rank, torch.float32, CPU)


def test_factors_are_sent_without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step may be running while an adapter is written for the next one."""
    stack = MaskedStack(target_of([32, 8, 8]), SLOTS, 16, torch.float32, DEVICE)
    with NoWaiting(monkeypatch) as mode:
        stack.write(1, 2, torch.ones(4, 20), torch.ones(8, 4))
    assert mode.copies == 2


def step_of(form: str, slots: Sequence[int]) -> Any:
    if form in ("rows", "compiled"):
        ranks = np.zeros(SLOTS, dtype=np.int64)
        for slot, rank in RANKS.items():
            ranks[slot] = padded_rank(rank)
        return RowStep(np.array(slots, dtype=np.int64), ranks)
    return MaskedStep(SLOTS, torch.tensor(slots))


STEPS = {
    "decoding": [0, 1, 4, 2, 1, 0],
    "some without": [-1, -1, 1, -1, 0, 0, -1, 2, -1],
    "one row": [1],
    "long and short": [1] * 5 + [0, -1, 2] + [-1] * 6 + [4] * 4 + [0] * 4 + [1, 2],
    "long only": [2] * 7,
}


@pytest.mark.parametrize("form", ["rows", "compiled", "masked", "kernels"])
@pytest.mark.parametrize("widths", PARTS.values(), ids=PARTS)
@pytest.mark.parametrize("slots", STEPS.values(), ids=STEPS)
def test_each_row_gets_its_own_delta(
    form: str, widths: list[int], slots: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stack_module, "LONG_ADAPTER_RUN", 4)
    stack = make(form, target_of(widths))
    deltas = fill(stack)
    x, y = torch.randn(1, len(slots), 20), torch.randn(1, len(slots), sum(widths))
    expected = y.clone()
    for row, slot in enumerate(slots):
        if slot >= 0:
            expected[0, row] += deltas[slot] @ x[0, row]
    stack.add(x, y, step_of(form, slots))
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("form", ["rows", "masked"])
@pytest.mark.parametrize("slots", STEPS.values(), ids=STEPS)
def test_an_embedding_looks_its_tokens_up(form: str, slots: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stack_module, "LONG_ADAPTER_RUN", 4)
    stack = make(form, target_of([12], 50, type="embedding"))
    deltas = fill(stack)
    x, y = torch.randint(0, 50, (1, len(slots))), torch.zeros(1, len(slots), 12)
    stack.add(x, y, step_of(form, slots))
    for row, slot in enumerate(slots):
        wanted = deltas[slot][:, x[0, row]] if slot >= 0 else torch.zeros(12)
        torch.testing.assert_close(y[0, row], wanted, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("form", ["rows", "compiled", "masked", "kernels"])
def test_an_infinite_row_stays_alone(form: str) -> None:
    stack = make(form, target_of([8, 8]))
    fill(stack)
    slots = [1, 0, -1, 1, 2]
    x = torch.randn(1, 5, 20)
    alone = torch.zeros(1, 5, 16)
    stack.add(x, alone, step_of(form, slots))
    x[0, 3] = float("inf")
    y = torch.zeros(1, 5, 16)
    stack.add(x, y, step_of(form, slots))
    assert torch.isfinite(y[0]).all(1).tolist() == [True, True, True, False, True]
    torch.testing.assert_close(y[0, [0, 1, 2, 4]], alone[0, [0, 1, 2, 4]])


@pytest.mark.parametrize("form", ["rows", "compiled", "masked", "kernels"])
def test_growing_keeps_what_is_there(form: str) -> None:
    stack, whole = make(form, target_of([8, 4]), rank=16), make(form, target_of([8, 4]), rank=40)
    fill(stack)
    fill(whole)
    taken = stack.nbytes
    stack.grow(12)
    assert (stack.rank, stack.nbytes) == (16, taken)
    stack.grow(33)
    assert (stack.rank, stack.nbytes) == (40, taken // 2 * 5)
    results = []
    x = torch.randn(1, 4, 20)
    for each in (stack, whole):
        y = torch.zeros(1, 4, 12)
        each.add(x, y, step_of(form, [0, 1, 2, -1]))
        results.append(y)
    assert torch.equal(*results)


@pytest.mark.parametrize("form", ["rows", "compiled", "masked", "kernels"])
def test_a_module_that_sees_other_rows_is_an_error(form: str) -> None:
    stack = make(form, target_of([8]))
    fill(stack)
    with pytest.raises(RuntimeError, match="3 rows of a step of 2"):
        stack.add(torch.zeros(1, 3, 20), torch.zeros(1, 3, 8), step_of(form, [0, 1]))


def test_outputs_that_lie_apart() -> None:
    """Outputs that are cut out of something wider are changed where they lie, and nothing beside them."""
    form = "compiled"
    stack = make(form, target_of([8, 8]))
    deltas = fill(stack)
    x, whole = torch.randn(1, 3, 20), torch.zeros(1, 3, 20)
    stack.add(x, whole[..., 2:18], step_of(form, [0, 1, 0]))
    for row, slot in enumerate([0, 1, 0]):
        torch.testing.assert_close(whole[0, row, 2:18], deltas[slot] @ x[0, row], rtol=1e-5, atol=1e-4)
    assert not whole[..., :2].any()
    assert not whole[..., 18:].any()


def test_what_a_step_does_not_use_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    stack = make("rows", target_of([8]))
    fill(stack)
    monkeypatch.setattr(stack_module, "_weighted_sums", None)
    stack.add(torch.zeros(1, 2, 20), torch.zeros(1, 2, 8), step_of("rows", [3, 5]))
    stack.clear(1)
    stack.add(torch.zeros(1, 2, 20), torch.zeros(1, 2, 8), step_of("rows", [1, -1]))


def test_long_runs_go_by_product_and_the_rest_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stack_module, "LONG_ADAPTER_RUN", 4)
    step = step_of("rows", STEPS["long and short"])
    segments, stretches = step.runs
    assert segments == ((0, 5, 1), (14, 18, 4), (18, 22, 0))
    assert [(each.begin, each.end) for each in stretches] == [(5, 8), (22, 24)]
    rows = stretches[0].rows
    assert rows is not None
    assert rows.tolist() == [0, 2]
    assert step.runs[1][1].rows is None


def test_padding_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a stack of rank 16, a row whose adapter has rank 8 at most uses eight rows of B for each block."""
    stretch = step_of("rows", [0, 1, 2]).runs[1][0]
    indices, offsets, pick = stretch.up(16, (0, 0, 1))
    assert pick is not None
    assert len(indices) == len(pick) == 3 * (8 + 16 + 8)
    assert offsets.tolist() == [0, 8, 16, 24, 40, 56, 72, 80, 88]
