"""config.json read without transformers says what transformers' classes say, or is left to them."""

import copy
import dataclasses

import pytest
import torch
from transformers import AutoConfig

from asyncengine.models.families import decoder_config_of
from asyncengine.models.plain_config import plain_config

SIZES = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
}  # fmt: skip
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
VARIANTS = {
    "only sizes": {"num_key_value_heads": 2},
    "as checkpoints of transformers 4 have it": {
        "architectures": ["ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 7, "eos_token_id": [8, 9],
        "hidden_act": "silu", "initializer_range": 0.02, "max_position_embeddings": 512, "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5, "rope_theta": 1000000, "rope_scaling": None, "tie_word_embeddings": True,
        "torch_dtype": "bfloat16", "transformers_version": "4.51.0", "use_cache": True,
    },
    "as those of transformers 5": {
        "dtype": "float32", "num_key_value_heads": 4, "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"},
        "pad_token_id": 3, "eos_token_id": None, "tie_word_embeddings": False, "max_position_embeddings": 64,
    },
    "the newer rotation beside the older": {
        "num_key_value_heads": 1, "rope_theta": 300.0, "rope_parameters": {"rope_theta": 500.0},
    },
    "quantized": {
        "num_key_value_heads": 2, "torch_dtype": "float16",
        "quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True},
    },
    "an empty rotation": {"num_key_value_heads": 1, "rope_theta": 300.0, "rope_parameters": {}},
}  # fmt: skip
OWN = {
    "llama": [
        {}, {"head_dim": 32, "attention_bias": True, "mlp_bias": True, "pretraining_tp": 1}, {"head_dim": None},
        {"num_key_value_heads": None},
    ],
    "mistral": [{}, {"sliding_window": 16, "head_dim": 8}, {"sliding_window": None}, {"head_dim": None}],
    "qwen2": [
        {}, {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1},
        {"use_sliding_window": True, "sliding_window": None}, {"use_sliding_window": False, "sliding_window": 16},
        {"layer_types": ["full_attention", "sliding_attention"] * 2, "sliding_window": 8, "use_sliding_window": True},
    ],
    "qwen3": [
        {}, {"head_dim": 16, "attention_bias": True}, {"sliding_window": None},
        {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 2},
    ],
}  # fmt: skip
CASES = [(family, variant, own) for family in FAMILIES for variant in VARIANTS for own in OWN[family]]


@pytest.mark.parametrize(("family", "variant", "own"), CASES)
def test_it_says_what_transformers_says(family: str, variant: str, own: dict[str, object]) -> None:
    content = {"model_type": family, **SIZES, **VARIANTS[variant], **own}
    plain = plain_config(copy.deepcopy(content), "here")
    assert plain is not None
    theirs = AutoConfig.for_model(**copy.deepcopy(content))
    for name, value in vars(plain).items():
        if name not in ("_name_or_path", "dtype"):
            assert getattr(theirs, name) == value, name
    assert theirs.dtype == (plain.dtype and getattr(torch, plain.dtype))
    ours, other = decoder_config_of(plain, 64), decoder_config_of(theirs, 64)
    assert ours is not None
    assert dataclasses.asdict(ours) == dataclasses.asdict(other)


LEFT_TO_TRANSFORMERS = [
    {"model_type": "gemma2"},
    {"model_type": 5},
    {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
    {"rope_parameters": {"rope_theta": 1e4, "rope_type": "yarn", "factor": 2.0}},
    {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}},
    {"rope_theta": "many"},
    {"rope_theta": 0},
    {"partial_rotary_factor": 0.5},
    {"quantization_config": {}},
    {"quantization_config": "awq"},
    {"auto_map": {}},
    {"per_layer_config": {}},
    {"something_new": 1},
    {"hidden_size": 65},
    {"hidden_size": True},
    {"hidden_size": 64.0},
    {"hidden_size": -64},
    {"num_attention_heads": 0},
    {"head_dim": 7},
    {"rms_norm_eps": "small"},
    {"rms_norm_eps": float("nan")},
    {"hidden_act": None},
    {"tie_word_embeddings": 1},
    {"eos_token_id": ["end"]},
    {"eos_token_id": 1.5},
    {"vocab_size": None},
    {"dtype": "int8"},
    {"torch_dtype": 16},
]


@pytest.mark.parametrize("change", LEFT_TO_TRANSFORMERS, ids=str)
def test_what_is_not_certain_is_left_to_transformers(change: dict[str, object]) -> None:
    content = {"model_type": "llama", **SIZES, "num_key_value_heads": 2}
    assert plain_config(content) is not None
    assert plain_config({**content, **change}) is None


@pytest.mark.parametrize("missing", sorted(SIZES))
def test_a_size_that_is_missing_is_not_made_up(missing: str) -> None:
    content = {"model_type": "qwen3", **SIZES}
    del content[missing]
    assert plain_config(content) is None


@pytest.mark.parametrize("kinds", [["full_attention"] * 3, ["linear_attention"] * 4, [1, 2, 3, 4], "full_attention"])
def test_layers_of_another_kind_or_number(kinds: object) -> None:
    assert plain_config({"model_type": "qwen3", **SIZES, "num_key_value_heads": 2, "layer_types": kinds}) is None
