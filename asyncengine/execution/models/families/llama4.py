"""Llama 4's text model (Meta 2025): layers that rotate see their own chunk of positions, the others see everything and
scale their queries with the position; mixtures that multiply what an expert reads by its weight, not what it gives."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from asyncengine.execution.layers.basic import NormConfig
from asyncengine.execution.layers.experts import ExpertsConfig, Stacked
from asyncengine.execution.layers.mlp import MLPConfig, MoEConfig
from asyncengine.execution.layers.rotary import RotaryConfig
from asyncengine.execution.layers.routing import RouterConfig
from asyncengine.execution.models.config import ModelConfig
from asyncengine.execution.models.decoder import DecoderConfig
from asyncengine.execution.models.families.common import activation, layer_types_of, llama_like, rotary_of

KINDS = ("full_attention", "chunked_attention")

_BLOCK = "feed_forward."
_EACH = f"{_BLOCK}experts.{{}}."
_GATED = ("gate_proj", "up_proj")


def complete(config: ModelConfig) -> None:
    count, step = config.num_hidden_layers, config.get("interleave_moe_layer_step", 1)
    every = config.get("no_rope_layer_interval", 4)
    config.no_rope_layers = config.get("no_rope_layers") or [int((layer + 1) % every != 0) for layer in range(count)]
    config.moe_layers = config.get("moe_layers", list(range(step - 1, count, step)))
    if config.layer_types is None:
        chunks = config.attention_chunk_size is not None
        config.layer_types = [KINDS[bool(rotates and chunks)] for rotates in config.no_rope_layers]


def decoder_config(config: Any, length: int) -> DecoderConfig:
    """The decoder of `Llama4ForCausalLM`."""
    mixture = _mixture(config)
    kinds, bias = layer_types_of(config, KINDS), bool(config.attention_bias)
    norm = NormConfig(epsilon=config.rms_norm_eps, weight=False) if config.use_qk_norm else None
    rotary = replace(rotary_of(config, length, style="interleaved"), exact=True)
    growth = (float(config.attn_scale), int(config.floor_scale)) if config.attn_temperature_tuning else None

    rotates = [bool(each) for each in config.no_rope_layers]
    attention = {
        "rotary": [0 if each else 1 for each in rotates],
        "chunk": [config.attention_chunk_size if kind == "chunked_attention" else None for kind in kinds],
        "qkv_bias": bias,
        "out_bias": bias,
        "head_norm": [norm if each else None for each in rotates],
        "norm_after_rotation": [each and norm is not None for each in rotates],
    }
    return llama_like(
        config, length, attention=attention, mlp={"width": config.intermediate_size_mlp, **_named(_BLOCK)},
        sparse=[mixture if index in config.moe_layers else None for index in range(config.num_hidden_layers)],
        rotary=(rotary, RotaryConfig((), query_growth=growth, growth_begins=1)),
    )  # fmt: skip


def _mixture(config: Any) -> MoEConfig:
    act, count, width = activation(config), config.num_local_experts, config.intermediate_size
    router = RouterConfig(count, config.num_experts_per_tok, "sigmoid", name=f"{_BLOCK}router.weight", normalised=False)
    experts = ExpertsConfig(
        count, width, act, up=(f"{_EACH}gate_proj.weight", f"{_EACH}up_proj.weight"), down=f"{_EACH}down_proj.weight",
        stacked=Stacked((f"{_BLOCK}experts.gate_up_proj",), f"{_BLOCK}experts.down_proj"), transposed=True,
    )  # fmt: skip
    shared = MLPConfig(width, act, **_named(f"{_BLOCK}shared_expert."))
    return MoEConfig(router, experts, shared, scales_inputs=True)


def _named(block: str) -> dict[str, Any]:
    return {"up": tuple(block + name for name in _GATED), "down": f"{block}down_proj"}
