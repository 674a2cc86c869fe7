"""The language model of checkpoints that read images or sounds as well, against transformers' own given text alone."""

from __future__ import annotations

import json
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.data import cases_of
from support.drive import prompts
from support.forwards import Forwards, transformers_logits
from support.multimodal_models import CONFIGS, VIDEO, save_multimodal
from support.quantized_checkpoints import quantized

from asyncengine.config import EngineConfig
from asyncengine.errors import UnsupportedModel
from asyncengine.execution.models.decoder import Decoder
from asyncengine.execution.models.loading import LoadedModel, load_model
from asyncengine.execution.models.mapped import OpenFiles

CASES = cases_of(__file__)

CONFIG = EngineConfig(page_size=4, kv_cache_memory="8MiB", show_progress=False)
LONG, SHORT = prompts([45, 11], VIDEO)
SCALED = {"aya_vision": 0.5, "cohere2_vision": 0.5, "llava_next": 1 / 1.5}
"""Factors of logits that the text's own causal model has and transformers' class of the whole leaves out."""


def load(folder: Path) -> LoadedModel:
    loaded = load_model(str(folder), CONFIG)
    assert isinstance(loaded.model, Decoder), "through transformers"
    return loaded


def expected_logits(model: Any, name: str) -> torch.Tensor:
    return transformers_logits(model, LONG) * SCALED.get(name, 1.0)


def largest_error(expected: torch.Tensor, found: torch.Tensor) -> float:
    return float((expected - found).abs().max() / expected.abs().max())


@pytest.mark.filterwarnings("ignore:Casting complex values")
@pytest.mark.parametrize("name", CONFIGS)
def test_equals_transformers(name: str, tmp_path: Path) -> None:
    """The text is computed at once and in chunks. How a decoder's layers go through steps,
    tests/execution/runner/test_families.py compares, and with pictures tests/execution/models/vision."""
    model = save_multimodal(name, tmp_path)
    loaded = load(tmp_path)
    if name == "llama4":  # transformers 5.24 forgets a field of its result, where there are no pictures
        model = model.language_model
    expected = expected_logits(model, name)
    for chunk in (45, 7):
        forwards = Forwards(loaded.model)
        found = torch.cat([forwards.step(LONG[first : first + chunk]) for first in range(0, 45, chunk)])
        assert largest_error(expected, found) < 1e-5, f"chunk {chunk}"


@pytest.mark.parametrize(("name", "old", "new", "head"), CASES["names"])
def test_names_of_other_releases(name: str, old: str, new: str, head: str, tmp_path: Path) -> None:
    model = save_multimodal(name, tmp_path)
    file = tmp_path / "model.safetensors"
    renamed = {}
    for key, tensor in load_file(file).items():
        own = head + key.partition("lm_head.")[2] if "lm_head." in key else key
        renamed[new + key.removeprefix(old) if key.startswith(old) else own] = tensor
    assert len([key for key in renamed if key.startswith(new)]) > 20
    save_file(renamed, file, metadata={"format": "pt"})
    assert largest_error(expected_logits(model, name), Forwards(load(tmp_path).model).step(LONG)) < 1e-5


@pytest.mark.parametrize("form", ["awq", "fp8 blocks"])
def test_quantized_files(form: str, tmp_path: Path) -> None:
    """The tower's matrices are of sizes that the format does not take: nobody looks."""
    model = save_multimodal("qwen2_5_vl", tmp_path / "plain")
    file = tmp_path / "plain" / "model.safetensors"
    odd = {"visual.other.q_proj.weight": torch.ones(64, 40)} if form == "fp8 blocks" else {}
    save_file(load_file(file) | odd, file, metadata={"format": "pt"})
    assert model.config.text_config.intermediate_size == 96
    quantized(tmp_path / "plain", tmp_path / "small", form, tmp_path / "dense")
    small, dense = (load(tmp_path / folder) for folder in ("small", "dense"))
    assert len(small.stored) == 21
    found, expected = (Forwards(each.model).step(LONG) for each in (small, dense))
    assert 0 < largest_error(expected, found) < 0.1  # products in bfloat16
    assert small.left_out


def test_towers_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tower larger than the memory of this machine lies in the files, and in a shard of its own."""
    save_multimodal("qwen3_vl", tmp_path)
    file = tmp_path / "model.safetensors"
    stored = load_file(file)
    text = {key: tensor for key, tensor in stored.items() if not key.startswith("model.visual.")}
    save_file(text, tmp_path / "text.safetensors", metadata={"format": "pt"})
    file.unlink()
    size = 2**40
    header = json.dumps({"model.visual.huge.weight": {"dtype": "F32", "shape": [size // 4], "data_offsets": [0, size]}})
    with (tmp_path / "tower.safetensors").open("wb") as stream:
        stream.write(len(header).to_bytes(8, "little") + header.encode())
        stream.truncate(8 + len(header) + size)  # no block of it is on the disk
    files = dict.fromkeys(text, "text.safetensors") | {"model.visual.huge.weight": "tower.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    read: list[str] = []
    inner = OpenFiles.read
    monkeypatch.setattr(OpenFiles, "read", lambda self, file, name: read.append(name) or inner(self, file, name))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    loaded = load(tmp_path)
    assert sorted(read) == sorted(text)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**20  # KiB: nothing of a TiB
    assert loaded.left_out == ("visual x 1",)
    assert loaded.weights_bytes == load_model(str(tmp_path), CONFIG).weights_bytes < 2**21


@pytest.mark.parametrize(("config", "said"), CASES["refused"])
def test_others_are_refused_by_name(config: dict[str, Any], said: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({"x": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedModel, match=said):
        load_model(str(tmp_path), CONFIG)
