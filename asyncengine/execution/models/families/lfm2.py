"""LFM2 and LFM3 (Liquid AI 2025, 2026): gated short convolutions beside a few layers of attention, or with experts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from asyncengine.execution.layers.basic import Linear, NormConfig, Part
from asyncengine.execution.layers.causal_conv import CausalConv
from asyncengine.execution.layers.experts import ExpertsConfig, Stacked
from asyncengine.execution.layers.mlp import MoEConfig
from asyncengine.execution.layers.options import LayerOptions
from asyncengine.execution.layers.routing import RouterConfig
from asyncengine.execution.layers.sharded import even_cuts, share_of
from asyncengine.execution.layers.states import StateLayer, StateSpec, StateStep
from asyncengine.execution.models.config import ModelConfig, UnknownLayers
from asyncengine.execution.models.decoder import DecoderConfig
from asyncengine.execution.models.families.common import layer_types_of, llama_like, rotary_of, with_states

# Gated short convolution (LFM2, Liquid AI 2025): what mixes tokens is a causal convolution of a few taps.

_UNIT = 32
"""Channels that one process has together: whole vectors of any machine."""


@dataclass(frozen=True, slots=True)
class ShortConvConfig:
    """Such a layer, with the checkpoint's names."""

    taps: int
    bias: bool = False
    """Whether the convolution and both projections have biases."""
    projection: str = "conv.in_proj"
    conv: str = "conv.conv"
    out: str = "conv.out_proj"

    def build(self, options: LayerOptions, norm: NormConfig, prefix: str, width: int, index: int) -> ShortConv:
        return ShortConv(options, self, prefix, width, index)


class ShortConv(StateLayer):
    """out(C * conv(B * x)) of the projection's three parts B, C and x. It remembers the convolution's last inputs."""

    def __init__(self, options: LayerOptions, config: ShortConvConfig, prefix: str, width: int, index: int) -> None:
        self.index, units = index, width // _UNIT if width % _UNIT == 0 else 1
        each = width // units
        self.share = share_of(options.ranks, even_cuts(options.ranks, units), [each] * 3, each)
        parts = [Part(prefix + config.projection, 3 * width)]
        self.inputs = Linear(options, parts, width, bias=config.bias, share=self.share)
        self.conv = CausalConv(
            options, prefix + config.conv, width, config.taps, bias=config.bias,
            spans=None if self.share is None else self.share.rows([each]),
        )  # fmt: skip
        self.out = Linear(options, [Part(prefix + config.out, width)], width, bias=config.bias)
        self.kernel = _kernel(options, self.conv)
        self.spec = StateSpec(window=self.conv.window, parts=units, divided=self.share is not None)

    def mix(self, projected: torch.Tensor, step: StateStep) -> torch.Tensor:
        if self.kernel is not None:
            made: torch.Tensor = self.kernel(projected, None, step.pools.windows[self.index], step.segments)
            return made
        before, after, inputs = projected.chunk(3, dim=-1)
        return self.conv(before * inputs, step, self.index).mul_(after)


def _kernel(options: LayerOptions, conv: CausalConv) -> Any:
    """The compiled call for everything between the projections; None: there is none here."""
    if not options.compiled or options.kernels.name != "compiled":
        return None
    from asyncengine.kernels.api import ShortConvKernel

    return ShortConvKernel(conv.weight, conv.bias)


_KINDS = ("conv", "full_attention")
KINDS = {"lfm2": _KINDS, "lfm2_moe": _KINDS, "lfm3": (*_KINDS, "sliding_attention")}
_FORWARD = "feed_forward."
_EXPERT = "feed_forward.experts.{}."
_LEAST = 1e-6
"""Number added to the sum of a row's weights."""


def complete(config: ModelConfig) -> None:
    config.tie_word_embeddings = config.get("tie_embedding", config.tie_word_embeddings)
    if config.model_type == "lfm2":
        layers = range(config.num_hidden_layers)
        config.intermediate_size = config.get("block_ff_dim", config.intermediate_size)
        attend = config.get("full_attn_idxs", layers)
        config.layer_types = config.layer_types or [_KINDS[layer in attend] for layer in layers]
    elif config.model_type == "lfm3":
        kinds = ["sliding_attention", "conv", "full_attention", "conv"]
        layers = range(config.num_hidden_layers)
        config.layer_types = config.layer_types or [kinds[layer % 4] if layer else "conv" for layer in layers]
        config.rope_parameters = config.rope_parameters or {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
        }


