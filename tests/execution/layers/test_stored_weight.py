"""Layers of matrices that stay as they are stored: each form in its place, fused or not, alone or side by side."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.forwards import Forwards, relative_error
from support.layer_options import options
from support.panels import use_panels
from support.stored_matrices import FORMS, RandomMatrix
from support.tiny_models import FAMILIES, VOCAB

pytest.importorskip("numba")

from asyncengine.execution.device.cores import Cores
from asyncengine.execution.layers import stored_weight
from asyncengine.execution.layers.basic import Linear, Matrix
from asyncengine.execution.layers.stored import StoredForm
from asyncengine.execution.layers.stored_weight import GroupedWeight
from asyncengine.execution.models.decoder import Decoder
from asyncengine.execution.models.families import decoder_config_of

INPUTS = 512


@pytest.fixture(autouse=True)
def in_panels(monkeypatch: pytest.MonkeyPatch) -> None:
    use_panels(True, monkeypatch)


def stored(name: str, ordered: bool = False) -> StoredForm:
    return StoredForm(name, FORMS[name], ordered)


def linear_of(parts: dict[str, tuple[int, str]], bias: bool = False) -> tuple[Any, torch.Tensor]:
    """A linear of parts (outputs, name of the form, or "" for plain numbers), and what it stands for."""
    forms = {path: stored(name) for path, (_, name) in parts.items() if name}
    sizes = [Matrix(path, outputs) for path, (outputs, _) in parts.items()]
    linear = Linear(options(forms=forms), sizes, INPUTS, bias=bias)
    whole = []
    for path, slot in linear.slots():
        if path.endswith(".bias"):
            slot.load(torch.randn(slot.shape))
            continue
        name = parts[path.removesuffix(".weight")][1]
        given: Any = RandomMatrix(name, *slot.shape) if name else torch.randn(slot.shape) * INPUTS**-0.5
        slot.load(given)
        whole.append(given.dense() if name else given)
    return linear, torch.cat(whole)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("parts", "name", "matrices"),
    [
        ({"q": (64, "Q4_K"), "k": (32, "Q4_K"), "v": (32, "Q4_K")}, "Q4_K (exact)", 1),
        ({"q": (64, "Q4_K"), "k": (32, "Q4_K"), "v": (32, "Q6_K")}, "Q4_K (exact) + Q6_K (exact)", 2),
        ({"q": (64, "Q4_K"), "k": (32, ""), "v": (32, "Q4_K")}, "Q4_K (exact) + packed", 3),
        ({"q": (40, "Q8_0"), "k": (24, "Q8_0")}, "Q8_0 (exact)", 2),
    ],
)
def test_parts_of_several_forms(parts: Any, name: str, matrices: int, bias: bool) -> None:
    """Equal neighbours are one matrix, unless they would share a panel. In float32 no input is rounded."""
    linear, whole = linear_of(parts, bias)
    assert linear.weight.name == name
    assert len(getattr(linear.weight, "forms", [0])) == matrices
    assert linear.weight.compiled
    x = torch.randn(7, INPUTS)
    expected = torch.nn.functional.linear(x, whole, linear.bias)
    found = linear(x)
    assert relative_error(expected, found) < 1e-6
    assert torch.equal(linear(x[2:3]), found[2:3])
    assert linear.nbytes == linear.weight.nbytes + (0 if linear.bias is None else linear.bias.nbytes)


@pytest.mark.parametrize("name", ["Q4_K", "Q6_K", "awq", "gptq8", "w8a8"])
def test_any_number_of_threads_loads_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that are no whole number of what is unpacked at once included. At the end the whole matrix is let go of."""
    monkeypatch.setattr(stored_weight, "_AT_ONCE", 32 * 256)
    loaded = []
    for threads in (1, 3):
        cores, matrix = Cores(threads), RandomMatrix(name, 208, 256)
        weight = GroupedWeight(208 + 16, 256, stored(name), torch.float32)
        weight.panels.zero_()
        with cores.loading():
            weight.load(16, matrix)
        cores.close()
        loaded.append(weight)
        assert matrix.released[-1] == (0, 208)
        assert sorted(matrix.released[:-1]) == [(first, first + 32) for first in range(0, 192, 32)]
    assert torch.equal(loaded[0].panels, loaded[1].panels)
    assert loaded[0].row_scales is not None
    assert loaded[1].row_scales is not None
    assert torch.equal(loaded[0].row_scales, loaded[1].row_scales)


KINDS = (
    ("q_proj", "Q4_0"), ("k_proj", "Q4_0"), ("v_proj", "Q8_0"), ("gate", "Q4_1"), ("up_proj", "Q4_0"),
    ("down", "w8a8"), ("embed", "Q8_0"),
)  # fmt: skip
"""Storage forms by a part of a matrix's name; the rest is plain."""


def form_of(path: str) -> str:
    return next((form for part, form in KINDS if part in path), "")


def test_whole_models_of_mixed_forms() -> None:
    """The model gives the same bits in one call and layer by layer, and is near what the matrices stand for."""
    dtype = torch.bfloat16
    described = decoder_config_of(FAMILIES["qwen3"](), 64)
    assert described is not None
    plain = Decoder(described, options(dtype), 128)
    names = {name.removesuffix(".weight") for name in plain.slots()}
    forms = {name: stored(form_of(name)) for name in names if form_of(name)}
    model = Decoder(described, options(dtype, forms=forms), 128)
    assert model.recorded is not None
    assert "Q4_0 + Q8_0 x 3" in model.describe()
    dense = plain.slots()
    for name, slot in model.slots().items():
        form = form_of(name)
        if form:
            matrix = RandomMatrix(form, *slot.shape, seed=len(name))
            slot.load(matrix)
            dense[name].load(matrix.dense())
            continue
        given = torch.full(slot.shape, slot.initial) if slot.initial is not None else torch.randn(slot.shape) * 0.1
        slot.load(given)
        dense[name].load(given)
    seen: list[list[torch.Tensor]] = []
    for own, decoder in ((model.recorded, model), (None, model), (plain.recorded, plain)):
        decoder.recorded = own
        forwards, found = Forwards(decoder, rows=64), []
        for counts in ([9], [1], [1] * 13, [1] * 40):
            found.append(forwards.step([(5 * place + len(counts)) % VOCAB for place in range(sum(counts))], counts))
        seen.append(found)
    for left, right, exact in zip(*seen, strict=True):
        assert torch.equal(left, right)
        assert relative_error(exact, left) < 0.06
