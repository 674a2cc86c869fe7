"""Whole models with the kernels of a GPU, Triton's in its interpreter, against torch's operations."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.attention_pair import make_flashinfer
from support.fake_flashinfer import FakeFlashInfer, FakeMemory
from support.forwards import Forwards
from support.wide_models import wide_folders

from asyncengine.config import EngineConfig
from asyncengine.execution.attention import flashinfer
from asyncengine.execution.layers import kernels, options, rotary, weight_forms
from asyncengine.execution.layers.kernels import CudaKernels
from asyncengine.execution.models import loading
from asyncengine.execution.models.decoder import Decoder

CPU = torch.device("cpu")


IDS = [3, 17, 40, 9, 3, 3, 88]


folder = pytest.fixture(wide_folders, scope="module")


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeFlashInfer:
    """Models loaded and FlashInfer backends made from now on have the kernels of a GPU."""
    made = FakeFlashInfer(FakeMemory())
    for module in (flashinfer, kernels, rotary, weight_forms):
        monkeypatch.setattr(module, "triton_missing", lambda device: None)
    for module in (options, rotary):
        monkeypatch.setattr(module, "compiler_missing", lambda *_: "as on a GPU")
    monkeypatch.setattr(loading, "layer_kernels", lambda *_: CudaKernels(made, CPU))
    return made


def load(folder: Callable[[str], Path], name: str, dtype: str = "float32") -> Decoder:
    model = loading.load_model(str(folder(name)), EngineConfig(device="cpu", dtype=dtype, show_progress=False)).model
    assert isinstance(model, Decoder)
    return model


def on_flashinfer(model: Decoder, fake: FakeFlashInfer, rows: int = 1) -> Forwards:
    made = Forwards(model, rows, backend="torch", most=20)
    made.backend = make_flashinfer(model.specs, fake, dtype=model.dtype)
    return made


@pytest.mark.parametrize("name", ["llama", "gemma2", "llama4"])
def test_kernels_change_no_answer(name: str, folder: Callable[[str], Path], request: pytest.FixtureRequest) -> None:
    plain = load(folder, name)
    fake = request.getfixturevalue("fake")
    model = load(folder, name)
    assert model.recorded is None
    expected, found = Forwards(plain, backend="torch"), on_flashinfer(model, fake)
    for ids in (IDS, [5], [6, 7]):
        logits = expected.step(ids)
        torch.testing.assert_close(found.step(ids), logits, rtol=0.0, atol=2e-5 * float(logits.abs().max()))
    assert (fake.calls["prefill"], fake.calls["decode"]) == (2 * len(model.layers), len(model.layers))
    assert fake.calls["append"] == (6 if name == "llama4" else 0), "two of its layers have norms behind the rotation"


def test_products_of_one_row(folder: Callable[[str], Path], request: pytest.FixtureRequest) -> None:
    """Products of one row are rounded otherwise: bfloat16 has as many digits as may differ."""
    plain = load(folder, "qwen3", "bfloat16")
    fake = request.getfixturevalue("fake")
    expected, found = Forwards(plain, backend="torch"), on_flashinfer(load(folder, "qwen3", "bfloat16"), fake)
    for ids in (IDS[:5], [5]):
        logits, own = expected.step(ids).float(), found.step(ids).float()
        assert float((own - logits).abs().max()) < 0.05 * float(logits.abs().max())
