"""Layers that a config.json names and nobody knows: refused by name, beside those that its family has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.tiny_models import FAMILIES

from asyncengine.config import EngineConfig
from asyncengine.errors import ModelNotFound, UnsupportedModel
from asyncengine.execution.models.families import NATIVE, layer_kinds
from asyncengine.execution.models.loading import load_model
from asyncengine.execution.models.refusals import misnamed

CONFIG = EngineConfig(device="cpu", load_format="dummy", show_progress=False)
GATED = "linear_attention, full_attention"
WINDOWS = "full_attention, sliding_attention"
LETTERS = r"M \(Mamba-2\), \* \(attention\), - \(a feed-forward part\), E \(experts\)"


def content_of(family: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(FAMILIES[family]().to_json_string())
    return {field: value for field, value in content.items() if value is not None}


def write(folder: Path, content: dict[str, Any]) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(content))
    return str(folder)


@pytest.mark.parametrize(
    ("family", "field", "wrong", "known"),
    [
        ("llama", "layer_types", "warp", WINDOWS),
        ("qwen3", "layer_types", "conv", WINDOWS),
        ("gemma3", "layer_types", "chunked_attention", WINDOWS),
        ("gemma4", "layer_types", 7, WINDOWS),
        ("gpt-oss", "layer_types", "warp", WINDOWS),
        ("llama4", "layer_types", "sliding_attention", "full_attention, chunked_attention"),
        ("lfm2", "layer_types", "sliding_attention", "conv, full_attention"),
        ("lfm2moe", "layer_types", "warp", "conv, full_attention"),
        ("qwen3next", "layer_types", "warp", GATED),
        ("qwen3.5", "layer_types", "hybrid", GATED),
        ("qwen3.5moe", "layer_types", "warp", GATED),
        ("kimi-linear", "layer_types", "warp", GATED),
        ("kimi-linear", "mlp_layer_types", "warp", "dense, sparse"),
        ("granite4", "layer_types", "warp", GATED),
        ("granite4", "layers_block_type", "warp", GATED),
        ("bamba", "layers_block_type", "warp", GATED),
        ("falcon-h1", "layers_block_type", "warp", GATED),
        ("nemotron-h", "layers_block_type", "warp", f"{GATED}, mlp, moe"),
    ],
)
def test_a_list_of_layers(family: str, field: str, wrong: object, known: str, tmp_path: Path) -> None:
    content = content_of(family)
    content[field] = [wrong, *content.get(field, ["full_attention"] * content.get("num_hidden_layers", 0))[1:]]
    with pytest.raises(UnsupportedModel, match=f" of type {wrong!r}; known are {known}$"):
        load_model(write(tmp_path / "m", content), CONFIG)


@pytest.mark.parametrize("pattern", ["MX*-", "X", "m*-M", ["M", "X"], "M" * 40 + "X"])
@pytest.mark.parametrize("field", ["hybrid_override_pattern", "mtp_hybrid_override_pattern"])
def test_a_letter_of_a_pattern(pattern: str, field: str, tmp_path: Path) -> None:
    content = content_of("nemotron-h")
    if field == "hybrid_override_pattern":
        del content["layers_block_type"]
    wrong = next(letter for letter in pattern if letter not in "M*-E")
    with pytest.raises(UnsupportedModel, match=f"layers in {field} of type '{wrong}'; known are {LETTERS}$"):
        load_model(write(tmp_path / "m", {**content, field: pattern}), CONFIG)


@pytest.mark.parametrize(
    ("family", "dropped", "changes", "message"),
    [
        ("nemotron-h", "layers_block_type", {"hybrid_override_pattern": ""}, "name between 1 and 4096 layers, got 0"),
        ("nemotron-h", "", {"layers_block_type": []}, "layers_block_type must name between 1 and 4096 layers, got 0"),
        (
            "nemotron-h", "layers_block_type", {"hybrid_override_pattern": "M" * 5000},
            "hybrid_override_pattern must name between 1 and 4096 layers, got 5000",
        ),
        (
            "nemotron-h", "layers_block_type", {"hybrid_override_pattern": 7},
            r"hybrid_override_pattern must be a letter for each layer \(M, \*, -, E\), got 7",
        ),
        ("qwen3next", "layer_types", {"full_attention_interval": 0}, "full_attention_interval must be a number of lay"),
        ("qwen3.5", "layer_types", {"full_attention_interval": "x"}, "interval must be a number of layers, got 'x'"),
        ("gemma3", "layer_types", {"sliding_window_pattern": 0}, "sliding_window_pattern must be a number of layers"),
        ("qwen3moe", "", {"decoder_sparse_step": 0}, "decoder_sparse_step must be a number of layers, got 0"),
        ("smollm3", "", {"no_rope_layers": [1]}, "no_rope_layers names 1 layers, and there are 3"),
        (
            "kimi-linear", "layer_types", {"linear_attn_config": {"full_attn_layers": [2], "kda_layers": [1, 3]}},
            "linear_attn_config leaves out layer 4; kda_layers and full_attn_layers together name each of 1 to 4",
        ),
        (
            "kimi-linear", "layer_types", {"linear_attn_config": {"full_attn_layers": [9], "kda_layers": [1, 2, 3]}},
            "linear_attn_config names layer 9; kda_layers",
        ),
        ("kimi-linear", "layer_types", {"linear_attn_config": None}, "linear_attn_config must be an object, got None"),
    ],
)  # fmt: skip
def test_what_says_how_layers_alternate(
    family: str, dropped: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    content = content_of(family)
    content.pop(dropped, None)
    with pytest.raises(ModelNotFound, match=message):
        load_model(write(tmp_path / "m", {**content, **changes}), CONFIG)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_a_family_has_is_known(family: str) -> None:
    """None of those that load is called unknown, should anything else be wrong with its file."""
    content = content_of(family)
    assert misnamed(content) is None
    assert bool(layer_kinds(content["model_type"])) == (content["model_type"] in NATIVE)
