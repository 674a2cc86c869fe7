"""Forms of one linear: packed by oneDNN and in panels, and where panels are the form to choose."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from asyncengine.models.linears import FastLinear, PanelLinear, can_pack, panels_serve
from torch import nn

from asyncengine.device.output_buffers import OutputBufferPool
from asyncengine.models import linears

TOLERANCE = {torch.float32: (1e-5, 1e-5), torch.bfloat16: (2e-2, 1e-1)}
"""Relative and absolute."""

types = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


def check(made: Any, weight: torch.Tensor, bias: torch.Tensor | None, result: torch.dtype) -> None:
    outputs, inputs = weight.shape
    relative, absolute = TOLERANCE[weight.dtype]
    assert (made.in_features, made.out_features, made.packed) == (inputs, outputs, True)
    for shape in ((1, 1, inputs), (1, 40, inputs), (3, inputs), (2, 3, 5, inputs), (0, inputs)):
        x = torch.randn(shape).to(weight.dtype)
        found, expected = made(x), nn.functional.linear(x, weight, bias)
        assert (found.shape, found.dtype) == (expected.shape, result)
        assert torch.allclose(found.float(), expected.float(), rtol=relative, atol=absolute)


@types
@pytest.mark.parametrize("bias", [True, False])
def test_packed_linear(dtype: torch.dtype, bias: bool) -> None:
    if not can_pack(dtype, torch.device("cpu")):
        pytest.skip("oneDNN has no packed linear for this type here")
    weight, offset = torch.randn(33, 17).to(dtype), torch.randn(33).to(dtype) if bias else None
    check(FastLinear(weight, offset, pack=True), weight, offset, dtype)


@types
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("logits", [True, False])
def test_panel_linear(dtype: torch.dtype, bias: bool, logits: bool) -> None:
    pytest.importorskip("numba")
    weight, offset = torch.randn(96, 34).to(dtype), torch.randn(96).to(dtype) if bias else None
    kept = None if offset is None else offset.clone()
    made = PanelLinear(weight, offset, OutputBufferPool() if logits else None)
    check(made, weight, kept, torch.float32 if logits else dtype)
    if offset is not None:
        offset.zero_()  # whoever had the bias may do with it what they like
        check(made, weight, kept, torch.float32 if logits else dtype)


@types
def test_panel_linear_gives_back_its_rows(dtype: torch.dtype) -> None:
    pytest.importorskip("numba")
    weight, ids = torch.randn(96, 34).to(dtype), torch.tensor([[5, 0], [95, 5]])
    out = torch.empty((2, 2, 34), dtype=dtype)
    PanelLinear(weight, None).read_rows(ids, out)
    assert torch.equal(out, weight[ids])


@pytest.mark.parametrize("pays", [True, False])
@pytest.mark.parametrize(
    ("weight", "fits"),
    [
        (torch.empty(32, 4), True),
        (torch.empty(64, 4).bfloat16(), True),
        (torch.empty(64, 3).bfloat16(), False),
        (torch.empty(31, 4), False),
        (torch.empty(32, 4).half(), False),
        (torch.empty((32, 4), device="meta"), False),
    ],
)
def test_where_panels_serve(weight: torch.Tensor, fits: bool, pays: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("numba")
    from asyncengine.kernels.cpu import packed

    monkeypatch.setattr(packed, "packing_pays", lambda dtype: pays)
    assert panels_serve(weight) == (fits and pays)


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linears, "compiler_missing", lambda dtype, device: "none here")
    assert not panels_serve(torch.empty(32, 4))


@pytest.mark.parametrize("x", [torch.ones(2, 64), torch.ones(2, 66).bfloat16(), torch.ones(2, 62).bfloat16()])
def test_an_input_that_does_not_fit_is_refused(x: torch.Tensor) -> None:
    """The kernel would read past its end."""
    pytest.importorskip("numba")
    with pytest.raises(ValueError, match="the weight"):
        PanelLinear(torch.ones(32, 64).bfloat16(), None)(x)
