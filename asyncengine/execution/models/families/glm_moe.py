"""GLM 4.5 (GLM Team 2025) and dots.llm1 (rednote-hilab 2025): DeepSeek V3's router and shared experts, plain attention.

ERNIE 4.5 (Baidu 2025) has softmax scores, and no groups.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from asyncengine.execution.layers.basic import NormConfig
from asyncengine.execution.layers.experts import ExpertsConfig
from asyncengine.execution.layers.mlp import MLPConfig, MoEConfig
from asyncengine.execution.layers.routing import RouterConfig
from asyncengine.execution.models.config import ModelConfig
from asyncengine.execution.models.decoder import DecoderConfig
from asyncengine.execution.models.decoder_layer import MTPConfig, head_layers
from asyncengine.execution.models.families.common import activation, llama_like, rotary_of, slide_from, windows_of

_SHARED = "mlp.shared_experts."
FREQUENCIES = r"(.*\.)?rotary_emb\.inv_freq"
_LEAST = 1e-20
"""A sum of weights at least."""


def complete(config: ModelConfig) -> None:
    if config.model_type == "dots1":
        slide_from(config)
    elif config.model_type == "ernie4_5_moe" and config.moe_layer_end_index == -1:
        config.moe_layer_end_index = config.num_hidden_layers - 1


def decoder_config(config: Any, length: int) -> DecoderConfig:
    """The decoder of `Glm4MoeForCausalLM`, `Glm4vMoeTextModel`, `Dots1ForCausalLM`, `Ernie4_5_MoeForCausalLM`."""
    if config.model_type == "ernie4_5_moe":
        return _ernie(config, length)
    norm = NormConfig(epsilon=config.rms_norm_eps)
    glm = config.model_type in ("glm4_moe", "glm4v_moe_text")
    mixture = mixture_of(config, sigmoid_router(config), config.n_shared_experts, bias=False)
    attention = {
        "window": None if glm else windows_of(config),
        "qkv_bias": config.attention_bias,
        "out_bias": config.attention_bias and not glm,
        "head_norm": norm if not glm or getattr(config, "use_qk_norm", False) else None,
    }
    made = llama_like(
        config,
        length,
        attention=attention,
        sparse=[
            mixture if index >= config.first_k_dense_replace else None for index in range(config.num_hidden_layers)
        ],
        norm=norm,
        rotary=(rotary_of(config, length, partial=glm),),
        # a layer after the last, which predicts further tokens
        ignored=(FREQUENCIES, rf"(.*\.)?layers\.{config.num_hidden_layers}\..*"),
    )
    if not glm:
        return made
    after = f"model.layers.{config.num_hidden_layers}."
    head = MTPConfig(
        head_layers((replace(made.layers[-1], mlp=mixture),)), after, f"{after}enorm", f"{after}hnorm",
        f"{after}eh_proj", f"{after}shared_head.norm",
    )  # fmt: skip
    return replace(made, mtp=head)


def _ernie(config: Any, length: int) -> DecoderConfig:
    correction, other = (f"mlp.{part}moe_statics.e_score_correction_bias" for part in ("", "gate."))
    router = RouterConfig(
        config.moe_num_experts, config.moe_k, exact=True, correction=correction, correction_rows=1,
        least_sum=float(config.moe_norm_min),
    )  # fmt: skip
    bias = bool(config.use_bias)
    mixture = replace(mixture_of(config, router, config.moe_num_shared_experts, bias), aliases=((correction, other),))

    def sparse(index: int) -> MoEConfig | None:
        within = config.moe_layer_start_index <= index <= config.moe_layer_end_index
        return mixture if within and (index + 1) % config.moe_layer_interval == 0 else None

    return llama_like(
        config, length, attention={"qkv_bias": bias, "out_bias": bias}, mlp={"bias": bias},
        sparse=[sparse(index) for index in range(config.num_hidden_layers)],
        rotary=(replace(rotary_of(config, length, style="interleaved"), exact=True),), head_bias=bias,
        ignored=(FREQUENCIES, r".*mtp.*"),
    )  # fmt: skip


def sigmoid_router(config: Any, block: str = "mlp.", experts: int | None = None) -> RouterConfig:
    """DeepSeek V3's router of `experts` experts (None: `n_routed_experts`), whose tensors' names begin with `block`."""
    return RouterConfig(
        config.n_routed_experts if experts is None else experts, config.num_experts_per_tok, "sigmoid",
        name=f"{block}gate.weight", exact=True, correction=f"{block}gate.e_score_correction_bias",
        groups=config.n_group, groups_kept=config.topk_group, normalised=bool(config.norm_topk_prob),
        least_sum=_LEAST, scale=float(config.routed_scaling_factor),
    )  # fmt: skip


def mixture_of(config: Any, router: RouterConfig, shared: int, bias: bool) -> MoEConfig:
    """The mixture of that router, and of `shared` experts that all rows go to."""
    act, width = activation(config), config.moe_intermediate_size
    experts = ExpertsConfig(router.experts, width, act)
    if not shared:
        return MoEConfig(router, experts)
    names = (f"{_SHARED}gate_proj", f"{_SHARED}up_proj")
    return MoEConfig(router, experts, MLPConfig(width * shared, act, names, f"{_SHARED}down_proj", bias=bias))
