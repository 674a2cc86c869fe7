"""Whole models with the kernels of a GPU, Triton's in its interpreter, against torch's operations; and how many are
launched."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from support.attention_pair import make_flashinfer
from support.cuda_kernels import CountedFlashInfer, use_cuda_kernels
from support.forwards import Forwards
from support.wide_models import make_wide

from asyncengine.config import EngineConfig
from asyncengine.models import loading
from asyncengine.models.decoder import Decoder

IDS = [3, 17, 40, 9, 3, 3, 88]
OUTER = {"_angles": 1, "_rms_norm": 1, "linear": 1}
"""Before the layers and behind them, beside the lookup of the token."""
LAYER = {"_rms_norm": 2, "linear": 4, "_prepare_and_write": 1, "decode": 1, "silu_and_mul": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    @cache
    def get(name: str) -> str:
        made: Path = make_wide(name, tmp_path_factory.mktemp("wide") / name)
        return str(made)

    return get


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> CountedFlashInfer:
    return use_cuda_kernels(monkeypatch)


def load(folder: Callable[[str], str], name: str) -> Decoder:
    model = loading.load_model(folder(name), EngineConfig(device="cpu", show_progress=False)).model
    assert isinstance(model, Decoder)
    return model


def on_flashinfer(model: Decoder, fake: CountedFlashInfer) -> Forwards:
    made = Forwards(model, backend="torch")
    made.backend = make_flashinfer(model.specs, fake)
    return made


@pytest.mark.parametrize("name", ["llama", "qwen3", "qwen2", "mistral", "gemma2", "llama4"])
def test_kernels_change_no_answer(name: str, folder: Callable[[str], str], request: pytest.FixtureRequest) -> None:
    plain = load(folder, name)
    fake = request.getfixturevalue("fake")
    model = load(folder, name)
    assert model.fused is None
    expected, found = Forwards(plain, backend="torch"), on_flashinfer(model, fake)
    for ids in (IDS, [5], [6, 7]):
        logits = expected.step(ids)
        torch.testing.assert_close(found.step(ids), logits, rtol=0.0, atol=2e-5 * float(logits.abs().max()))
    assert (fake.calls["prefill"], fake.calls["decode"]) == (2 * len(model.layers), len(model.layers))
    assert fake.calls["append"] == (6 if name == "llama4" else 0), "two of its layers have norms behind the rotation"


@pytest.mark.parametrize(("name", "lookup"), [("llama", "embedding"), ("qwen3", "index_select")])
def test_kernels_of_a_decode_step(
    name: str, lookup: str, folder: Callable[[str], str], fake: CountedFlashInfer
) -> None:
    model = load(folder, name)
    forwards = on_flashinfer(model, fake)
    forwards.step(IDS)
    context, ids, rows = forwards.context([1]), torch.tensor([5]), torch.tensor([0])
    fake.launches.calls.clear()
    with torch.inference_mode(), fake.launches:
        model.forward(ids, context, rows)
    wanted = {part: OUTER.get(part, 0) + len(model.layers) * LAYER.get(part, 0) for part in {*OUTER, *LAYER}}
    assert fake.launches.calls == {lookup: 1, **wanted}
    assert sum(LAYER.values()) <= 9
