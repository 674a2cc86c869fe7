"""`load_format="dummy"`: a model from its configuration alone."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.tiny_models import FAMILIES

from asyncengine import AsyncEngine, EngineConfig, InvalidParameter, SamplingParams
from asyncengine.execution.models import checkpoint

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


def test_there_are_no_other_formats() -> None:
    with pytest.raises(InvalidParameter, match="load_format"):
        EngineConfig(load_format="random")


def test_no_weights_are_downloaded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    asked: list[list[str]] = []

    def download(hub_id: str, **options: object) -> str:
        asked.append(list(options["allow_patterns"]))  # type: ignore[call-overload]
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    checkpoint.open_checkpoint("somebody/model", checkpoint.CheckpointOptions.of(DUMMY))
    assert asked
    for patterns in asked:
        assert "*.json" in patterns
        assert not [pattern for pattern in patterns if "safetensors" in pattern]
