"""Linears in panels and without them, whatever the CPU that runs the tests is best at."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from asyncengine.kernels.cpu import compiler_missing


def use_panels(wanted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Models loaded from now on keep weights in panels wherever they fit, or nowhere."""
    if compiler_missing(torch.float32, torch.device("cpu")) is None:
        from asyncengine.kernels.cpu import packed

        monkeypatch.setattr(packed, "packing_pays", lambda dtype: wanted)


@pytest.fixture(params=[True, False], ids=["panels", "no panels"])
def panels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Both, one after the other: are weights in panels?"""
    wanted = bool(request.param)
    if wanted:
        pytest.importorskip("numba")
    use_panels(wanted, monkeypatch)
    return wanted


def quantized(weight: torch.Tensor, bits: int) -> Any:
    """A bfloat16 or float32 weight [outputs, inputs] as `gemm_quantized.gemm` takes it."""
    from asyncengine.kernels.cpu.gemm_quantized import QuantizedMatrix
    from asyncengine.kernels.cpu.panel_form import int_form
    from asyncengine.kernels.cpu.quantize import quantize_rows
    from asyncengine.kernels.cpu.quantized_panels import empty_panels

    (outputs, inputs), form = weight.shape, int_form(bits)
    panels = empty_panels(form, outputs, inputs)
    row_scales = torch.empty(outputs) if bits == 8 else None
    quantize_rows(weight, panels, row_scales, bits, 0)
    return QuantizedMatrix(form, panels, row_scales, inputs, outputs)
