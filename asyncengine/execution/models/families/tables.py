"""Llama and the families that differ from it in fields alone, with experts or without: tables of dense.toml and
mixtures.toml, where they are described."""

from __future__ import annotations

import operator
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from importlib import resources
from typing import Any

from asyncengine.errors import ModelNotFound, UnsupportedModel
from asyncengine.execution.layers.basic import NormConfig
from asyncengine.execution.layers.experts import ExpertsConfig, Stacked
from asyncengine.execution.layers.mlp import MLPConfig, MoEConfig
from asyncengine.execution.layers.rotary import RotaryConfig
from asyncengine.execution.layers.routing import RouterConfig
from asyncengine.execution.models.config import ModelConfig, UnknownLayers, unknown_layers
from asyncengine.execution.models.decoder import DecoderConfig
from asyncengine.execution.models.decoder_layer import head_behind
from asyncengine.execution.models.families import common
from asyncengine.execution.models.families.common import layer_types_of, windows_of


def read_tables(*files: str) -> dict[str, Any]:
    """The tables of files of this folder, by model_type."""
    texts = [(resources.files(__package__) / file).read_text(encoding="utf-8") for file in files]
    return {family: table for text in texts for family, table in tomllib.loads(text).items()}


_TABLES = read_tables("dense.toml", "mixtures.toml")
_CHUNKED = ("full_attention", "chunked_attention")
KINDS: Mapping[str, Sequence[str]] = {"llama4_text": _CHUNKED}


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


