"""`load_format="dummy"`: a model from its configuration alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.forwards import logits_of
from support.tiny_models import FAMILIES

from asyncengine import AsyncEngine, EngineConfig, InvalidParameter, ModelNotFound, SamplingParams
from asyncengine.execution.models import checkpoint, loading
from asyncengine.execution.models.decoder import Decoder
from asyncengine.execution.models.loading import load_model
from asyncengine.kernels.cpu import compiler_missing

DUMMY = EngineConfig(load_format="dummy", dtype="bfloat16", device="cpu", show_progress=False)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    FAMILIES["qwen3"]().save_pretrained(tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["config.json"]
    return tmp_path


async def test_it_serves(folder: Path) -> None:
    engine = await AsyncEngine.from_pretrained(folder, config=DUMMY, kv_cache_memory="4MiB")
    async with engine:
        done = await engine.generate([3, 4, 5], SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True))
    assert len(done.token_ids) == 6
    assert engine.core.info.dtype == "bfloat16"


def test_weights_are_random_the_same_each_time_and_disturb_nobody(folder: Path) -> None:
    torch.manual_seed(3)
    before = torch.rand(1)
    torch.manual_seed(3)
    first, second = (load_model(str(folder), DUMMY).model for _ in range(2))
    assert isinstance(first, Decoder)
    assert torch.equal(torch.rand(1), before)
    logits = logits_of(first, [3, 4, 5])
    assert torch.equal(logits, logits_of(second, [3, 4, 5]))
    assert float(logits.std()) > 0
    assert first.embedding.nbytes == 0, "tied as configured"


def test_norms_and_biases_are_what_they_are_before_training(folder: Path) -> None:
    """Numbers neither vanish nor overflow in a deep model with such norms and biases."""
    for config, biased in ((FAMILIES["qwen2"](), True), (FAMILIES["qwen3"](), False)):
        config.save_pretrained(folder)
        model = load_model(str(folder), DUMMY).model
        assert isinstance(model, Decoder)
        norms = [norm for layer in model.layers for norm in layer.norms()]
        assert all(bool((norm.weight == 1.0).all()) for norm in norms)
        qkv = model.layers[0].attention.qkv
        assert (qkv.bias is not None) == biased
        assert qkv.bias is None or not bool(qkv.bias.any())


@pytest.mark.parametrize("fuse", [True, False])
def test_elements_are_counted_without_weights(fuse: bool, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(loading, "check_memory", lambda elements, *_: asked.append(elements))
    model = load_model(str(folder), DUMMY.replace(fuse=fuse))
    norms = 3 * (2 * 64 + 2 * 16) + 64  # float32 in a decoder, bfloat16 in a module
    assert asked == [
        (model.weights_bytes - 4 * norms) // 2 + norms if fuse and compiled() else model.weights_bytes // 2
    ]


def compiled() -> bool:
    return compiler_missing(torch.bfloat16, torch.device("cpu")) is None


def test_without_it_weights_are_required(folder: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"no model\.safetensors"):
        load_model(str(folder), EngineConfig(device="cpu", show_progress=False))
    with pytest.raises(InvalidParameter, match="load_format"):
        EngineConfig(load_format="random")


def test_no_weights_are_downloaded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    asked: list[list[str]] = []

    def download(hub_id: str, **options: object) -> str:
        asked.append(list(options["allow_patterns"]))  # type: ignore[call-overload]
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    checkpoint.open_checkpoint("somebody/model", DUMMY)
    assert asked
    for patterns in asked:
        assert "*.json" in patterns
        assert not [pattern for pattern in patterns if "safetensors" in pattern]
