"""Shapes of hybrids and mixtures among the peers: what they say a step reads, and GGUF files of their weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from support.checkpoints import make_checkpoint
from support.forwards import logits_of, relative_error
from support.long import LONG
from support.tiny_configs import changed
from support.tiny_models import FAMILIES, VOCAB

from asyncengine.config import EngineConfig
from asyncengine.execution.models.loading import load_model
from asyncengine.execution.models.memory.needs import read_needs
from benchmarks.peers import gguf_file
from benchmarks.peers.mixed_shapes import MIXED, counts

QUIET = EngineConfig(show_progress=False, dtype="float32")


@pytest.mark.parametrize("name", MIXED)
def test_what_a_step_reads_is_what_the_engine_counts(name: str, tmp_path: Path) -> None:
    shape = MIXED[name]
    shape.config("bfloat16").save_pretrained(tmp_path)
    needs = read_needs(str(tmp_path), EngineConfig(device="cpu", load_format="dummy", dtype="bfloat16"))
    assert needs.kv_bytes_per_token == shape.kv_bytes("bfloat16")
    assert needs.weight_bytes == pytest.approx(2 * counts(shape).all, rel=0.01)
    recurrent, windows = shape.state
    assert needs.state_bytes == 4 * recurrent + 2 * windows
    weights = 2.0 * counts(shape).all
    assert shape.read_bytes(weights, 1, "bfloat16") == pytest.approx(2 * shape.parameters + 2 * needs.state_bytes)
    assert shape.read_bytes(weights, 10**6, "bfloat16") >= weights  # every expert is used


VARIANTS = {
    "qwen3.5, heads alike": changed("qwen3.5", linear_num_value_heads=4),
    "granite4, dense": changed("granite4", num_local_experts=0),
    "lfm2, as it says": changed("lfm2", block_auto_adjust_ff_dim=False),
}


@pytest.mark.parametrize("name", [*VARIANTS, "qwen3moe"] if LONG else ["qwen3.5, heads alike", "qwen3moe"])
def test_a_gguf_file_holds_the_model_of_the_checkpoint(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is read by this engine, which knows llama.cpp's converter by files of its own tests."""
    for variant, make in VARIANTS.items():
        monkeypatch.setitem(FAMILIES, variant, make)
    folder = make_checkpoint(name, tmp_path / "m", heavy=True)
    config = json.loads((folder / "config.json").read_text())
    gguf_file.write(folder, config, tmp_path / "m.gguf")
    ids = [3, 17, VOCAB - 2, 9, 40]
    expected, found = (logits_of(load_model(str(path), QUIET).model, ids) for path in (folder, tmp_path / "m.gguf"))
    assert relative_error(expected, found) < 1e-5
    assert torch.isfinite(found).all()
