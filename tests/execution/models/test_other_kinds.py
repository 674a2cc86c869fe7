"""Files that are no text generator in safetensors say what they are, and what to do (issue: errors that mislead)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from asyncengine.config import EngineConfig
from asyncengine.errors import EngineError, ModelNotFound, UnsupportedModel
from asyncengine.execution.models.loading import load_model

CONFIG = EngineConfig()
LLAMA = {"model_type": "llama", "num_hidden_layers": 1, "hidden_size": 8, "vocab_size": 10}
Case = tuple[dict[str, Any], type[EngineError], str]
CASES: dict[str, Case] = {
    "a broken gguf": ({"m-Q4_K_M.gguf": b"GGUF"}, ModelNotFound, "m-Q4_K_M.gguf"),
    "a broken gguf with a config": ({"config.json": LLAMA, "m.gguf": b"GGUF"}, ModelNotFound, "m.gguf"),
    "what belongs to a gguf": ({"mmproj-m.gguf": b"GGUF"}, ModelNotFound, "has no config.json"),
    "embedding model": (
        {"config.json": {**LLAMA, "architectures": ["LlamaForCausalLM"]}, "modules.json": []},
        UnsupportedModel,
        "embedding model: it gives vectors",
    ),
    "bare encoder": (
        {"config.json": {"model_type": "mpnet", "architectures": ["MPNetModel"]}},
        UnsupportedModel,
        "'mpnet' is not a causal language model: .*encoder, as embedding models are",
    ),
    "classifier": (
        {"config.json": {**LLAMA, "architectures": ["LlamaForSequenceClassification"]}},
        UnsupportedModel,
        "is a classifier .*Pass a model for text generation",
    ),
    "masked": (
        {"config.json": {"model_type": "bert", "architectures": ["BertForMaskedLM"]}},
        UnsupportedModel,
        "fills gaps",
    ),
    "image classifier": (
        {"config.json": {"model_type": "vit", "architectures": ["ViTForImageClassification"]}},
        UnsupportedModel,
        "is a vision model: it sorts images",
    ),
    "vision tower": (
        {"config.json": {"model_type": "siglip_vision_model", "architectures": ["SiglipVisionModel"], "image_size": 4}},
        UnsupportedModel,
        "vision model: it writes no text",
    ),
    "vision and language": (
        {"config.json": {"model_type": "ovis2", "architectures": ["XForConditionalGeneration"], "vision_config": {}}},
        UnsupportedModel,
        "is a vision-language model; images are not read here, and the text of these alone is served: .*, llava,",
    ),
    "diffusion": ({"model_index.json": {}}, UnsupportedModel, "image generator. Run it with diffusers"),
    "adapter": ({"adapter_config.json": {}}, UnsupportedModel, "LoRA adapter: load its base model"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_it_says_what_it_is(name: str, tmp_path: Path) -> None:
    files, kind, said = CASES[name]
    if not any(file.endswith(".gguf") for file in files):
        files = {"model.safetensors": (2).to_bytes(8, "little") + b"{}", **files}
    for file, content in files.items():
        (tmp_path / file).write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    with pytest.raises(kind, match=said):
        load_model(str(tmp_path), CONFIG)


def test_a_gguf_file_that_is_cut_off(tmp_path: Path) -> None:
    file = tmp_path / "qwen3-0.6b-q8_0.gguf"
    file.write_bytes(b"GGUF\3\0\0\0")
    with pytest.raises(ModelNotFound, match="is not a whole GGUF file: it has 8 bytes"):
        load_model(str(file), CONFIG)
