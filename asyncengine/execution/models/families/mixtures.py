"""Families with experts that differ from Llama in fields alone otherwise: tables of mixtures.toml, described there."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from importlib import resources
from typing import Any

from asyncengine.errors import UnsupportedModel
from asyncengine.execution.layers.experts import ExpertsConfig, Stacked
from asyncengine.execution.layers.mlp import MLPConfig, MoEConfig
from asyncengine.execution.layers.routing import RouterConfig
from asyncengine.execution.models.config import ModelConfig
from asyncengine.execution.models.decoder import DecoderConfig
from asyncengine.execution.models.decoder_layer import head_behind
from asyncengine.execution.models.families.common import BEHIND_LAST, KINDS, alternate, slide_from
from asyncengine.execution.models.families.dense import decoder_of, parts_of

_TABLES = tomllib.loads((resources.files(__package__) / "mixtures.toml").read_text(encoding="utf-8"))


def complete(config: ModelConfig) -> None:
    family, slides = config.model_type, config.get("use_sliding_window")
    if family == "gpt_oss":
        alternate(config, 2)
    elif family == "minimax_m2" and config.get("rotary_dim") is not None:
        config.partial_rotary_factor = config.get("partial_rotary_factor", config.rotary_dim / config.head_dim)
    elif family == "qwen3_vl_moe_text" or (family == "qwen3_moe" and not slides):
        config.sliding_window = None
    elif family == "dots1":
        slide_from(config)
    elif family == "ernie4_5_moe" and config.moe_layer_end_index == -1:
        config.moe_layer_end_index = config.num_hidden_layers - 1
    elif family == "qwen2_moe":
        if not slides:
            config.sliding_window = 0
        if config.layer_types is None:
            first = config.get("max_window_layers", 28) if slides else 0
            config.layer_types = [KINDS[layer < first and not layer % 2] for layer in range(config.num_hidden_layers)]


def decoder_config(config: Any, length: int) -> DecoderConfig:
    """The decoder of `MixtralForCausalLM`, `PhimoeForCausalLM`, `MiniMaxM2ForCausalLM`, `GptOssForCausalLM`,
    `Qwen2MoeForCausalLM`, `Qwen3MoeForCausalLM`, `Qwen3VLMoeTextModel`, `OlmoeForCausalLM`,
    `Glm4MoeForCausalLM`, `Glm4vMoeTextModel`, `Dots1ForCausalLM`, `Ernie4_5_MoeForCausalLM`, `GraniteForCausalLM`,
    `GraniteMoeForCausalLM`, `GraniteMoeSharedForCausalLM`; of Granite 4 and `qwen_next`'s what they have beside layers
    with states."""
    family = config.model_type
    if family == "phimoe" and config.num_experts_per_tok != 2:
        raise UnsupportedModel(f"family 'phimoe' with {config.num_experts_per_tok} experts of a row is not known")
    if family == "olmoe" and config.clip_qkv is not None:
        raise UnsupportedModel("family 'olmoe' with clip_qkv is not written down")
    parts = parts_of(_TABLES, config)
    mixture, where = _mixture(parts), parts.pop("sparse", {})
    made = decoder_of(
        config, length, parts,
        sparse=[None if _dense(config, index, **where) else mixture for index in range(config.num_hidden_layers)],
    )  # fmt: skip
    if family in ("glm4_moe", "glm4v_moe_text", "dots1"):
        made = replace(made, ignored=(*made.ignored, BEHIND_LAST.format(config.num_hidden_layers)))
    if family in ("glm4_moe", "glm4v_moe_text"):
        made = replace(made, mtp=head_behind(replace(made.layers[-1], mlp=mixture), config.num_hidden_layers))
    parameters = config.rope_parameters
    if family == "phimoe" and parameters["rope_type"] != "default":
        # cosines are multiplied by one of two settings instead of what a scaling by length says itself
        beyond = length > parameters["original_max_position_embeddings"]
        scaling = float(parameters["long_mscale" if beyond else "short_mscale"])
        return replace(made, rotary=(replace(made.rotary[0], scaling=scaling),))
    return made


def _mixture(parts: dict[str, Any]) -> MoEConfig | None:
    """The mixture of what the tables say, which is taken out of `parts`; None: there are no experts."""
    router, experts, shared, more = (parts.pop(name, {}) for name in ("router", "experts", "shared", "mixture"))
    if not router.get("experts"):
        return None
    if "stacked" in experts:
        experts["stacked"] = Stacked(*experts["stacked"])
    return MoEConfig(
        RouterConfig(**router), ExpertsConfig(router["experts"], **experts), MLPConfig(**shared) if shared else None,
        **more,
    )  # fmt: skip


def _dense(config: Any, index: int, first: int = 0, last: int | None = None, every: int = 0) -> bool:
    """Whether a layer's feed-forward part is no mixture, in a model that has one."""
    if index < first or (last is not None and index > last):
        return True
    skipped = getattr(config, "mlp_only_layers", None) or ()
    return index in skipped or bool((index + 1) % (every or getattr(config, "decoder_sparse_step", 1)))
