"""One product of several checkpoint matrices: each in its place, with its bias, whichever form keeps it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.forwards import relative_error
from support.layer_options import fill, options

from asyncengine.execution.layers.linear import Linear, Part
from asyncengine.execution.layers.options import HEAD_BITS

WIDTHS = {"q": 64, "k": 32, "v": 32}
ODD = {"q": 24, "k": 9, "v": 7}


def made(widths: dict[str, int], dtype: torch.dtype, bias: bool, transposed: bool, **fields: Any) -> Any:
    linear = Linear(
        options(dtype, **fields), [Part(name, width) for name, width in widths.items()], 64, bias=bias,
        transposed=transposed,
    )  # fmt: skip
    tensors = {f"{name}.weight": torch.randn(width, 64).to(dtype) for name, width in widths.items()}
    whole = torch.cat(list(tensors.values()))
    if transposed:
        tensors = {name: tensor.T.contiguous() for name, tensor in tensors.items()}
    biases = {f"{name}.bias": torch.randn(width).to(dtype) for name, width in widths.items()} if bias else {}
    fill(linear, {**tensors, **biases})
    return linear, whole, torch.cat(list(biases.values())) if bias else None


@pytest.mark.parametrize("widths", [WIDTHS, ODD], ids=["panels", "odd"])
@pytest.mark.parametrize("bits", [None, 8, 4])
@pytest.mark.parametrize(("bias", "transposed"), [(False, False), (True, False), (True, True)])
def test_parts_lie_side_by_side(
    widths: dict[str, int], bits: int | None, bias: bool, transposed: bool, panels: bool
) -> None:
    if bits is not None:
        pytest.importorskip("numba")
    for dtype in (torch.float32, torch.bfloat16):
        linear, weight, offset = made(widths, dtype, bias, transposed, bits=bits)
        assert linear.weight.name != "dense" or dtype != torch.float32 or not panels or widths is ODD
        x = torch.randn(5, 64).to(dtype)
        expected = torch.nn.functional.linear(x.float(), weight.float(), None if offset is None else offset.float())
        limit = {None: 1e-6 if dtype == torch.float32 else 5e-3, 8: 0.02, 4: 0.15}[bits]
        assert relative_error(expected, linear(x)) < limit


def test_adapters_get_the_product_by_its_first_path() -> None:
    linear, weight, _ = made(WIDTHS, torch.float32, False, False)
    asked = []

    class Adapters:
        def add(self, path: str, x: torch.Tensor, y: torch.Tensor) -> None:
            asked.append((path, x, tuple(y.shape)))
            y += 1.0

    x = torch.randn(3, 64)
    torch.testing.assert_close(linear(x, Adapters()), x @ weight.T + 1.0)
    assert asked == [("q", x, (3, 128))]


@pytest.mark.parametrize(
    ("dtype", "outputs", "inputs", "panels_pay", "expected"),
    [
        (torch.float32, 64, 64, True, "packed"),
        (torch.bfloat16, 64, 66, True, "packed"),
        (torch.bfloat16, 64, 65, True, "dense"),
        (torch.float32, 33, 64, True, "packed"),
        (torch.float32, 64, 64, False, "dense"),
        (torch.float16, 64, 64, True, "dense"),
    ],
)
def test_where_panels_serve(
    dtype: torch.dtype, outputs: int, inputs: int, panels_pay: bool, expected: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    pytest.importorskip("numba")
    from asyncengine.kernels.cpu import packed

    monkeypatch.setattr(packed, "packing_pays", lambda _: panels_pay)
    name = options(dtype).weight(outputs, inputs).name
    assert name == expected


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    from asyncengine.execution.layers import kernels
    from asyncengine.execution.layers import options as options_module

    for module in (kernels, options_module):
        monkeypatch.setattr(module, "compiler_missing", lambda dtype, device: "none here")
    plain = options()
    assert plain.kernels.name == "torch"
    assert plain.weight(64, 64).name == "dense"
    assert plain.head_weight(64, 64).name == "dense"


def test_the_output_layer_stays_in_eight_bits() -> None:
    pytest.importorskip("numba")
    assert HEAD_BITS == 8
    assert options(bits=4).weight(64, 64).name == "int4"
    assert options(bits=4).head_weight(64, 64).name == "int8"
