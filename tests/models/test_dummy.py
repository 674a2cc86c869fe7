"""`load_format="dummy"`: a model from its configuration alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.tiny_models import FAMILIES

from asyncengine import AsyncEngine, EngineConfig, InvalidParameter, ModelNotFound, OutOfMemory, SamplingParams
from asyncengine.models import checkpoint
from asyncengine.models.dummy import count_elements, make_random
from asyncengine.models.loading import load_model

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


def test_weights_are_random_the_same_each_time_and_disturb_nobody() -> None:
    torch.manual_seed(3)
    before = torch.rand(1)
    torch.manual_seed(3)
    count_elements(FAMILIES["qwen3"](), DUMMY, torch.bfloat16)
    make = FAMILIES["qwen3"]
    first, second = (make_random(make(), DUMMY, torch.bfloat16, torch.device("cpu")) for _ in range(2))
    assert torch.equal(torch.rand(1), before)
    pairs = list(zip(first.parameters(), second.parameters(), strict=True))
    assert all(torch.equal(left, right) for left, right in pairs)
    assert all(float(left.detach().float().std()) > 0 for left, _ in pairs if left.dim() == 2)
    assert first.lm_head.weight.data_ptr() == first.get_input_embeddings().weight.data_ptr(), "tied as configured"


def test_elements_are_counted_without_weights(folder: Path) -> None:
    config = EngineConfig(load_format="dummy", dtype="float32", device="cpu", show_progress=False, fuse=False)
    module = load_model(str(folder), config).module
    expected = sum(part.numel() for part in module.parameters())
    assert count_elements(module.config, config, torch.float32) == expected


def test_more_than_there_is_room_for_is_refused_before_it_is_made(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asyncengine.models.loading.free_bytes", lambda _: 1000)
    with pytest.raises(OutOfMemory, match="the weights take"):
        load_model(str(folder), DUMMY)


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
    (patterns,) = asked
    assert "*.json" in patterns
    assert not [pattern for pattern in patterns if "safetensors" in pattern]
