"""Experts stored in small numbers: multiplied as they are stored, wherever their forms allow, and else one by one."""

from __future__ import annotations

import pytest
import torch
from support.forwards import relative_error
from support.layer_options import options
from support.long import LONG
from support.stored_matrices import RandomMatrix

from asyncengine.execution.layers import experts as layer
from asyncengine.execution.layers import stored_weight
from asyncengine.execution.layers.experts import Experts, ExpertsConfig
from asyncengine.execution.layers.stored import StoredForm
from asyncengine.execution.layers.stored_weight import ChunkedWeight

pytest.importorskip("numba")

COUNT, CHOSEN = 5, 2
NAMES = ("experts.{}.gate.weight", "experts.{}.up.weight"), "experts.{}.down.weight"


def make(config: ExpertsConfig, width: int, forms: dict[str, str], *, ordered: bool = False) -> tuple[Experts, Experts]:
    """(kept as stored, dequantized and multiplied by torch) of the same random matrices. `forms`: by parts of paths."""
    plain = Experts(options(plain=True), config, "", width)
    slots = dict(plain.slots())
    kinds = {path: next((forms[part] for part in forms if part in path), None) for path in slots}
    stored = {}
    for seed, (path, slot) in enumerate(slots.items()):
        *experts, outputs, inputs = slot.shape[:1] + slot.shape[:0:-1] if config.transposed else slot.shape
        kind = kinds[path]
        if kind:
            rows = outputs * (experts[0] if experts else 1)
            stored[path] = RandomMatrix(kind, rows, inputs, seed=seed, ordered=ordered)
    kept = {path.removesuffix(".weight"): StoredForm(each.name, each.form, ordered) for path, each in stored.items()}
    found = Experts(options(forms=kept), config, "", width)
    for seed, path in enumerate(slots):
        shape = slots[path].shape
        tensor = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * shape[-1] ** -0.5
        for experts_of in (plain, found):
            dict(experts_of.slots())[path].load(stored.get(path, tensor))
    return found, plain


def say_what_they_take(experts: Experts, stored: dict[str, str]) -> bool:
    """True if each place takes the form that its part of a path is stored in, and no other."""
    for path, slot in experts.slots():
        kind = next((kind for part, kind in stored.items() if part in path), None)
        if (None if slot.takes is None else slot.takes.name) != (kind or None):
            return False
    return True


def near(found: Experts, plain: Experts, width: int) -> None:
    """Check the error against the cost of rounding x to 8 bits in two products, of which some add up to little; at one
    row and at many."""
    generator = torch.Generator().manual_seed(1)
    for rows in (1, 19):
        x = torch.randn(rows, width, generator=generator)
        ids = torch.rand(rows, COUNT, generator=generator).argsort(dim=1)[:, :CHOSEN].contiguous()
        weights = torch.rand(rows, CHOSEN, generator=generator)
        assert relative_error(plain(x, ids, weights), found(x, ids, weights)) < 4e-2


@pytest.mark.parametrize(
    ("forms", "width", "inner"),
    [
        ({"gate": "Q4_K", "up": "Q4_K", "down": "Q6_K"}, 256, 256),
        ({"gate": "awq", "up": "awq", "down": "awq"}, 128, 384),
        ({"gate": "w8a8", "up": "w8a8", "down": "Q8_0"}, 64, 96),
        ({"gate": "mxfp4", "up": "mxfp4"}, 64, 128),
    ],
    ids=str,
)
def test_experts_of_one_form_are_one_matrix(forms: dict[str, str], width: int, inner: int) -> None:
    """Up and down may be of two forms, one of them packed."""
    found, plain = make(ExpertsConfig(COUNT, inner, up=NAMES[0], down=NAMES[1]), width, forms)
    assert say_what_they_take(found, forms)
    up, down = forms["up"], forms.get("down")
    assert found.up.forms[0].name == f"{up} (exact)"  # in float32
    if down is not None:
        up, down = f"{up} (exact)", f"{down} (exact)"
        assert found.compiled
        assert found.name == (f"{up} experts" if up == down else f"{up} + {down} experts")
    near(found, plain, width)


