"""Values of fields that a family's tables name in words, worked out of config.json."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from asyncengine.errors import ModelNotFound
from asyncengine.execution.layers.basic import NormConfig
from asyncengine.execution.models.config import unknown_layers
from asyncengine.execution.models.families.common import attention_kinds, head_dim_of, layer_types_of, windows_of


def _scales(config: Any) -> list[float]:
    """GPT-2's factor of each layer's scores."""
    scale = (config.hidden_size // config.num_attention_heads) ** -0.5 if config.scale_attn_weights else 1.0
    by_layer = config.scale_attn_by_inverse_layer_idx
    return [scale / (index + 1) if by_layer else scale for index in range(config.num_hidden_layers)]


def _slopes(config: Any) -> tuple[float, ...]:
    """ALiBi's slope of each head: a geometric series, and for other than a power of two heads more from in between."""
    heads = config.num_attention_heads
    most = 2 ** (heads.bit_length() - 1)
    slopes = [2.0 ** (-8 * (index + 1) / most) for index in range(most)]
    return (*slopes, *(2.0 ** (-4 * (2 * index + 1) / most) for index in range(heads - most)))


def _neo_windows(config: Any) -> list[int | None]:
    """GPT-Neo's window of each layer."""
    kinds = ("global", "local")
    if len(config.attention_layers) != config.num_hidden_layers:
        raise ModelNotFound("config.json: attention_types do not describe num_layers layers")
    if unknown := [kind for kind in config.attention_layers if kind not in kinds]:
        raise unknown_layers("gpt_neo", unknown[0], kinds)
    return [config.window_size if kind == "local" else None for kind in config.attention_layers]


def _rotations_by_kind(config: Any) -> list[int | None]:
    """The rotary embedding of each layer that attends, where each kind of layers has its own."""
    known = {kind: index for index, kind in enumerate(attention_kinds(config))}
    return [known.get(kind) for kind in layer_types_of(config)]


def _head_scale(config: Any) -> float:
    """Factor of scores of heads that have numbers of their own and some that all heads share."""
    return float((config.qk_nope_head_dim + config.qk_rope_head_dim) ** -0.5)


def _yarn_scale(config: Any) -> float:
    """The same, times the factor by which YaRN's attention is as sharp over long contexts as over short ones."""
    parameters = config.rope_parameters
    every, factor = parameters.get("mscale_all_dim"), parameters.get("factor", 1.0)
    if parameters.get("rope_type", "default") == "default" or not every or factor <= 1:
        return _head_scale(config)
    return _head_scale(config) * float(0.1 * every * math.log(factor) + 1.0) ** 2


def _layers_with_experts(config: Any) -> Sequence[int]:
    """Layers of DeepSeek and its like that have experts."""
    layers, kinds = range(config.num_hidden_layers), getattr(config, "mlp_layer_types", None)
    return layers[config.first_k_dense_replace :] if kinds is None else [i for i in layers if kinds[i] == "sparse"]


def _lfm_width(config: Any) -> int:
    """Width between the two products of LFM2's feed-forward part."""
    width = int(config.intermediate_size)
    if not getattr(config, "block_auto_adjust_ff_dim", False):
        return width
    width = int(2 * width / 3)
    if config.block_ffn_dim_multiplier is None:
        return width
    multiple = int(config.block_multiple_of)
    return -(-int(config.block_ffn_dim_multiplier * width) // multiple) * multiple


def _falcon_scale(config: Any) -> float:
    """Falcon-H1's factor of scores, with those of attention's input and of its keys."""
    into = float(config.attention_in_multiplier)
    return float(head_dim_of(config) ** -0.5 * into**2 * float(config.key_multiplier))


def _falcon_factors(config: Any) -> tuple[float, ...] | None:
    """Falcon-H1's factors of a state's z, x, B, C and dt; None: all are 1."""
    z, x, b, c, dt = (float(each) * float(config.ssm_in_multiplier) for each in config.ssm_multipliers)
    return None if {z, x, b, c, dt} == {1.0} else (z, x, b, c, dt)


def _gemma_sources(config: Any) -> list[int | None]:
    """The layer whose keys and values each layer of Gemma 4 uses, the last of its type that has some; None: its own."""
    kinds = layer_types_of(config)
    own = len(kinds) - config.num_kv_shared_layers
    last = {kind: index for index, kind in enumerate(kinds[:own])}
    return [None if index < own else last[kind] for index, kind in enumerate(kinds)]


def _gemma_projections(config: Any) -> list[tuple[str, ...]]:
    """Matrices of queries, and of each layer's own keys and values, which may be the same."""
    names = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    alike = [config.attention_k_eq_v and kind != "sliding_attention" for kind in layer_types_of(config)]
    sources = zip(_gemma_sources(config), alike, strict=True)
    return [names[: 1 if source is not None else 2 if same else 3] for source, same in sources]


def _gemma_ignored(config: Any) -> tuple[str, ...]:
    """Tensors of keys and values of layers that use those of others."""
    layers = "|".join(str(index) for index, source in enumerate(_gemma_sources(config)) if source is not None)
    return (rf"(.*\.)?layers\.({layers})\.self_attn\.([kv]_proj|[kv]_norm)\..*",)


def _own(name: str) -> Callable[[Any], list[Any]]:
    """A field that each layer of Gemma 4 has for itself."""
    return lambda config: [getattr(config.per_layer_config[layer], name) for layer in range(config.num_hidden_layers)]


NAMED: Mapping[str, Callable[[Any], Any]] = {
    "each layer's window": windows_of,
    "where there is a window": lambda config: [None if window is None else 0 for window in windows_of(config)],
    "each layer's window, and its middle": lambda config: [window and window + 1 for window in windows_of(config)],
    "each layer's kind": _rotations_by_kind,
    "each layer's chunk": lambda config: [
        config.attention_chunk_size if kind == "chunked_attention" else None for kind in layer_types_of(config)
    ],
    "each layer's scale": _scales,
    "attention_layers": _neo_windows,
    "slopes": _slopes,
    "no_rope_layers": lambda config: [0 if rotates else None for rotates in config.no_rope_layers],
    "no_rope_layers, else growth": lambda config: [0 if rotates else 1 for rotates in config.no_rope_layers],
    "whether a layer rotates": lambda config: [bool(rotates) for rotates in config.no_rope_layers],
    "norms of rotating layers": lambda config: [
        NormConfig(epsilon=config.rms_norm_eps, weight=False) if rotates else None for rotates in config.no_rope_layers
    ],
    "scale of a head of two parts": _head_scale,
    "scale of a head of two parts, and YaRN's": _yarn_scale,
    "layers with experts": _layers_with_experts,
    "MiniCPM's factor of branches": lambda config: config.scale_depth / math.sqrt(config.num_hidden_layers),
    "MiniCPM's factor of logits": lambda config: config.dim_model_base / config.hidden_size,
    "LFM2's width": _lfm_width,
    "Falcon-H1's scale": _falcon_scale,
    "Falcon-H1's factors of a state's inputs": _falcon_factors,
    "each layer's heads of keys": _own("num_key_value_heads"),
    "each layer's size of heads": _own("head_dim"),
    "each layer's source of keys": _gemma_sources,
    "each layer's projections": _gemma_projections,
    "each layer's width": lambda config: [
        config.intermediate_size * (1 if source is None or not config.use_double_wide_mlp else 2)
        for source in _gemma_sources(config)
    ],
    "keys of layers that use those of others": _gemma_ignored,
}
