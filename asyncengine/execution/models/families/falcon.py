"""Falcon (Almazrouei et al. 2023), BLOOM (Le Scao et al. 2022) and MPT (MosaicML 2023).

Falcon's feed-forward part is beside attention, with few heads of keys and values. The others have no positions but a
bias of scores by distance, ALiBi.
"""

from __future__ import annotations

from typing import Any

from asyncengine.execution.layers.basic import NormConfig
from asyncengine.execution.layers.rotary import RotaryConfig
from asyncengine.execution.models.config import ModelConfig, UnknownLayers
from asyncengine.execution.models.decoder import DecoderConfig
from asyncengine.execution.models.families.common import activation, llama_like

_ALIBI = (RotaryConfig((), style="alibi"),)
_ATTENTION: dict[str, Any] = {"qkv": ("self_attention.query_key_value",), "out": "self_attention.dense"}
_MLP: dict[str, Any] = {"up": ("mlp.dense_h_to_4h",), "down": "mlp.dense_4h_to_h", "gated": False}
_MODEL: dict[str, Any] = {
    "embedding": "transformer.word_embeddings", "path": "transformer.h.{}.", "final_norm": "transformer.ln_f",
}  # fmt: skip


def complete(config: ModelConfig) -> None:
    if config.model_type != "mpt" and (width := config.get("n_embed")) is not None:
        config.hidden_size = width
    if config.model_type == "falcon":
        config.num_kv_heads = config.get("num_kv_heads", config.num_attention_heads)
        config.ffn_hidden_size = config.get("ffn_hidden_size", 4 * config.hidden_size)


def decoder_config(config: Any, length: int) -> DecoderConfig:
    """The decoder of `FalconForCausalLM`, `BloomForCausalLM` and `MptForCausalLM`."""
    return {"falcon": _falcon, "bloom": _bloom, "mpt": _mpt}[config.model_type](config, length)


def _falcon(config: Any, length: int) -> DecoderConfig:
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


def _bloom(config: Any, length: int) -> DecoderConfig:
    if config.apply_residual_connection_post_layernorm:
        raise UnknownLayers("family 'bloom' with apply_residual_connection_post_layernorm does not run here")
    heads = config.num_attention_heads
    own = {"num_kv_heads": heads, "qkv_by_head": True, "qkv_bias": True, "out_bias": True}
    most = 2 ** (heads.bit_length() - 1)
    slopes = [2.0 ** (-8 * (index + 1) / most) for index in range(most)]
    slopes += [2.0 ** (-4 * (2 * index + 1) / most) for index in range(heads - most)]  # between those
    return llama_like(
        config, length, norm=NormConfig("layer", config.layer_norm_epsilon, bias=True), rotary=_ALIBI,
        attention={**_ATTENTION, **own, "alibi": tuple(slopes)},
        mlp={**_MLP, "width": 4 * config.hidden_size, "activation": "gelu_tanh", "bias": True},
        embedding_norm="transformer.word_embeddings_layernorm",
        **_MODEL,
    )  # fmt: skip


def _mpt(config: Any, length: int) -> DecoderConfig:
    given = config.attn_config or {}
    own = given if isinstance(given, dict) else vars(given)
    others = {"alibi": True, "alibi_bias_max": 8, "prefix_lm": False, "qk_ln": False}
    if unknown := [name for name, value in others.items() if own.get(name, value) != value]:
        raise UnknownLayers(f"family 'mpt' with attn_config.{unknown[0]} {own[unknown[0]]!r} does not run here")
    heads, scale = config.num_attention_heads, own.get("softmax_scale")
    most = 2 ** (heads - 1).bit_length()
    slopes = [2.0 ** (-8 * (index + 1) / most) for index in range(most)]
    slopes = slopes if most == heads else [*slopes[1::2], *slopes[::2]][:heads]
    attention = {"num_kv_heads": heads, "qkv": ("attn.Wqkv",), "out": "attn.out_proj", "alibi": tuple(slopes)}
    attention |= {"clip": own.get("clip_qkv") or None} | ({} if scale is None else {"scale": float(scale)})
    mlp = {"up": ("ffn.up_proj",), "down": "ffn.down_proj", "gated": False, "activation": "gelu"}
    return llama_like(
        config, length, attention=attention, mlp={**mlp, "width": 4 * config.hidden_size},
        layer={"before_attention": "norm_1", "before_mlp": "norm_2"},
        norm=NormConfig("layer", config.layer_norm_epsilon), rotary=_ALIBI,
        embedding="transformer.wte", path="transformer.blocks.{}.", final_norm="transformer.norm_f",
    )  # fmt: skip