@pytest.mark.parametrize(
    ("forms", "inner", "ordered"),
    [
        ({"gate": "Q4_0", "up": "Q8_0", "down": "Q4_0"}, 64, False),
        ({"experts.3.": "Q4_0"}, 64, False),
        ({"gate": "Q4_0", "up": "Q4_0", "down": "Q4_0"}, 64, True),
        ({"gate": "w8a8", "up": "w8a8", "down": "w8a8"}, 40, False),
    ],
    ids=["gate is no up", "one expert only", "orders of their own", "no whole panels"],
)
def test_experts_of_several_forms_are_multiplied_one_by_one(forms: dict[str, str], inner: int, ordered: bool) -> None:
    config = ExpertsConfig(COUNT, inner, up=NAMES[0], down=NAMES[1])
    found, plain = make(config, 64, forms, ordered=ordered)
    assert not found.compiled
    assert say_what_they_take(found, forms)
    near(found, plain, 64)


# ---------------------------------------------------------------- as a GPU keeps them, by Triton's interpreter


@pytest.fixture
def chunked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts are kept as on a GPU, and no loop over them runs."""
    pytest.importorskip("triton")
    monkeypatch.setattr(stored_weight, "on_gpu", lambda device: True)
    monkeypatch.setattr(stored_weight, "stored_missing", lambda dtype, device: None)
    monkeypatch.setattr(layer, "triton_missing", lambda device: None)


EVERY_BLOCK = (0, 1, 19, 60)
"""Rows for blocks of 8, 16 and many rows; no rows; rows that no expert's block is filled by."""


def exactly_near(found: Experts, plain: Experts, width: int, every: tuple[int, ...] = EVERY_BLOCK) -> None:
    for matrices in (found.up, found.down):
        assert [type(form) for form in matrices.forms] == [ChunkedWeight]
    generator = torch.Generator().manual_seed(1)
    for rows in every:
        x = torch.randn(rows, width, generator=generator)
        ids = torch.rand(rows, COUNT, generator=generator).argsort(dim=1)[:, :CHOSEN].contiguous()
        weights = torch.rand(rows, CHOSEN, generator=generator)
        made = found(x, ids, weights)
        assert made.shape == x.shape
        assert relative_error(plain.by_torch(x, ids, weights), made) < 1e-5 or not rows, rows


@pytest.mark.parametrize(
    ("forms", "width", "inner"),
    [
        ({"gate": "w8a8", "up": "w8a8", "down": "Q8_0"}, 64, 96),
        ({"gate": "mxfp4", "up": "mxfp4", "down": "Q4_0"}, 96, 96),
        *LONG * [
            ({"gate": "Q4_K", "up": "Q4_K", "down": "Q6_K"}, 256, 256),
            ({"gate": "awq", "up": "awq", "down": "awq"}, 128, 128),
        ],
    ],
    ids=str,
)  # fmt: skip
def test_on_a_gpu_experts_are_read_as_they_are_stored(
    forms: dict[str, str], width: int, inner: int, chunked: None
) -> None:
    """Up and down may be of two forms; neither needs to fill chunks. Rows of every block: of the form that is read
    fastest, and of gpt-oss below. Each form's numbers: test_chunked_weight.py."""
    found, plain = make(ExpertsConfig(COUNT, inner, up=NAMES[0], down=NAMES[1]), width, forms)
    assert say_what_they_take(found, forms)
    assert found.nbytes < plain.nbytes / 1.5
    exactly_near(found, plain, width, EVERY_BLOCK if LONG else (1, 19))


def test_on_a_gpu_many_rows_have_experts_dequantized_in_turns(chunked: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two experts of five at a time, with a gate in the kernel."""
    pytest.importorskip("triton")
    from asyncengine.kernels.cuda import grouped_experts

    monkeypatch.setattr(grouped_experts, "_COPIED", 1)
    monkeypatch.setattr(grouped_experts, "_SLICE", 2 * 2 * 32 * 64)
    found, plain = make(
        ExpertsConfig(COUNT, 32, up=NAMES[0], down=NAMES[1]), 64, dict.fromkeys(("gate", "up", "down"), "Q8_0")
    )
    exactly_near(found, plain, 64, EVERY_BLOCK if LONG else (60,))