_NAMED: Mapping[str, Callable[[Any], Any]] = {
    "each layer's window": windows_of,
    "where there is a window": lambda config: [None if window is None else 0 for window in windows_of(config)],
    "each layer's window, and its middle": lambda config: [window and window + 1 for window in windows_of(config)],
    "each layer's kind": lambda config: [_kinds(config).index(kind) for kind in layer_types_of(config)],
    "each layer's chunk": lambda config: [
        config.attention_chunk_size if kind == _CHUNKED[1] else None for kind in layer_types_of(config, _CHUNKED)
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
}

_EVERY: Mapping[str, tuple[str, int]] = {
    "gemma2": ("", 2), "gpt_oss": ("", 2), "olmo3": ("", 4), "gemma3_text": ("sliding_window_pattern", 6),
    "cohere2": ("sliding_window_pattern", 4),
}  # fmt: skip
"""The field, or else the number, of layers of which one attends to everything, where config.json lists no types."""


def complete(config: ModelConfig) -> None:
    family, slides = config.model_type, config.get("use_sliding_window")
    if family in ("qwen2", "qwen3", "qwen2_vl_text", "qwen2_5_vl_text"):
        config.sliding_window = config.sliding_window if slides else None
        common.slide_from(config)
    elif family == "dots1":
        common.slide_from(config)
    elif family == "qwen3_vl_moe_text" or (family == "qwen3_moe" and not slides):
        config.sliding_window = None
    elif family == "qwen2_moe":
        if not slides:
            config.sliding_window = 0
        if config.layer_types is None:
            first = config.get("max_window_layers", 28) if slides else 0
            layers = range(config.num_hidden_layers)
            config.layer_types = [common.KINDS[layer < first and not layer % 2] for layer in layers]
    elif family in _EVERY:
        common.alternate(config, config.get(*_EVERY[family]))
    elif family == "ministral" and config.layer_types is None:
        config.layer_types = [common.KINDS[config.sliding_window is not None]] * config.num_hidden_layers
    elif family in ("smollm3", "llama4_text"):
        _complete_unrotated(config)
    elif family == "gemma" and config.hidden_act == "gelu":
        config.hidden_act = "gelu_pytorch_tanh"  # older files say so and mean this
    elif family == "exaone4":
        common.alternate(config, 0 if config.sliding_window is None else config.get("sliding_window_pattern", 4))
    elif family == "opt":
        config.word_embed_proj_dim = config.get("word_embed_proj_dim", config.hidden_size)
    elif family in ("falcon", "bloom"):
        config.hidden_size = config.get("n_embed") or config.hidden_size
        if family == "falcon":
            config.num_kv_heads = config.get("num_kv_heads", config.num_attention_heads)
            config.ffn_hidden_size = config.get("ffn_hidden_size", 4 * config.hidden_size)
    elif family == "gpt_neo":
        spans = config.get("attention_types", [[["global", "local"], 12]])
        config.attention_layers = [kind for kinds, times in spans for _ in range(times) for kind in kinds]
    elif family == "minimax_m2" and config.get("rotary_dim") is not None:
        config.partial_rotary_factor = config.get("partial_rotary_factor", config.rotary_dim / config.head_dim)
    elif family == "ernie4_5_moe" and config.moe_layer_end_index == -1:
        config.moe_layer_end_index = config.num_hidden_layers - 1


def _complete_unrotated(config: ModelConfig) -> None:
    """Sets which layers of SmolLM 3 and Llama 4 rotate, and the layer types that follow from it."""
    layers, every = range(config.num_hidden_layers), config.get("no_rope_layer_interval", 4)
    usual = [int((layer + 1) % every != 0) for layer in layers]
    if config.model_type == "smollm3":
        config.no_rope_layers = config.get("no_rope_layers", usual)
        slides = config.get("use_sliding_window") and config.get("sliding_window") is not None
        kinds = [common.KINDS[bool(slides and not rotates)] for rotates in config.no_rope_layers]
    else:
        step = config.get("interleave_moe_layer_step", 1)
        config.no_rope_layers = config.get("no_rope_layers") or usual
        config.moe_layers = config.get("moe_layers", list(range(step - 1, len(layers), step)))
        chunks = config.attention_chunk_size is not None
        kinds = [_CHUNKED[bool(rotates and chunks)] for rotates in config.no_rope_layers]
    config.layer_types = kinds if config.layer_types is None else config.layer_types


def decoder_config(config: Any, length: int) -> DecoderConfig:
    """The decoder of a family with a table; of Granite 4 and `qwen_next`'s what they have beside layers with states."""
    family = config.model_type
    _check(config)
    parts = parts_of(_TABLES, config)
    mixture, where = _mixture(parts), parts.pop("sparse", {})
    sparse = None
    if mixture is not None:
        sparse = [None if _dense(config, index, **where) else mixture for index in range(config.num_hidden_layers)]
    made = decoder_of(config, length, parts, sparse=sparse)
    if family in ("glm4_moe", "glm4v_moe_text", "dots1"):
        made = replace(made, ignored=(*made.ignored, common.BEHIND_LAST.format(config.num_hidden_layers)))
    if family in ("glm4_moe", "glm4v_moe_text"):
        made = replace(made, mtp=head_behind(replace(made.layers[-1], mlp=mixture), config.num_hidden_layers))
    if family == "llama4_text":
        growth = (float(config.attn_scale), int(config.floor_scale)) if config.attn_temperature_tuning else None
        return replace(made, rotary=(*made.rotary, RotaryConfig((), query_growth=growth, growth_begins=1)))
    if family == "phimoe" and config.rope_parameters["rope_type"] != "default":
        # cosines are multiplied by one of two settings instead of what a scaling by length says itself
        beyond = length > config.rope_parameters["original_max_position_embeddings"]
        scaling = float(config.rope_parameters["long_mscale" if beyond else "short_mscale"])
        return replace(made, rotary=(replace(made.rotary[0], scaling=scaling),))
    return made


def _check(config: Any) -> None:
    """Raises `UnsupportedModel` for options of these families that are not written down."""
    family = config.model_type
    if family == "phimoe" and config.num_experts_per_tok != 2:
        raise UnsupportedModel(f"family 'phimoe' with {config.num_experts_per_tok} experts of a row is not known")
    if family == "olmoe" and config.clip_qkv is not None:
        raise UnsupportedModel("family 'olmoe' with clip_qkv is not written down")
    if family == "bloom" and config.apply_residual_connection_post_layernorm:
        raise UnknownLayers("family 'bloom' with apply_residual_connection_post_layernorm does not run here")
    if family == "falcon":
        if config.alibi:  # its biases are rounded to bfloat16, whatever the model's type
            raise UnknownLayers("family 'falcon' with alibi in place of rotation (Falcon RW) does not run here")
        grouped, parallel = config.new_decoder_architecture, config.parallel_attn
        norms = config.num_ln_in_parallel_attn or (2 if grouped else 1)
        if (grouped and not parallel) or (norms == 2 and parallel and not grouped):
            raise UnknownLayers(
                "family 'falcon' with num_ln_in_parallel_attn of another architecture does not run here"
            )
    if family == "mpt":
        others = {"alibi": True, "alibi_bias_max": 8, "prefix_lm": False, "qk_ln": False}
        for name, known in others.items():
            if (given := _field(config, f"attn_config.{name}", known)) != known:
                raise UnknownLayers(f"family 'mpt' with attn_config.{name} {given!r} does not run here")


def decoder_of(config: Any, length: int, parts: dict[str, Any], **changes: Any) -> DecoderConfig:
    """The decoder of parts that a family's table names. `changes`: further arguments of `common.llama_like`."""
    norm, rotary = parts.pop("norm", None), parts.pop("rotary", {})
    if isinstance(rotary, dict):
        rotations = _rotations(config, length, **rotary)
    else:
        rotations = (RotaryConfig((), style="alibi"),) if rotary == "alibi" else ()
    changes |= parts.pop("model", {})
    return common.llama_like(config, length, norm=norm and NormConfig(**norm), rotary=rotations, **parts, **changes)


def parts_of(tables: Mapping[str, Any], config: Any) -> dict[str, Any]:
    """The fields of each part that a family's table has, with their values in a model."""
    parts: dict[str, Any] = {}
    _read(tables, tables[config.model_type], config, parts)
    return parts


def _kinds(config: Any) -> list[str]:
    return sorted(set(layer_types_of(config)))


def _rotations(
    config: Any, length: int, by_kind: bool = False, exact: bool = False, **how: Any
) -> tuple[RotaryConfig, ...]:
    kinds: list[str | None] = [*_kinds(config)] if by_kind else [None]
    return tuple(replace(_rotary(config, length, layer_type=kind, **how), exact=exact) for kind in kinds)


def _rotary(config: Any, length: int, **how: Any) -> RotaryConfig:
    parameters = config.rope_parameters
    if config.model_type == "ministral3":
        growth = (float(parameters["llama_4_scaling_beta"]), int(parameters["original_max_position_embeddings"]))
        return replace(common.rotary_of(config, length, **how), query_growth=growth)
    if config.model_type == "hunyuan_v1_dense" and parameters["rope_type"] == "dynamic" and parameters.get("alpha"):
        # Hunyuan calls it dynamic, but the base is stretched by the same for all lengths
        dim = common.head_dim_of(config)
        return common.default_rotary(parameters["rope_theta"] * parameters["alpha"] ** (dim / (dim - 2)), dim)
    return common.rotary_of(config, length, **how)


def _read(tables: Mapping[str, Any], table: Mapping[str, Any], config: Any, parts: dict[str, Any]) -> None:
    """Put what a table says of a model into `parts`, over what stands there."""
    for part, given in table.items():
        if part == "like":
            _read(tables, tables[given], config, parts)
        elif part == "when":
            for condition, more in given.items():
                field, _, value = condition.partition("=")
                found = _field(config, field, None)
                if str(found) == value if value else found:
                    _read(tables, more, config, parts)
        elif isinstance(given, dict):
            parts[part] = (parts.get(part) or {}) | {name: _value(name, value, config) for name, value in given.items()}
        else:
            parts[part] = given


def _value(name: str, given: Any, config: Any) -> Any:
    """The value of a field of that name."""
    if isinstance(given, dict):
        return NormConfig(**{field: _value(field, value, config) for field, value in given.items()})
    if isinstance(given, list):
        return tuple(tuple(each) if isinstance(each, list) else each for each in given)
    if given in _NAMED:
        return _NAMED[given](config)
    if not isinstance(given, str) or not given.startswith("="):
        return None if given == "" else given
    field, _, power = given[1:].partition(" ** ")
    factors = field.split(" * ")
    found: Any = reduce(operator.mul, (int(each) if each.isdigit() else _field(config, each) for each in factors))
    if power:
        return 1.0 / found if power == "-1" else found ** float(power)  # a power of -1 may be rounded otherwise
    return common.activation(config, found) if name == "activation" else found


def _field(config: Any, path: str, *missing: Any) -> Any:
    """A field of config.json, or "one.another" within an object of it; `missing`: what it is if it is not there."""
    found = config
    for name in path.split("."):
        found = found.get(name, *missing) if isinstance(found, Mapping) else getattr(found, name, *missing)
    return found


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


def _dense(
    config: Any, index: int, first: int = 0, last: int | None = None, every: int = 0,
    layers: Sequence[int] | None = None,
) -> bool:  # fmt: skip
    """Whether a layer's feed-forward part is no mixture, in a model that has one."""
    if layers is not None:
        return index not in layers
    if index < first or (last is not None and index > last):
        return True
    skipped = getattr(config, "mlp_only_layers", None) or ()
    return index in skipped or bool((index + 1) % (every or getattr(config, "decoder_sparse_step", 1)))
