"""Qwen3-Next, Mamba-2, Falcon-H1, Nemotron and Kimi Linear in GGUF files: logits are those of transformers with what
the file stands for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from models.formats.test_gguf_hybrids import put_value
from support.forwards import Forwards
from support.gguf_models import changed, make_model
from support.gguf_reading import LENGTH, decoder_of
from support.gguf_states import checkpoint_of, model_of, write_states
from transformers import AutoConfig

from asyncengine.config import EngineConfig
from asyncengine.errors import ModelNotFound
from asyncengine.models.families import decoder_config_of
from asyncengine.models.formats.gguf.model import open_gguf
from asyncengine.models.loading import load_model

IDS = list(range(3, 24))
CASES: dict[str, Any] = {
    "qwen3next": changed("qwen3next", mlp_only_layers=[], linear_key_head_dim=16, linear_value_head_dim=16),
    "mamba2": changed("mamba2", use_bias=False),
    "mamba2, tied": changed("mamba2", tie_word_embeddings=True),
    "falcon-h1": changed("falcon-h1", mamba_norm_before_gate=False),
    "falcon-h1 without a norm": changed("falcon-h1", mamba_rms_norm=False),
    "nemotron-h": changed("nemotron-h", mamba_num_heads=6, n_groups=2),
    "nemotron-3": changed("nemotron-3", hidden_size=96),
    "nemotron-3, latent": changed("nemotron-3", moe_latent_size=32),
    "kimi-linear": changed(
        "kimi-linear", hidden_size=64, linear_num_heads=4, kv_lora_rank=32, qk_nope_head_dim=32, v_head_dim=32
    ),
}


def kinds_of(kind: str) -> Any:
    return lambda _, tensor: kind if tensor.shape[-1] % 32 == 0 else "F32"


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
@pytest.mark.parametrize("name", [*CASES, "qwen3next of old"])
def test_comes_back(name: str, kind: str, tmp_path: Path) -> None:
    config = CASES[name.removesuffix(" of old")]()
    weights = checkpoint_of(make_model(config), tmp_path / "there")
    path = tmp_path / "m.gguf"
    written = write_states(path, config, weights, kinds_of(kind), legacy=name.endswith(" of old"))
    model = open_gguf(path)
    fields = dict(model.config)
    back = AutoConfig.for_model(fields.pop("model_type"), **fields)
    if config.model_type not in ("qwen3_next", "falcon_h1"):  # one of another layout, one with factors in tensors
        assert str(decoder_config_of(back, LENGTH)) == str(decoder_config_of(config, LENGTH))
    assert written.keys() == weights.keys() - ({"lm_head.weight"} if config.tie_word_embeddings else set())
    reference = model_of(tmp_path / "there", written)
    with torch.inference_mode():
        expected = reference(torch.tensor([IDS]), use_cache=False).logits[0]
    meant = Forwards(decoder_of(model), most=len(IDS)).step(IDS)
    torch.testing.assert_close(meant, expected, rtol=0.0, atol=2e-5 * float(expected.abs().max()))
    loaded = load_model(str(path), EngineConfig(show_progress=False, dtype="float32")).model
    found = Forwards(loaded, most=len(IDS)).step(IDS)
    error = (found - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert float(error.median()) < (2e-5 if kind == "F32" else 0.1)  # what rounding x costs such weights


def test_a_part_of_a_tensor_counts_once(tmp_path: Path) -> None:
    """Rows of b and a lie among each other: both are read of the same bytes."""
    config = CASES["qwen3next"]()
    weights = checkpoint_of(make_model(config), tmp_path / "there")
    write_states(tmp_path / "m.gguf", config, weights, legacy=True)
    model = open_gguf(tmp_path / "m.gguf")
    assert model.elements == sum(tensor.numel() for tensor in weights.values())
    assert model.weight_bytes == 4 * model.elements


@pytest.mark.parametrize(
    ("name", "key", "value", "message"),
    [
        ("mamba2", "ssm.time_step_rank", 0, "states of 0 heads"),
        ("mamba2", "ssm.inner_size", 2**31, "states of 8 heads in 2147483648 numbers"),
        ("mamba2", "ssm.state_size", 2**31, "groups of 2147483648"),
        ("mamba2", "ssm.group_count", 3, "and 3 groups"),
        ("mamba2", "embedding_length", 48, "must be a multiple of .embedding_length"),
        ("mamba2", "embedding_length", 0, "embedding_length must not be 0"),
        ("nemotron-3", "attention.head_count_kv", 2, "must say which layers attend"),
        ("nemotron-3", "attention.head_count_kv", [2], "must have a number for each layer"),
        ("nemotron-3", "expert_count", 2**31, "n_routed_experts must be between"),
        ("kimi-linear", "attention.head_count_kv", 1, "must say which layers attend"),
        ("kimi-linear", "kda.head_dim", 2**31, "states of 2147483648 numbers"),
        ("kimi-linear", "attention.key_length_mla", 8, "keys of 8, .*of which 8 of a key are shared"),
        ("kimi-linear", "attention.kv_lora_rank", 2**31, "kv_lora_rank must be between"),
        ("qwen3next", "ssm.group_count", 4, "wrong shape for the tensor .*in_proj_qkv.weight"),
        ("qwen3next", "ssm.time_step_rank", 2**31, "states of 2147483648 heads"),
    ],
)
def test_headers_that_lie(name: str, key: str, value: Any, message: str, tmp_path: Path) -> None:
    """By name, and before memory is taken for what they say."""
    config = CASES[name]()
    weights = checkpoint_of(make_model(config), tmp_path / "there")
    change = lambda writer: put_value(writer, key, value)  # noqa: E731
    write_states(tmp_path / "m.gguf", config, weights, change=change, legacy=True)
    with pytest.raises(ModelNotFound, match=message):
        load_model(str(tmp_path / "m.gguf"), EngineConfig(show_progress=False))
