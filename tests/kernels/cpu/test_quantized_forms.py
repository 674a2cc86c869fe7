"""Products with weights in every form that checkpoints have, against what those stand for, exactly."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from support.stored_matrices import FORMS, RandomMatrix, rounded
from support.teams import team_of

from asyncengine.execution.layers.stored import GroupedRows, NumberForm, StoredForm
from asyncengine.execution.layers.stored_weight import GroupedWeight, panel_form
from asyncengine.kernels.cpu import gemm_quantized, quantized_narrow, quantized_panels
from asyncengine.kernels.cpu.panel_form import PanelForm

forms = pytest.mark.parametrize("name", FORMS)
OUTPUTS, INPUTS = 70, 768


def weight_of(matrix: RandomMatrix, *, exact: bool = False) -> GroupedWeight:
    stored = StoredForm(matrix.name, matrix.form, matrix.order is not None)
    weight = GroupedWeight(*matrix.shape, stored, torch.float32, exact=exact)
    weight.load(0, matrix)
    return weight


def as_rounded(x: torch.Tensor, form: NumberForm) -> torch.Tensor:
    """x as products with weights of that form have it: with a scale for 64 numbers, or for 32 where weights have one
    for fewer than 64, and then but for the first of the largest of each row."""
    if form.group == 0 or form.group >= 64:
        return rounded(x, 64)
    lone = torch.nn.functional.one_hot(x.abs().argmax(-1), x.shape[-1]).bool()
    return torch.where(lone, x.double(), rounded(x.masked_fill(lone, 0), 32))


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape) + seed))


@forms
def test_the_product_is_that_of_the_exact_matrix(name: str) -> None:
    """The rounding of x is all that differs, and the same in all forms: 1e-2 at most, and to neither side. Products
    with a row of zeros are zeros."""
    matrix = RandomMatrix(name, OUTPUTS, INPUTS)
    assert not weight_of(matrix).multiply(torch.zeros(2, INPUTS), None).any()
    x, exact = random(40, INPUTS), matrix.dense().double()
    found = weight_of(matrix).multiply(x, None).double()
    taken = as_rounded(x, matrix.form)
    expected = taken @ exact.T
    assert float((found - expected).abs().max()) < 2e-6 * float((taken.abs() @ exact.abs().T).max())
    wanted = x.double() @ exact.T
    assert float((found - wanted).norm() / wanted.norm()) < 1e-2
    missed = (found - wanted).mean(1)  # of a row: its outputs share what its numbers lost
    assert abs(float(missed.mean())) < 4 * float(missed.std()) / len(missed) ** 0.5


@forms
def test_an_exact_product_rounds_no_input(name: str) -> None:
    """Neither large numbers nor widths and orders that fill no chunk change that: what is left is float32's own."""
    inputs = INPUTS if FORMS[name].block or FORMS[name].group == 128 else 320
    matrix = RandomMatrix(name, OUTPUTS, inputs, ordered=not FORMS[name].block)
    x, bias, weights = random(40, inputs), random(OUTPUTS), matrix.dense().double()
    x[:, 5] *= 3000
    weight = weight_of(matrix, exact=True)
    assert weight.name == f"{name} (exact)"
    for dtype, most in ((torch.float32, 1e-6), (torch.bfloat16, 2**-8)):
        taken = x.to(dtype)
        expected = taken.double() @ weights.T + bias
        found = weight.multiply(taken, bias).double()
        assert float((found - expected).abs().max()) < most * float((taken.double().abs() @ weights.abs().T).max())


@pytest.mark.parametrize("name", [name for name, form in FORMS.items() if 0 < form.group <= 32])
def test_a_large_input_costs_its_block_alone(name: str) -> None:
    """A file with a scale for 32 weights is read as exactly as by readers that round 32 inputs together: also where
    one input in a hundred is a hundred times as large as the others, as in real models."""
    matrix, x = RandomMatrix(name, OUTPUTS, INPUTS), random(64, INPUTS)
    x[torch.rand(x.shape, generator=torch.Generator().manual_seed(1)) < 0.01] *= 100
    exact = x.double() @ matrix.dense().double().T

    def error(found: torch.Tensor) -> float:
        return float((found.double() - exact).square().mean().sqrt())

    blocks = error(rounded(x, 32) @ matrix.dense().double().T)
    assert error(weight_of(matrix).multiply(x, None)) < 1.01 * blocks
    assert blocks < 0.9 * error(rounded(x, 64) @ matrix.dense().double().T)


