"""Whole models with the kernels of a GPU, Triton's in its interpreter, against torch's operations; and how many are
launched."""

from __future__ import annotations

from collections import Counter
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

LAYERS = 3
IDS = [3, 17, 40, 9, 3, 3, 88]
OUTER = {"_angles": 1, "_rms_norm": 1}
"""Before the layers and behind them, beside the lookup of the token and the output layer."""
LAYER = {"_rms_norm": 2, "_prepare_and_write": 1, "decode": 1}


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


def load(folder: Callable[[str], str], name: str, dtype: str = "float32") -> Decoder:
    model = loading.load_model(folder(name), EngineConfig(device="cpu", dtype=dtype, show_progress=False)).model
    assert isinstance(model, Decoder)
    return model


def on_flashinfer(model: Decoder, fake: CountedFlashInfer, rows: int = 1) -> Forwards:
    made = Forwards(model, rows, backend="torch", most=20)
    made.backend = make_flashinfer(model.specs, fake, dtype=model.dtype)
    return made


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "llama4"])
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


def test_products_of_one_row(folder: Callable[[str], str], request: pytest.FixtureRequest) -> None:
    """Rounded otherwise: bfloat16 has as many digits as may differ."""
    plain = load(folder, "qwen3", "bfloat16")
    fake = request.getfixturevalue("fake")
    expected, found = Forwards(plain, backend="torch"), on_flashinfer(load(folder, "qwen3", "bfloat16"), fake)
    for ids in (IDS, [5]):
        logits, own = expected.step(ids).float(), found.step(ids).float()
        assert float((own - logits).abs().max()) < 0.05 * float(logits.abs().max())
    assert fake.launches.calls["_few_rows"] == 4 * LAYERS + 1


LOOKUPS = {"llama": "embedding", "qwen3": "index_select"}


@pytest.mark.parametrize(
    ("name", "rows", "layer", "outer"),
    [
        ("llama", 1, {"_few_rows": 4}, {"_few_rows": 1}),
        ("qwen3", 3, {"_few_rows": 4, "silu_and_mul": 1}, {"_few_rows": 1}),
        ("llama", 5, {"linear": 4, "silu_and_mul": 1}, {"linear": 1, "to": 1}),
        ("qwen3", 5, {"linear": 4, "silu_and_mul": 1}, {"linear": 1, "to": 1}),
    ],
)
def test_kernels_of_a_decode_step(
    name: str, rows: int, layer: dict[str, int], outer: dict[str, int], folder: Callable[[str], str],
    fake: CountedFlashInfer,
) -> None:  # fmt: skip
    model = load(folder, name, "bfloat16")
    forwards = on_flashinfer(model, fake, rows)
    context, ids, every = forwards.context([1] * rows), torch.full((rows,), 5), torch.arange(rows)
    fake.launches.calls.clear()
    with torch.inference_mode(), fake.launches:
        model.forward(ids, context, every)
    wanted = Counter({LOOKUPS[name]: 1}) + Counter(OUTER) + Counter(outer)
    for _ in range(LAYERS):
        wanted += Counter(LAYER) + Counter(layer)
    assert fake.launches.calls == wanted
    assert sum(LAYER.values()) + sum(layer.values()) <= 9
