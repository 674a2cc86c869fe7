"""Falcon (Almazrouei et al. 2023): attention and feed-forward part beside each other, few heads of keys and values."""

from __future__ import annotations

from typing import Any

from asyncengine.execution.layers.basic import NormConfig
from asyncengine.execution.models.config import Defaults, ModelConfig, UnknownLayers
from asyncengine.execution.models.decoder import DecoderConfig
from asyncengine.execution.models.families.common import activation, llama_like

DEFAULTS: Defaults = {
    "falcon": {
        "num_ln_in_parallel_attn": None, "alibi": False, "new_decoder_architecture": False, "multi_query": True,
        "parallel_attn": True, "bias": False, "max_position_embeddings": 2048, "activation": "gelu",
        "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True,
    },
}  # fmt: skip
_ATTENTION: dict[str, Any] = {"qkv": ("self_attention.query_key_value",), "out": "self_attention.dense"}
_MLP: dict[str, Any] = {"up": ("mlp.dense_h_to_4h",), "down": "mlp.dense_4h_to_h", "gated": False}
_MODEL: dict[str, Any] = {
    "embedding": "transformer.word_embeddings", "path": "transformer.h.{}.", "final_norm": "transformer.ln_f",
}  # fmt: skip


def complete(config: ModelConfig) -> None:
    if (width := config.get("n_embed")) is not None:
        config.hidden_size = width
    config.num_kv_heads = config.get("num_kv_heads", config.num_attention_heads)
    config.ffn_hidden_size = config.get("ffn_hidden_size", 4 * config.hidden_size)


def decoder_config(config: Any, length: int) -> DecoderConfig:
    """The decoder of `FalconForCausalLM`."""
    if config.alibi:  # its biases are rounded to bfloat16, whatever the model's type
        raise UnknownLayers("family 'falcon' with alibi in place of rotation (Falcon RW) does not run here")
    grouped, parallel, bias = bool(config.new_decoder_architecture), bool(config.parallel_attn), bool(config.bias)
    norms, heads = config.num_ln_in_parallel_attn or (2 if grouped else 1), config.num_attention_heads
    if (grouped and not parallel) or (norms == 2 and parallel and not grouped):
        raise UnknownLayers("family 'falcon' with num_ln_in_parallel_attn of another architecture does not run here")
    before = ("ln_attn", "ln_mlp") if norms == 2 and parallel else ("input_layernorm", None)
    if not parallel:
        before = ("input_layernorm", "post_attention_layernorm")
    one_key = bool(config.multi_query) and not grouped
    keys = 1 if one_key else config.num_kv_heads if grouped else heads
    act, norm = activation(config, config.activation), NormConfig("layer", config.layer_norm_epsilon, bias=True)
    return llama_like(
        config, length, norm=norm,
        attention={
            **_ATTENTION, "num_kv_heads": keys, "qkv_by_head": not one_key, "qkv_bias": bias, "out_bias": bias,
        },
        mlp={**_MLP, "width": config.ffn_hidden_size, "activation": act, "bias": bias},
        layer={"before_attention": before[0], "before_mlp": before[1], "parallel": parallel},
        **_MODEL,
    )  # fmt: skip