@pytest.mark.parametrize("exact", [False, True])
@forms
def test_rows_in_any_company_and_with_any_threads(name: str, exact: bool) -> None:
    """Results are equal to the bit; so too in columns of a wider matrix."""
    weight, x = weight_of(RandomMatrix(name, OUTPUTS, INPUTS), exact=exact), random(40, INPUTS)
    together = weight.multiply(x, None)
    for first, last in ((0, 1), (1, 3), (3, 8), (8, 15), (2, 5), (5, 9), (7, 31)):
        assert torch.equal(weight.multiply(x[first:last], None), together[first:last])
    with team_of(3):
        assert torch.equal(weight.multiply(x, None), together)
    wide = torch.full((40, OUTPUTS + 9), 7.0)
    weight.multiply(x, None, wide[:, 4 : 4 + OUTPUTS])
    assert torch.equal(wide[:, 4 : 4 + OUTPUTS], together)
    assert bool((wide[:, :4] == 7).all())
    assert bool((wide[:, 4 + OUTPUTS :] == 7).all())


@forms
def test_rows_are_read_back_exactly(name: str) -> None:
    matrix, ids = RandomMatrix(name, OUTPUTS, INPUTS), torch.tensor([69, 0, 17, 17])
    weight = weight_of(matrix)
    for dtype in (torch.float32, torch.bfloat16):
        out = torch.empty((4, INPUTS), dtype=dtype)
        weight.read_rows(ids, out)
        assert torch.equal(out, matrix.dense()[ids].to(dtype))


@pytest.mark.parametrize("inputs", [128, 320, 896])
@pytest.mark.parametrize("name", [name for name, form in FORMS.items() if not form.block])
def test_widths_that_fill_no_chunk(name: str, inputs: int) -> None:
    if inputs % (FORMS[name].group or 1):
        pytest.skip("no whole groups")
    matrix, x = RandomMatrix(name, 33, inputs), random(7, inputs)
    expected = as_rounded(x, matrix.form) @ matrix.dense().double().T
    assert float((weight_of(matrix).multiply(x, None) - expected).norm() / expected.norm()) < 1e-5


