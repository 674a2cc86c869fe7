"""gpt-oss (OpenAI 2025): experts with biases and a bounded activation, and a sink of attention for each head."""

from __future__ import annotations

from typing import Any

from asyncengine.execution.layers.experts import ExpertsConfig
from asyncengine.execution.layers.mlp import MoEConfig
from asyncengine.execution.layers.routing import RouterConfig
from asyncengine.execution.models.config import ModelConfig
from asyncengine.execution.models.decoder import DecoderConfig
from asyncengine.execution.models.families.common import alternate, llama_like, windows_of


def complete(config: ModelConfig) -> None:
    alternate(config, 2)


def decoder_config(config: Any, length: int) -> DecoderConfig:
    """The decoder of `GptOssForCausalLM`, its checkpoints in 16 or 32 bits."""
    router = RouterConfig(
        config.num_local_experts, config.num_experts_per_tok, name="mlp.router.weight", bias="mlp.router.bias"
    )
    experts = ExpertsConfig(
        config.num_local_experts,
        config.intermediate_size,
        "clamped",
        only_stacked=True,
        transposed=True,
        bias=("mlp.experts.gate_up_proj_bias", "mlp.experts.down_proj_bias"),
        alpha=getattr(config, "swiglu_alpha", 1.702),  # transformers 5.17 knows neither field, and has these by heart
        limit=getattr(config, "swiglu_limit", 7.0),
    )
    attention = {
        "window": windows_of(config),
        "sinks": "self_attn.sinks",
        "qkv_bias": config.attention_bias,
        "out_bias": config.attention_bias,
    }
    return llama_like(config, length, attention=attention, sparse=MoEConfig(router, experts))
