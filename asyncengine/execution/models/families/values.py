"""Values that a family's tables name in words: functions that compute them from config.json."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from asyncengine.errors import ModelNotFound
from asyncengine.execution.layers.basic import NormConfig
from asyncengine.execution.models.config import unknown_layers
from asyncengine.execution.models.families.common import attention_types, head_dim_of, layer_types_of, windows_of


def _scales(config: Any) -> list[float]:
    """GPT-2's attention scale of each layer."""
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
    known = ("global", "local")
    if len(config.attention_layers) != config.num_hidden_layers:
        raise ModelNotFound("config.json: attention_types do not describe num_layers layers")
    if unknown := [attention_type for attention_type in config.attention_layers if attention_type not in known]:
        raise unknown_layers("gpt_neo", unknown[0], known)
    return [config.window_size if attention_type == "local" else None for attention_type in config.attention_layers]


def _rotations_by_layer_type(config: Any) -> list[int | None]:
    """Index of each layer's rotary embedding where each layer type has its own; None for layers without attention."""
    rotaries = {layer_type: index for index, layer_type in enumerate(attention_types(config))}
    return [rotaries.get(layer_type) for layer_type in layer_types_of(config)]


def _head_scale(config: Any) -> float:
    """Attention scale of latent attention: a head's key is its own (`nope`) part and the rotated part shared by all."""
    return float((config.qk_nope_head_dim + config.qk_rope_head_dim) ** -0.5)


def _yarn_scale(config: Any) -> float:
    """`_head_scale` times the square of YaRN's correction, which keeps attention sharp over long contexts."""
    parameters = config.rope_parameters
    every, factor = parameters.get("mscale_all_dim"), parameters.get("factor", 1.0)
    if parameters.get("rope_type", "default") == "default" or not every or factor <= 1:
        return _head_scale(config)
    return _head_scale(config) * float(0.1 * every * math.log(factor) + 1.0) ** 2


def _layers_with_experts(config: Any) -> Sequence[int]:
    """Layers with experts in DeepSeek's family of models."""
    layers, types = range(config.num_hidden_layers), getattr(config, "mlp_layer_types", None)
    return layers[config.first_k_dense_replace :] if types is None else [i for i in layers if types[i] == "sparse"]


def _lfm_width(config: Any) -> int:
    """Inner width of LFM2's MLP."""
    width = int(config.intermediate_size)
    if not getattr(config, "block_auto_adjust_ff_dim", False):
        return width
    width = int(2 * width / 3)
    if config.block_ffn_dim_multiplier is None:
        return width
    multiple = int(config.block_multiple_of)
    return -(-int(config.block_ffn_dim_multiplier * width) // multiple) * multiple


def _falcon_scale(config: Any) -> float:
    """Falcon-H1's attention scale, which includes its multipliers of attention's input and of the keys."""
    into = float(config.attention_in_multiplier)
    return float(head_dim_of(config) ** -0.5 * into**2 * float(config.key_multiplier))


def _falcon_factors(config: Any) -> tuple[float, ...] | None:
    """Falcon-H1's multipliers of a Mamba layer's z, x, B, C and dt; None if all are 1."""
    z, x, b, c, dt = (float(each) * float(config.ssm_in_multiplier) for each in config.ssm_multipliers)
    return None if {z, x, b, c, dt} == {1.0} else (z, x, b, c, dt)


def _gemma_sources(config: Any) -> list[int | None]:
    """The layer whose KV cache each layer of Gemma 4 reads: the last one of its type that writes any; None: its own."""
    layer_types = layer_types_of(config)
    first_shared = len(layer_types) - config.num_kv_shared_layers
    last = {layer_type: index for index, layer_type in enumerate(layer_types[:first_shared])}
    return [None if index < first_shared else last[layer_type] for index, layer_type in enumerate(layer_types)]


def _gemma_projections(config: Any) -> list[tuple[str, ...]]:
    """Projections of each layer of Gemma 4: queries alone if it shares a KV cache, no values if keys are values."""
    names = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    alike = [config.attention_k_eq_v and layer_type != "sliding_attention" for layer_type in layer_types_of(config)]
    sources = zip(_gemma_sources(config), alike, strict=True)
    return [names[: 1 if source is not None else 2 if same else 3] for source, same in sources]


def _gemma_ignored(config: Any) -> tuple[str, ...]:
    """Key and value tensors that checkpoints have for layers that share another layer's KV cache: none is read."""
    layers = "|".join(str(index) for index, source in enumerate(_gemma_sources(config)) if source is not None)
    return (rf"(.*\.)?layers\.({layers})\.self_attn\.([kv]_proj|[kv]_norm)\..*",)


def _own(name: str) -> Callable[[Any], list[Any]]:
    """A function that reads the field `name` of each layer of Gemma 4."""
    return lambda config: [getattr(config.per_layer_config[layer], name) for layer in range(config.num_hidden_layers)]


NAMED: Mapping[str, Callable[[Any], Any]] = {
    "each layer's window": windows_of,
    "where there is a window": lambda config: [None if window is None else 0 for window in windows_of(config)],
    "each layer's window, and its middle": lambda config: [window and window + 1 for window in windows_of(config)],
    "each layer's rotation": _rotations_by_layer_type,
    "each layer's chunk": lambda config: [
        config.attention_chunk_size if name == "chunked_attention" else None for name in layer_types_of(config)
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
