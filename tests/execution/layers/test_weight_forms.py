"""Every form of a weight multiplies as torch does, is filled in any order, and is filled again where it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support.forwards import relative_error
from support.reachable import tensors_in

from asyncengine.execution.device.output_buffers import OutputBufferPool
from asyncengine.execution.layers.weight_forms import (
    DenseWeight,
    PackedWeight,
    QuantizedWeight,
    WeightForm,
)

CPU = torch.device("cpu")
OUTPUTS, INPUTS = 96, 64
Make = Callable[..., WeightForm]
FORMS: dict[str, Make] = {
    "dense": lambda outputs, inputs, dtype: DenseWeight(outputs, inputs, dtype, CPU),
    "packed": lambda outputs, inputs, dtype: PackedWeight(outputs, inputs, dtype, lambda part: None),
    "int8": lambda outputs, inputs, dtype, bounds=(): QuantizedWeight(outputs, inputs, 8, dtype, bounds),
    "int4": lambda outputs, inputs, dtype, bounds=(): QuantizedWeight(outputs, inputs, 4, dtype, bounds),
}
ERROR = {"int8": 0.02, "int4": 0.15}
DTYPES = [torch.float32, torch.bfloat16]
forms = pytest.mark.parametrize("name", FORMS)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])


def make(name: str, outputs: int, inputs: int, dtype: torch.dtype, **options: Any) -> WeightForm:
    if name != "dense":
        pytest.importorskip("numba")
    form = FORMS[name](outputs, inputs, dtype, **options)
    assert form.name == name
    return form


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape) + seed)).to(dtype)


def filled(name: str, weight: torch.Tensor, **options: Any) -> WeightForm:
    form = make(name, *weight.shape, weight.dtype, **options)
    form.load(0, weight)
    return form


def addresses(form: WeightForm) -> set[int]:
    return {each.data_ptr() for each in tensors_in(form)}


def blocks(cuts: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """(first, last) of each, the last one first."""
    yield from reversed(list(zip((0, *cuts), (*cuts, OUTPUTS), strict=True)))


@forms
@dtypes
@pytest.mark.parametrize("with_bias", [False, True])
def test_product_is_torchs(name: str, dtype: torch.dtype, with_bias: bool) -> None:
    weight, memory = random(OUTPUTS, INPUTS, dtype=dtype), OutputBufferPool()
    form = filled(name, weight)
    bias = random(OUTPUTS).to(form.bias_dtype) if with_bias else None
    for shape in ((1, INPUTS), (3, INPUTS), (33, INPUTS), (0, INPUTS)):
        x = random(*shape, dtype=dtype, seed=5)
        expected = torch.nn.functional.linear(x.float(), weight.float(), None if bias is None else bias.float())
        found, logits = form.multiply(x, bias), form.logits(x, bias, memory)
        assert (found.shape, found.dtype) == (expected.shape, dtype)
        assert (logits.shape, logits.dtype) == (expected.shape, torch.float32)
        if len(x):
            most = ERROR.get(name, 1e-6 if dtype == torch.float32 else 5e-3)
            assert relative_error(expected, found) < most
            assert relative_error(expected, logits) < most


def test_quantized_takes_what_fills_no_panel() -> None:
    """Outputs and inputs that are multiples of nothing."""
    for name, most in ERROR.items():
        weight, x = random(33, 100), random(5, 100, seed=1)
        assert relative_error(x @ weight.T, filled(name, weight).multiply(x, None)) < most


@forms
@dtypes
@pytest.mark.parametrize("cuts", [(32, 64), (16, 80), (7, 40, 41)], ids=["panels", "half panels", "odd"])
def test_rows_come_in_any_order_and_type(name: str, dtype: torch.dtype, cuts: tuple[int, ...]) -> None:
    """The bits are those of one piece, also from float16 and float64, and from a transposed view."""
    weight = random(OUTPUTS, INPUTS).half()
    whole = filled(name, weight.to(dtype))
    options = {"bounds": cuts} if name in ERROR else {}
    for given in (weight, weight.double(), weight.T.contiguous().T):
        form = make(name, OUTPUTS, INPUTS, dtype, **options)
        for first, last in blocks(cuts):
            form.load(first, given[first:last])
        x = random(9, INPUTS, dtype=dtype)
        assert torch.equal(form.multiply(x, None), whole.multiply(x, None))


@forms
@dtypes
@pytest.mark.parametrize(("outputs", "inputs", "cut"), [(96, 64, 32), (96, 64, 40), (50, 100, 20)])
def test_loaded_again_it_is_as_if_new(name: str, dtype: torch.dtype, outputs: int, inputs: int, cut: int) -> None:
    """Nothing of the first weight is in its bits, and its address stays: whoever has that, has the new weight."""
    options = {"bounds": (cut,)} if name in ERROR else {}
    old, new = (scale * random(outputs, inputs, dtype=dtype, seed=scale) for scale in (9, 1))
    form, fresh = (make(name, outputs, inputs, dtype, **options) for _ in range(2))
    for target, weight in ((form, old), (form, new), (fresh, new)):
        target.load(0, weight[:cut])
        target.load(cut, weight[cut:])
        before = addresses(form)
    x = random(5, inputs, dtype=dtype)
    assert torch.equal(form.multiply(x, None), fresh.multiply(x, None))
    form.load(0, old[:cut])
    form.load(cut, old[cut:])
    assert addresses(form) == before


@pytest.mark.parametrize("name", ["dense", "packed", "int8"])
@dtypes
def test_rows_are_read_back(name: str, dtype: torch.dtype) -> None:
    weight, ids = random(OUTPUTS, INPUTS, dtype=dtype), torch.tensor([5, 0, 95, 5])
    out = torch.empty((4, INPUTS), dtype=dtype)
    filled(name, weight).read_rows(ids, out)
    if name == "int8":
        assert relative_error(weight[ids].float(), out) < 0.01
    else:
        assert torch.equal(out, weight[ids])


@pytest.mark.parametrize("name", ["packed", "int8"])
def test_logits_stay_while_they_are_held(name: str) -> None:
    form, memory, x = filled(name, random(OUTPUTS, INPUTS)), OutputBufferPool(), random(3, INPUTS)
    first = form.logits(x, None, memory)
    kept = first.clone()
    form.logits(-x, None, memory)
    assert torch.equal(first, kept)


@pytest.mark.parametrize("x", [torch.ones(2, 64), torch.ones(2, 66).bfloat16(), torch.ones(2, 62).bfloat16()])
def test_an_input_that_does_not_fit_is_refused(x: torch.Tensor) -> None:
    """The kernel would read past its end."""
    form = filled("packed", torch.ones(32, 64).bfloat16())
    with pytest.raises(ValueError, match="the weight"):
        form.multiply(x, None)


def test_quantized_rows_that_share_a_panel_are_no_block() -> None:
    """A form that was not told where matrices end refuses it: it would write over its neighbour."""
    form = make("int8", OUTPUTS, INPUTS, torch.float32)
    with pytest.raises(ValueError, match="panel"):
        form.load(7, torch.ones(9, INPUTS))


@pytest.mark.parametrize("name", ["dense", "packed", "int8", "int4"])
def test_memory_is_what_the_form_needs(name: str) -> None:
    """Each part of a mapped file is given back once it is read."""
    weight, released = random(8192 + 32, 128, dtype=torch.bfloat16), []
    form = filled(name, weight)
    assert form.nbytes == sum(each.nbytes for each in tensors_in(form))
    bits = {"dense": 16, "packed": 16, "int8": 8, "int4": 5}[name]  # 4, a scale and a minimum
    assert weight.numel() * bits // 8 <= form.nbytes <= weight.numel() * (bits + 0.6) // 8
    again = make(name, *weight.shape, weight.dtype)
    vars(again)["_release"] = released.append
    again.load(0, weight)
    assert [len(part) for part in released] == [4096, 4096, 32]
