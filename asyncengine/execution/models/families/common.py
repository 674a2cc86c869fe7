"""Readers of rotary embeddings, windows, activations and layer types, which families share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

from asyncengine.errors import ModelNotFound, UnsupportedModel
from asyncengine.execution.layers.attention import AttentionConfig
from asyncengine.execution.layers.mlp import MLPConfig
from asyncengine.execution.layers.norm import NormConfig
from asyncengine.execution.layers.rotary import RotaryConfig
from asyncengine.execution.layers.sparse_mlp import MoEConfig
from asyncengine.execution.models.config import unknown_layers
from asyncengine.execution.models.decoder import DecoderConfig, LayerConfig
from asyncengine.execution.models.families.frequencies import SCALED, plain

_ACTIVATIONS = {
    "silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh", "gelu_accurate": "gelu_tanh", "relu": "relu", "relu2": "relu2",
}  # fmt: skip
_SECTIONS: Mapping[str, tuple[tuple[int, ...], bool]] = {
    **dict.fromkeys(("qwen2_vl_text", "qwen2_5_vl_text"), ((16, 24, 24), False)),
    **dict.fromkeys(("qwen3_vl_text", "qwen3_vl_moe_text"), ((24, 20, 20), True)),
    **dict.fromkeys(("qwen3_5_text", "qwen3_5_moe_text"), ((11, 11, 10), True)),
    **dict.fromkeys(("glm4v_text", "glm4v_moe_text"), ((8, 12, 12), False)),
}
"""model_type -> pairs of dimensions that turn by time, rows and columns (`mrope_section`, if it is not said), and
whether these take turns or lie one section behind the other."""
KINDS = ("full_attention", "sliding_attention")
"""Layer types, where a family's file has no `KINDS` of its own."""


def activation(config: Any, name: str | None = None) -> str:
    """The decoder's name of an activation. Raises `UnsupportedModel` for one it does not have."""
    known = name or config.hidden_act
    if known not in _ACTIVATIONS:
        raise UnsupportedModel(f"family {config.model_type!r} with activation {known!r} is not written down")
    return _ACTIVATIONS[known]


def head_dim_of(config: Any) -> int:
    """Dimensions of a head."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _axes_of(config: Any, pairs: int) -> tuple[int, ...]:
    """The axis of each of `pairs` of dimensions, where positions of pictures have three; () where they have one, or
    where the configuration's sections do not add up: then pictures cannot be read."""
    default, interleaved = _SECTIONS.get(config.model_type, ((), False))
    sections = tuple(config.rope_parameters.get("mrope_section") or default)
    if not default or len(sections) != 3:
        return ()
    if interleaved:
        return tuple(pair % 3 if pair < 3 * sections[pair % 3] else 0 for pair in range(pairs))
    axes = tuple(axis for axis, count in enumerate(sections) for _ in range(count))
    return axes if len(axes) == pairs else ()


def default_rotary(base: float, dim: int, style: Any = "halves") -> RotaryConfig:
    """The first `dim` dimensions of a head, without any scaling: as every family computes it, in float32."""
    return RotaryConfig(tuple(plain(base, dim).tolist()), 1.0, style)