@forms
@pytest.mark.parametrize("value", [127.0, -127.0])
def test_the_largest_numbers_do_not_overflow(name: str, value: float) -> None:
    """Whole numbers in x stay as they are, where the largest of a group is 127: the sums are exact."""
    matrix, table = RandomMatrix(name, 16, 512), FORMS[name].table
    for number in {0, (1 << FORMS[name].bits) - 1, table.index(max(table)) if table else 0}:
        matrix.whole.numbers[:] = number
        weight, x = weight_of(matrix), torch.full((9, 512), value)
        expected = x.double() @ matrix.dense().double().T
        for rows in (2, 9):
            found = weight.multiply(x[:rows], None).double()
            assert torch.allclose(found, expected[:rows], rtol=1e-5, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.skipif(not quantized_narrow.NARROW, reason="a CPU that has tiles of one kind")
@pytest.mark.parametrize("name", ["Q4_K", "Q6_K", "IQ4_XS", "gptq8", "w8a8"])
def test_tiles_of_both_kinds_agree(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results are equal to the bit: what one machine answers, another does."""
    weight, x, bias = weight_of(RandomMatrix(name, OUTPUTS, INPUTS)), random(11, INPUTS), random(OUTPUTS)
    shorter = [x[:rows] for rows in (1, 2, 3, 5, 11)]
    narrow = [weight.multiply(rows, bias) for rows in shorter]
    monkeypatch.setattr(gemm_quantized, "NARROW", False)
    for rows, expected in zip(shorter, narrow, strict=True):
        assert torch.equal(weight.multiply(rows, bias), expected)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", ["Q4_K", "Q6_K", "awq", "mxfp4"])
def test_what_is_not_finite_stays_so(name: str, value: float) -> None:
    weight, x = weight_of(RandomMatrix(name, 16, 512)), random(3, 512)
    clean = weight.multiply(x, None)
    x[1, 70] = value
    found = weight.multiply(x, None)
    assert not torch.isfinite(found[1]).any()
    assert torch.equal(found[[0, 2]], clean[[0, 2]])


def test_matrices_that_come_in_parts_and_orders() -> None:
    """Parts of a matrix give what the whole gives, to the bit; an order of the inputs is that of x."""
    matrix = RandomMatrix("Q4_K", 96, 512)
    whole, weight = weight_of(matrix), GroupedWeight(96, 512, StoredForm("Q4_K", matrix.form), torch.float32)
    weight.rows_at_once = 16
    weight.load(0, matrix)
    assert torch.equal(weight.panels, whole.panels)
    assert matrix.released[-1] == (0, 96)
    assert matrix.released[-6:-1] == [(first, first + 16) for first in range(0, 80, 16)]
    ordered = RandomMatrix("gptq8", 48, 256, ordered=True)
    x, out = random(5, 256), torch.empty((2, 256))
    reordered = weight_of(ordered)
    expected = x.double() @ ordered.dense().double().T
    assert float((reordered.multiply(x, None) - expected).norm() / expected.norm()) < 1e-2
    reordered.read_rows(torch.tensor([3, 40]), out)
    assert torch.equal(out, ordered.dense()[[3, 40]])


@pytest.mark.parametrize(("group", "inputs"), [(256, 768), (512, 640), (0, 640)])
def test_groups_larger_than_those_of_kernels(group: int, inputs: int) -> None:
    matrix = RandomMatrix("awq", 20, 128)
    groups = -(-inputs // group) if group else 1
    generator = np.random.default_rng(0)
    numbers = generator.integers(0, 16, (20, inputs), dtype=np.uint8)
    scales = generator.uniform(0.5, 1, (20, groups)).astype(np.float16).astype(np.float32)
    zeros = generator.integers(0, 16, (20, groups), dtype=np.uint8)
    matrix.shape, matrix.form = (20, inputs), type(matrix.form)(4, group, "zeros")
    matrix.whole = GroupedRows(numbers, scales, zeros=zeros)
    size = group or inputs
    exact = torch.from_numpy(
        np.stack([(numbers[:, i] - zeros[:, i // size].astype(float)) * scales[:, i // size] for i in range(inputs)], 1)
    )
    x = random(3, inputs)
    expected = rounded(x, 64) @ exact.T
    assert float((weight_of(matrix).multiply(x, None) - expected).norm() / expected.norm()) < 1e-5


@pytest.mark.parametrize(
    "fields",
    [{"bits": 5}, {"group": 48}, {"below": "table"}, {"block": 96}, {"group": 0, "below": "minima"},
     {"scale": "float64"}, {"below": "zeros", "block": 256}],
)  # fmt: skip
def test_forms_without_a_kernel(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="no kernel"):
        PanelForm(**{"bits": 4, "group": 32, **fields})
    assert panel_form(type(FORMS["Q4_0"])(5, 32)) is None


def test_parts_that_do_not_fit_are_refused() -> None:
    form = panel_form(FORMS["Q4_0"])
    panels = quantized_panels.empty_panels(form, 32, 128)
    numbers, scales = np.zeros((16, 128), np.uint8), np.zeros((16, 4), np.float32)
    quantized_panels.pack_rows(form, panels, 16, numbers, scales=scales)
    for first, given, planes in (
        (8, numbers, {"scales": scales}),
        (32, numbers, {"scales": scales}),
        (0, numbers[:, :32], {"scales": scales}),
        (0, numbers, {}),
        (0, numbers, {"scales": scales, "zeros": scales}),
        (0, numbers, {"scales": scales[:, :3]}),
    ):
        with pytest.raises(ValueError, match=r"fit|needed"):
            quantized_panels.pack_rows(form, panels, first, given, **planes)


@pytest.mark.parametrize("name", FORMS)
def test_memory_is_what_the_form_needs(name: str) -> None:
    """Bits of a number, with all that belongs to it."""
    most = {"Q4_0": 4.5, "Q8_0": 8.5, "Q4_1": 5, "Q4_K": 4.63, "Q5_K": 6.63, "Q6_K": 6.63, "awq": 4.25, "w8a8": 8}
    form = panel_form(FORMS[name])
    assert form.chunk_bytes * 8 / form.chunk / 16 <= most.get(name, 8.75)
    assert form.chunk_bytes % 64 == 0