def decoder_config(config: Any, length: int) -> DecoderConfig:
    """The decoder of `Lfm2ForCausalLM`, `Lfm2MoeForCausalLM` and `Lfm3ForCausalLM`."""
    norm = NormConfig(epsilon=config.norm_eps)
    third, sparse = config.model_type == "lfm3", config.model_type == "lfm2_moe"
    kinds = layer_types_of(config, KINDS[config.model_type])
    attention: dict[str, Any] = {
        "out": "self_attn.out_proj",
        "head_norm": norm,
        "norm_names": ("self_attn.q_layernorm", "self_attn.k_layernorm"),
    }
    layer, more = {"before_attention": "operator_norm", "before_mlp": "ffn_norm"}, dict[str, Any]()
    if third:
        attention, more["rotary"] = _third(config, length, kinds, norm)
        if config.use_sandwich_norm:
            layer |= {"after_attention": "post_operator_norm", "after_mlp": "post_ffn_norm"}
    dense = config.num_dense_layers if sparse else config.num_hidden_layers
    mixture = _mixture(config) if sparse else None
    made = llama_like(
        config, length, norm=norm,
        attention=attention,
        mlp={
            "width": _width(config),
            "activation": "silu",
            "up": (f"{_FORWARD}w1", f"{_FORWARD}w3"),
            "down": f"{_FORWARD}w2",
        },
        sparse=[mixture if index >= dense else None for index in range(config.num_hidden_layers)],
        layer=layer, final_norm="model.embedding_norm", **more,
    )  # fmt: skip
    return with_states(made, kinds, ShortConvConfig(config.conv_L_cache, bool(config.conv_bias)))


def _third(config: Any, length: int, kinds: Sequence[str], norm: NormConfig) -> tuple[dict[str, Any], Any]:
    """(fields of attention, rotations) of LFM3: each kind of layer has its own, and heads may have gates."""
    gate, bias = "self_attn.gate_proj" if config.use_attention_gate else None, bool(config.attention_bias)
    if gate and bias:
        raise UnknownLayers("family 'lfm3' with use_attention_gate and attention_bias does not run here")
    turned = [kind for kind in KINDS["lfm3"][1:] if kind in kinds]
    attention = {
        "head_norm": norm, "lone_gate": gate, "qkv_bias": bias, "out_bias": bias,
        "window": [config.sliding_window if kind == "sliding_attention" else None for kind in kinds],
        "rotary": [None if kind == "conv" else turned.index(kind) for kind in kinds],
    }  # fmt: skip
    return attention, tuple(replace(rotary_of(config, length, kind), exact=True) for kind in turned)


def _width(config: Any) -> int:
    """Width between the two products of the feed-forward part."""
    width = int(config.intermediate_size)
    if not getattr(config, "block_auto_adjust_ff_dim", False):
        return width
    width = int(2 * width / 3)
    if config.block_ffn_dim_multiplier is None:
        return width
    multiple = int(config.block_multiple_of)
    return -(-int(config.block_ffn_dim_multiplier * width) // multiple) * multiple


def _mixture(config: Any) -> MoEConfig:
    router = RouterConfig(
        config.num_experts, config.num_experts_per_tok, "sigmoid", name=f"{_FORWARD}gate.weight",
        correction=f"{_FORWARD}expert_bias" if config.use_expert_bias else None,
        normalised=bool(config.norm_topk_prob), least_sum=_LEAST, scale=float(config.routed_scaling_factor),
    )  # fmt: skip
    experts = ExpertsConfig(
        config.num_experts, config.moe_intermediate_size, "silu",
        up=(f"{_EXPERT}w1.weight", f"{_EXPERT}w3.weight"), down=f"{_EXPERT}w2.weight",
        stacked=Stacked((f"{_FORWARD}experts.gate_up_proj",), f"{_FORWARD}experts.down_proj"),
    )  # fmt: skip
    return MoEConfig(router, experts)
