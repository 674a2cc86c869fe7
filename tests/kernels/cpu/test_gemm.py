"""Compiled products: near a float64 reference at every shape, and equal whoever shares the batch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.panels import quantized

pytest.importorskip("numba")

import llvmlite.binding

from asyncengine.kernels.cpu import gemm_quantized, vectors

TYPES = (torch.float32, torch.bfloat16)


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


# ---------------------------------------------------------------- weights rounded to 8 and 4 bits: how near they are.
# Their products are those of forms that checkpoints have (test_quantized_forms.py).


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


def product(x: torch.Tensor, weight: torch.Tensor, bits: int, bias: torch.Tensor | None = None) -> torch.Tensor:
    out = torch.empty((*x.shape[:-1], weight.shape[0]))
    gemm_quantized.gemm(x, quantized(weight, bits), out, bias)
    return out


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
def test_zeros(bits: int) -> None:
    assert not product(torch.zeros(2, 64), random(16, 64), bits).any()
    assert not product(random(2, 64), torch.zeros(16, 64), bits).any()


def test_four_bits_choose_better_than_the_largest_weight_alone() -> None:
    weight = random(64, 64)
    held = unpacked(quantized(weight, 4))
    at = weight.abs().argmax(1, keepdim=True)
    scale = weight.gather(1, at) / -8
    naive = (weight / scale).round().clamp(-8, 7) * scale
    assert error(held, weight.double()) < 0.95 * error(naive, weight.double())


def test_other_machines_features_can_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels compiled for a chosen CPU use what that one has, not what this one has."""
    import numba

    monkeypatch.setattr(numba.config, "CPU_NAME", "generic")
    monkeypatch.setattr(numba.config, "CPU_FEATURES", None)  # set where tests run for another CPU
    assert not vectors.cpu_has("sse2")
    monkeypatch.setattr(numba.config, "CPU_FEATURES", "+avx2,+fma")
    assert vectors.cpu_has("avx2", "fma")
    assert not vectors.cpu_has("avx2", "avx512vnni")


WITHOUT_UNIT = """
import torch
from asyncengine.kernels.cpu import gemm_quantized, panel_form, vectors

assert not vectors.UNIT
assert gemm_quantized.code_for(panel_form.int_form(8), torch.float32)
"""


def test_a_cpu_without_a_matrix_unit_needs_none_of_its_instructions(tmp_path: Path) -> None:
    """Its compiler does not know them, and ends the process where it meets one."""
    features = {name: has and "amx" not in name for name, has in llvmlite.binding.get_host_cpu_features().items()}
    named = ",".join(f"{'+' if has else '-'}{name}" for name, has in features.items())
    chosen = {"NUMBA_CPU_NAME": llvmlite.binding.get_host_cpu_name(), "NUMBA_CPU_FEATURES": named}
    environment = {**os.environ, **chosen, "ASYNCENGINE_CACHE": str(tmp_path)}
    subprocess.run([sys.executable, "-c", WITHOUT_UNIT], env=environment, check=True, timeout=300)
