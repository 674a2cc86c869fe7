"""Experts in one call: near a float64 reference, and to the bit what each expert alone makes of each row alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.forwards import relative_error
from support.layer_options import options
from support.teams import team_of

from asyncengine.execution.layers.experts import Experts, ExpertsConfig, clamped
from asyncengine.execution.layers.weight_forms import DenseWeight
from asyncengine.kernels.cpu import activation
from asyncengine.kernels.cpu.jit import tag_of

FLOAT, HALF = torch.float32, torch.bfloat16
COUNT, CHOSEN = 7, 3
FORMS = [(HALF, None), (FLOAT, None), (FLOAT, 8), (HALF, 4)]
"""Types, and bits of the weights: those that the tests of whole models have compiled as well."""
ERROR = {(HALF, None): 6e-3, (FLOAT, None): 1e-6, (FLOAT, 8): 2e-2, (HALF, 4): 0.2}
"""The relative error of the sum that rounding causes, with weights drawn at random."""
SHAPES = [(64, 32, False), (96, 160, True)]
"""Widths of x and between the products (groups of 64 inputs that are full, and those that are not), and whether the
activation is bounded."""


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def make(width: int, inner: int, dtype: torch.dtype, bits: int | None, *, bounded: bool = False) -> Experts:
    """Experts with random weights, which are loaded all experts' at once."""
    from unittest.mock import patch

    from asyncengine.kernels.cpu import packed

    config = ExpertsConfig(COUNT, inner)
    if bounded:
        config = ExpertsConfig(COUNT, inner, "clamped", bias=("up.bias", "down.bias"), limit=1.0)
    with patch.object(packed, "packing_pays", lambda dtype: True):
        experts = Experts(options(dtype, bits=bits), config, "", width)
    for name, slot in experts.stacked_slots():
        slot.load(draw(*slot.shape) * (1.0 if "bias" in name else 2 * slot.shape[-1] ** -0.5))
    assert experts.compiled
    return experts


def choice(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows)
    ids = torch.rand(rows, COUNT, generator=generator).argsort(dim=1)[:, :CHOSEN].contiguous()
    return ids, torch.rand(rows, CHOSEN, generator=generator)


def reference(
    experts: Experts, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, *, bounded: bool
) -> torch.Tensor:
    """The experts' sum in float64."""
    inner = experts.config.width
    up, down = (
        draw(COUNT, 2 * inner, x.shape[1]) * 2 * x.shape[1] ** -0.5,
        draw(COUNT, x.shape[1], inner) * 2 * inner**-0.5,
    )
    out = torch.zeros(x.shape, dtype=torch.float64)
    for row in range(len(x)):
        for expert, weight in zip(ids[row].tolist(), weights[row].tolist(), strict=True):
            both = up[expert].double() @ x[row].double()
            if bounded:
                both = both + draw(COUNT, 2 * inner)[expert].double()
                made = clamped(both, experts.config.alpha, experts.config.limit).double()
            else:
                made = torch.nn.functional.silu(both[:inner]) * both[inner:]
            made = down[expert].double() @ made
            out[row] += weight * (made + draw(COUNT, x.shape[1])[expert].double() if bounded else made)
    return out


@pytest.mark.parametrize(("width", "inner", "bounded"), SHAPES)
@pytest.mark.parametrize(("dtype", "bits"), FORMS)
def test_near_the_exact_sum(width: int, inner: int, dtype: torch.dtype, bits: int | None, bounded: bool) -> None:
    experts = make(width, inner, dtype, bits, bounded=bounded)
    x, (ids, weights) = draw(21, width).to(dtype), choice(21)
    expected = reference(experts, x, ids, weights, bounded=bounded)
    assert relative_error(expected, experts(x, ids, weights)) < ERROR[dtype, bits]


@pytest.mark.parametrize(("dtype", "bits"), FORMS)
def test_a_row_s_bits_are_its_own(dtype: torch.dtype, bits: int | None) -> None:
    """Rows run alone and in any company, by any number of threads in pieces of any size, and cut into shorter calls."""
    experts = make(96, 160, dtype, bits)
    x, (ids, weights) = draw(60, 96).to(dtype), choice(60)
    whole = experts(x, ids, weights)
    for row in range(0, 60, 7):
        part = slice(row, row + 1)
        assert torch.equal(experts(x[part], ids[part], weights[part]), whole[part])
    experts.pairs_at_once = 4 * CHOSEN
    assert torch.equal(experts(x, ids, weights), whole)
    experts.pairs_at_once = 1 << 30
    for threads in (2, 4):
        with team_of(threads):
            assert torch.equal(experts(x, ids, weights), whole)
            assert torch.equal(experts(x[:2], ids[:2], weights[:2]), whole[:2])


def test_only_what_is_chosen_is_read() -> None:
    """Weights of other experts may be anything; a row that is no number spoils no other."""
    experts = make(64, 32, HALF, None)
    x, (ids, weights) = draw(5, 64).to(HALF), choice(5)
    ids[:] = torch.tensor([5, 0, 2])
    expected = experts(x, ids, weights)
    for expert in (1, 3, 4, 6):
        experts.up.load(expert, 0, torch.full((64, 64), torch.nan))
        experts.down.load(expert, 0, torch.full((64, 32), torch.nan))
    assert torch.equal(experts(x, ids, weights), expected)
    x[1] = torch.nan
    found = experts(x, ids, weights)
    assert found[1].isnan().all()
    assert torch.equal(found[[0, 2, 3, 4]], expected[[0, 2, 3, 4]])


@pytest.mark.parametrize("dtype", [FLOAT, HALF])
def test_without_the_kernel(dtype: torch.dtype) -> None:
    """Torch, expert after expert, gives the same numbers."""
    compiled, plain = make(64, 32, dtype, None), Experts(options(dtype, plain=True), ExpertsConfig(COUNT, 32), "", 64)
    assert not plain.compiled
    for _, slot in plain.stacked_slots():
        slot.load(draw(*slot.shape) * 2 * slot.shape[-1] ** -0.5)
    x, (ids, weights) = draw(13, 64).to(dtype), choice(13)
    error = relative_error(compiled(x, ids, weights), plain(x, ids, weights))
    assert error < (1e-6 if dtype == FLOAT else 6e-3)
    assert plain(x[:0], ids[:0], weights[:0]).shape == compiled(x[:0], ids[:0], weights[:0]).shape == (0, 64)


def test_plain_weights_are_one_block_and_others_have_a_form_each() -> None:
    dense = Experts(options(torch.float16, plain=True), ExpertsConfig(COUNT, 32), "", 64)
    assert [type(form) for form in dense.up.forms] == [DenseWeight]
    odd = Experts(options(FLOAT, plain=True), ExpertsConfig(COUNT, 31), "", 48)
    assert len(odd.up.forms) == COUNT


@pytest.mark.parametrize("dtype", [FLOAT, HALF])
def test_bounded_activation(dtype: torch.dtype) -> None:
    both = 4 * draw(5, 2 * 37).to(dtype)
    both[0, 0], both[1, 1], both[2, :2] = torch.nan, torch.nan, torch.inf
    found, expected = both.new_empty(5, 37), clamped(both.double(), 1.7, 3.0)
    alpha, limit = np.float32(1.7), np.float32(3)
    activation.gate_clamped(both.data_ptr(), found.data_ptr(), 5, 37, alpha, limit, tag_of(dtype), 0)
    close = {FLOAT: 1e-5, HALF: 1e-2}[dtype]
    torch.testing.assert_close(found.double(), expected.double(), rtol=close, atol=close, equal_nan=True)
