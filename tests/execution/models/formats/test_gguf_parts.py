"""GGUF files whose tensors lie otherwise than llama.cpp's converter has them: of Ollama's own making, and fused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from support.gguf_files import checkpoint_of, write_gguf
from support.gguf_models import IDS, YARN, make_model, pattern
from support.ollama_gpt_oss import FORMS, write_ollama_gpt_oss
from support.tiny_configs import changed
from support.tiny_models import FAMILIES

from asyncengine.execution.models.formats.gguf.container import GgufFile
from asyncengine.execution.models.formats.gguf.model import GgufModel

from .gguf_reading import check_stacked, check_tensors, comes_back, median_error


@pytest.mark.parametrize("form", FORMS)
def test_gpt_oss_as_ollama_makes_it(form: str, tmp_path: Path) -> None:
    """Whole and apart, with neighbours in a byte and ggml's blocks: transformers' tensors, configuration and logits."""
    rope = {key: value for key, value in YARN.items() if not key.startswith("beta")}
    config = changed(
        "gpt-oss", swiglu_limit=7.0, swiglu_alpha=1.702, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        layer_types=pattern(2, 2), rope_parameters={**rope, "truncate": False}, tie_word_embeddings=False,
    )()  # fmt: skip
    reference = make_model(config)
    path = tmp_path / "m.gguf"
    written = write_ollama_gpt_oss(path, config, dict(reference.state_dict()), form)
    model = GgufModel(path)
    check_stacked(model, written, "MXFP4_PAIRS" if form in ("first", "apart") else "MXFP4")
    comes_back(model, config)
    reference.load_state_dict(written)
    assert median_error(path, reference, IDS) < 2e-5


PARTS = {
    "attn_q": "attn_qkv", "attn_k": "attn_qkv", "attn_v": "attn_qkv",
    "ffn_gate_exps": "ffn_gate_up_exps", "ffn_up_exps": "ffn_gate_up_exps",
}  # fmt: skip


class FusingWriter(gguf.GGUFWriter):
    """A writer that fuses tensors as llama.cpp's converter does if it is asked to."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.held: dict[str, dict[str, np.ndarray]] = {}

    def add_tensor(self, name: str, tensor: np.ndarray, raw_shape: Any = None, raw_dtype: Any = None) -> None:
        """Hold a tensor until the others are there."""
        start, _, suffix = name.rpartition(".")
        layer, _, stem = start.rpartition(".")
        fused = PARTS.get(stem)
        if fused is None:
            super().add_tensor(name, tensor, raw_shape, raw_dtype)
            return
        held = self.held.setdefault(f"{layer}.{fused}.{suffix}", {})
        held[stem] = tensor
        names = [part for part, whole in PARTS.items() if whole == fused]
        if len(held) == len(names):
            axis = 1 if fused.endswith("_exps") else 0
            whole = np.concatenate([held[part] for part in names], axis=axis)
            super().add_tensor(f"{layer}.{fused}.{suffix}", whole, raw_dtype=raw_dtype)


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3moe"])
def test_fused_by_llama_cpps_converter(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Every tensor under its own name, quantized ones too; rows of queries and keys in their order."""
    config = changed(name, hidden_size=64, intermediate_size=96, num_hidden_layers=2, layer_types=None)()
    monkeypatch.setattr(gguf, "GGUFWriter", FusingWriter)
    weights = checkpoint_of(make_model(config), tmp_path / "there")
    written = write_gguf(
        tmp_path / "m.gguf", config, weights,
        lambda stem, tensor: "Q8_0" if tensor.shape[-1] % 32 == 0 else "F32",
    )  # fmt: skip
    model = GgufModel(tmp_path / "m.gguf")
    names = {name.partition(".weight")[0].rpartition(".")[2] for file in files_of(model) for name in file.tensors}
    assert "attn_qkv" in names
    assert not names & {"attn_q", "attn_k", "attn_v", "ffn_gate_exps", "ffn_up_exps"}
    assert ("ffn_gate_up_exps" in names) == (name == "qwen3moe")
    check_tensors(model, written)


def files_of(model: Any) -> list[GgufFile]:
    return [GgufFile(path) for path in model.files]


def test_ministral_as_ollama_names_its_scaling(tmp_path: Path) -> None:
    """Its first converter had other keys; without them it would be read as Llama, with another scaling."""
    config = FAMILIES["ministral3"]()
    rope = config.rope_parameters
    scaling = {
        "mistral3.rope.scaling_beta": float(rope["llama_4_scaling_beta"]),
        "mistral3.rope.scaling.mscale_all_dim": float(rope["mscale_all_dim"]),
    }
    tensors = dict(make_model(config).state_dict())
    write_gguf(tmp_path / "usual.gguf", config, tensors)
    write_gguf(
        tmp_path / "m.gguf", config, tensors, more=scaling,
        without=("mistral3.attention.temperature_scale", "mistral3.rope.scaling.yarn_log_multiplier"),
    )  # fmt: skip
    found = GgufModel(tmp_path / "m.gguf").config
    assert found["model_type"] == "ministral3"
    assert found == GgufModel(tmp_path / "usual.gguf").config
