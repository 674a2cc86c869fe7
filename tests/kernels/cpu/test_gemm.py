"""Compiled products: near a float64 reference at every shape, and equal whoever shares the batch."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("numba")

from asyncengine.kernels.cpu import gemm_quantized, quantize, quantized_panels, vectors

TYPES = (torch.float32, torch.bfloat16)


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


# ---------------------------------------------------------------- weights in 8 and 4 bits


def unpacked(matrix: gemm_quantized.QuantizedMatrix) -> torch.Tensor:
    """float64 [outputs, inputs], by the layout that `panel_form` documents, of whole chunks without filling up."""
    panels, chunks = matrix.panels.shape[:2]
    head = matrix.form.head
    lines = matrix.panels[..., head:].reshape(panels, -1, 16, 4)
    if matrix.form.bits == 8:
        assert matrix.row_scales is not None
        whole = (lines.double() - 128).permute(0, 2, 1, 3).reshape(panels * 16, -1)
        return whole[: matrix.outputs, : matrix.inputs] * matrix.row_scales.double()[:, None]
    halves = torch.stack((lines & 15, lines >> 4), 2).double() - 8
    whole = halves.permute(0, 3, 1, 2, 4).reshape(panels * 16, -1)
    scales = matrix.panels[..., :head].contiguous().view(torch.bfloat16).view(panels, chunks * 2, 16)
    by_input = scales.double().transpose(1, 2).reshape(panels * 16, -1).repeat_interleave(64, 1)
    return (whole * by_input)[: matrix.outputs, : matrix.inputs]


def rounded(x: torch.Tensor) -> torch.Tensor:
    """float64: x in groups of 64, each number the nearest of 255 steps."""
    padded = torch.nn.functional.pad(x.float(), (0, -x.shape[-1] % gemm_quantized.GROUP)).unflatten(
        -1, (-1, gemm_quantized.GROUP)
    )
    scale = padded.abs().amax(-1, keepdim=True) / 127
    steps = (padded * torch.where(scale > 0, 1 / scale, 0)).round()
    return (steps.double() * scale.double()).flatten(-2)[..., : x.shape[-1]]


def product(x: torch.Tensor, weight: torch.Tensor, bits: int, bias: torch.Tensor | None = None) -> torch.Tensor:
    out = torch.empty((*x.shape[:-1], weight.shape[0]))
    gemm_quantized.gemm(x, quantize.quantize(weight, bits), out, bias)
    return out


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 1), (16, 64), (31, 63), (33, 65), (5, 130), (96, 192)])
def test_integer_products_are_exact(bits: int, outputs: int, inputs: int) -> None:
    """Against the same rounded numbers in float64; widths that are no multiples of panels or groups are padded."""
    weight = random(outputs, inputs)
    held = unpacked(quantize.quantize(weight, bits))
    for rows in (1, 2, 5, 6, 7, 33):
        x = random(rows, inputs)
        expected = rounded(x) @ held.T
        assert float((product(x, weight, bits) - expected).abs().max()) < 1e-4 * float(expected.abs().max())


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("bits", "most"), [(8, 0.015), (4, 0.12)])
def test_rounding_stays_small(dtype: torch.dtype, bits: int, most: float) -> None:
    x, weight = random(16, 512, dtype=dtype), random(256, 512, dtype=dtype)
    assert error(product(x, weight, bits), x.double() @ weight.double().T) < most


def test_one_large_input_costs_its_group_alone() -> None:
    x, weight = random(1, 256), random(32, 256)
    x[0, 3] = 1000.0
    weight[:, :64] = 0
    assert error(product(x, weight, 8), x.double() @ weight.double().T) < 0.015


@pytest.mark.parametrize("bits", [8, 4])
def test_quantized_rows_at_1_to_33_do_not_depend_on_their_neighbours(bits: int) -> None:
    x, weight = random(33, 200), random(70, 200)
    together = product(x, weight, bits)
    for rows in range(1, 34):
        assert torch.equal(product(x[33 - rows :], weight, bits), together[33 - rows :])


@pytest.mark.parametrize("bits", [8, 4])
def test_bias_and_type_of_the_result(bits: int) -> None:
    x, weight, bias = random(3, 64, dtype=torch.bfloat16), random(20, 64, dtype=torch.bfloat16), random(20)
    out = torch.empty((3, 20), dtype=torch.bfloat16)
    gemm_quantized.gemm(x, quantize.quantize(weight, bits), out, bias)
    assert torch.equal(out, product(x, weight, bits, bias).bfloat16())
    assert torch.allclose(product(x, weight, bits, bias), product(x, weight, bits) + bias)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_stays_so(value: float) -> None:
    x, weight = random(3, 128), random(16, 128)
    x[1, 70] = value
    found = product(x, weight, 8)
    assert not torch.isfinite(found[1]).any()
    assert torch.isfinite(found[[0, 2]]).all()


@pytest.mark.parametrize("bits", [8, 4])
def test_zeros(bits: int) -> None:
    assert not product(torch.zeros(2, 64), random(16, 64), bits).any()
    assert not product(random(2, 64), torch.zeros(16, 64), bits).any()


def test_four_bits_choose_better_than_the_largest_weight_alone() -> None:
    weight = random(64, 64)
    held = unpacked(quantize.quantize(weight, 4))
    at = weight.abs().argmax(1, keepdim=True)
    scale = weight.gather(1, at) / -8
    naive = (weight / scale).round().clamp(-8, 7) * scale
    assert error(held, weight.double()) < 0.95 * error(naive, weight.double())


@pytest.mark.parametrize("dtype", TYPES)
def test_rows_are_read_back(dtype: torch.dtype) -> None:
    weight = random(37, 100, dtype=dtype)
    matrix = quantize.quantize(weight, 8)
    ids = torch.tensor([36, 0, 17, 17])
    out = torch.empty((4, 100), dtype=dtype)
    quantized_panels.read_rows(matrix.form, matrix.panels, matrix.row_scales, ids, out)
    expected = unpacked(matrix)[ids]
    assert torch.allclose(out.double(), expected, rtol=1e-2 if dtype == torch.bfloat16 else 1e-6)
    assert error(out, weight[ids].double()) < 0.01


def test_other_machines_features_can_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels compiled for a chosen CPU use what that one has, not what this one has."""
    import numba

    monkeypatch.setattr(numba.config, "CPU_NAME", "generic")
    monkeypatch.setattr(numba.config, "CPU_FEATURES", None)  # set where tests run for another CPU
    assert not vectors.cpu_has("sse2")
    monkeypatch.setattr(numba.config, "CPU_FEATURES", "+avx2,+fma")
    assert vectors.cpu_has("avx2", "fma")
    assert not vectors.cpu_has("avx2", "avx512vnni")
