"""GPT-2 (Radford et al. 2019) and GPT-Neo (Black et al. 2021): learned positions, layer norms.

GPT-2's matrices are stored transposed. GPT-Neo's scores are not scaled, and every second layer has a window.
"""

from __future__ import annotations

from typing import Any

from asyncengine.errors import ModelNotFound
from asyncengine.execution.layers.basic import NormConfig
from asyncengine.execution.models.config import ModelConfig, unknown_layers
from asyncengine.execution.models.decoder import DecoderConfig
from asyncengine.execution.models.families.common import activation, llama_like


def complete(config: ModelConfig) -> None:
    if config.model_type == "gpt_neo":
        spans = config.get("attention_types", [[["global", "local"], 12]])
        config.attention_layers = [kind for kinds, times in spans for _ in range(times) for kind in kinds]


def decoder_config(config: Any, length: int) -> DecoderConfig:
    """The decoder of `GPT2LMHeadModel` and `GPTNeoForCausalLM`. Attention to an encoder, if a checkpoint has weights
    for it, is left out."""
    neo, width, heads = config.model_type == "gpt_neo", config.hidden_size, config.num_attention_heads
    inner = config.intermediate_size if neo else config.n_inner
    return llama_like(
        config, length,
        attention={"num_kv_heads": heads, "rotary": None, "out_bias": True, **(_neo(config) if neo else _gpt2(config))},
        mlp={
            "width": 4 * width if inner is None else inner,
            "activation": activation(config, config.activation_function),
            "up": ("mlp.c_fc",), "down": "mlp.c_proj", "gated": False, "bias": True, "transposed": not neo,
        },
        layer={"before_attention": "ln_1", "before_mlp": "ln_2"},
        norm=NormConfig("layer", epsilon=config.layer_norm_epsilon, bias=True),
        rotary=(), max_positions=config.max_position_embeddings, embedding="transformer.wte",
        positions="transformer.wpe", path="transformer.h.{}.", final_norm="transformer.ln_f",
        # masks, which were once saved
        ignored=(r"(transformer\.)?h\.\d+\.(attn\.(attention\.)?(masked_)?bias|(crossattention|ln_cross_attn)\..*)",),
    )  # fmt: skip


def _gpt2(config: Any) -> dict[str, Any]:
    """Fields of attention."""
    scale = (config.hidden_size // config.num_attention_heads) ** -0.5 if config.scale_attn_weights else 1.0
    by_layer = config.scale_attn_by_inverse_layer_idx
    scales = [scale / (index + 1) if by_layer else scale for index in range(config.num_hidden_layers)]
    return {"scale": scales, "qkv": ("attn.c_attn",), "out": "attn.c_proj", "qkv_bias": True, "transposed": True}


def _neo(config: Any) -> dict[str, Any]:
    kinds = ("global", "local")
    if len(config.attention_layers) != config.num_hidden_layers:
        raise ModelNotFound("config.json: attention_types do not describe num_layers layers")
    if unknown := [kind for kind in config.attention_layers if kind not in kinds]:
        raise unknown_layers("gpt_neo", unknown[0], kinds)
    windows = [config.window_size if kind == "local" else None for kind in config.attention_layers]
    *qkv, out = (f"attn.attention.{name}_proj" for name in ("q", "k", "v", "out"))
    return {"scale": 1.0, "qkv": tuple(qkv), "out": out, "window": windows}