def rotary_of(
    config: Any, length: int, layer_type: str | None = None, *, head_dim: int | None = None, style: Any = "halves",
    partial: bool = False,
) -> RotaryConfig:  # fmt: skip
    """The frequencies that `rope_parameters` say, for sequences of up to `length` tokens.

    `layer_type`: of a family that has other parameters for each kind of layer. `partial`: of one whose heads may be
    rotated in part (`partial_rotary_factor`); transformers' modules of the others do not look at that setting.
    """
    parameters = config.rope_parameters if layer_type is None else config.rope_parameters[layer_type]
    kind, whole = parameters.get("rope_type", "default"), head_dim or head_dim_of(config)
    if kind != "default" and kind not in SCALED:
        raise UnsupportedModel(f"family {config.model_type!r} with rope_type {kind!r} is not written down")
    in_part = kind != "proportional" and (partial or kind != "default")
    dim = int(whole * parameters.get("partial_rotary_factor", 1.0)) if in_part else whole
    if dim == whole and dim % 2:
        raise ModelNotFound(f"config.json: head_dim must be even where heads are rotated, got {dim}")
    axes = _axes_of(config, dim // 2) if config.model_type in _SECTIONS else ()
    if kind == "default":
        return replace(default_rotary(parameters["rope_theta"], dim, style), axes=axes)
    try:
        found, scaling = SCALED[kind](parameters, dim, config.max_position_embeddings, length)
    except KeyError as error:
        raise ModelNotFound(f"config.json: rope_parameters of type {kind!r} lack {error}") from None
    return RotaryConfig(tuple(found.tolist()), float(scaling), style, axes=axes)


def layer_types_of(config: Any, known: Sequence[str] = KINDS) -> list[str]:
    """One for each layer; all attend to everything where the configuration says nothing. Raises `UnknownLayers` for
    one that is not `known`."""
    kinds = list(getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers)
    if unknown := [kind for kind in kinds if kind not in known]:
        raise unknown_layers(config.model_type, unknown[0], known)
    return kinds


def alternate(config: Any, every: int, kind: str = "sliding_attention") -> None:
    """Set layer types that config.json does not list: `kind`, and attention to everything in one layer of `every`."""
    if config.layer_types is None:
        layers = range(config.num_hidden_layers)
        config.layer_types = [kind if (layer + 1) % every else "full_attention" for layer in layers]


def slide_from(config: Any) -> None:
    """Set layer types that config.json does not list: windows from layer `max_window_layers` on, if there are any."""
    if config.layer_types is None:
        first = config.num_hidden_layers if config.sliding_window is None else config.max_window_layers
        config.layer_types = [KINDS[layer >= first] for layer in range(config.num_hidden_layers)]


def windows_of(config: Any) -> list[int | None]:
    """The sliding window of each layer."""
    return [config.sliding_window if kind == "sliding_attention" else None for kind in layer_types_of(config)]


class Inside(NamedTuple):
    """Names under which a language model lies in a model that reads images or sounds as well, in transformers today."""

    base: str = "model.language_model."
    """In place of "model."."""
    head: str = "lm_head"


def inside_of(made: DecoderConfig, inside: Inside, config: Any) -> DecoderConfig:
    """The decoder `made` of the text's own configuration with the names that it has in there.

    `config` is that of the whole: it may say that the output layer is the embedding where the text's does not.
    """

    def named(name: str) -> str:
        return name.replace("model.", inside.base, 1)

    inputs = made.layer_inputs
    if inputs is not None:
        inputs = replace(
            inputs, table=named(inputs.table), projection=named(inputs.projection), norm=named(inputs.norm)
        )
    return replace(
        made,
        embedding=named(made.embedding),
        layer=named(made.layer),
        final_norm=None if made.final_norm is None else named(made.final_norm),
        head=inside.head,
        layer_inputs=inputs,
        tied=made.tied or bool(getattr(config, "tie_word_embeddings", False)),
    )


def llama_like(
    config: Any, length: int, *, attention: Mapping[str, Any] = MappingProxyType({}),
    mlp: Mapping[str, Any] = MappingProxyType({}), sparse: MoEConfig | Sequence[MoEConfig | None] | None = None,
    layer: Mapping[str, Any] = MappingProxyType({}), norm: NormConfig | None = None, **changes: Any,
) -> DecoderConfig:  # fmt: skip
    """The decoder of a family that differs from Llama in the given fields of `AttentionConfig`, `MLPConfig`,
    `LayerConfig` and `DecoderConfig`. `sparse`: the mixture of experts in place of feed-forward parts. A list, here or
    among the fields of attention, has one value for each layer."""
    dim, heads = head_dim_of(config), config.num_attention_heads
    fields = {"num_heads": heads, "num_kv_heads": config.num_key_value_heads or heads, "head_dim": dim}
    fields |= {"scale": dim**-0.5, **attention}

    def one(index: int) -> LayerConfig:
        own = {name: value[index] if isinstance(value, list) else value for name, value in fields.items()}
        mixture = sparse[index] if isinstance(sparse, Sequence) else sparse
        if mixture is None:
            act = mlp.get("activation") or activation(config)
            inner = MLPConfig(**{"width": config.intermediate_size, **mlp, "activation": act})
            return LayerConfig(AttentionConfig(**own), inner, **layer)
        return LayerConfig(AttentionConfig(**own), mixture, **layer)

    if "rotary" not in changes:
        changes["rotary"] = (rotary_of(config, length),)
    return DecoderConfig(
        **{
            "vocab_size": config.vocab_size,
            "width": config.hidden_size,
            "layers": tuple(one(index) for index in range(config.num_hidden_layers)),
            "norm": norm or NormConfig(epsilon=config.rms_norm_eps),
            "tied": bool(getattr(config, "tie_word_embeddings", False)),
            "ignored": (r"(.*\.)?rotary_emb\.inv_freq",),
            **changes,
        }
    )
