"""Decoder configurations from the tables of dense.toml (which describes their format), mixtures.toml, latent.toml and
states.toml."""

from __future__ import annotations

import operator
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, reduce
from importlib import import_module, resources
from typing import Any

from asyncengine.errors import UnsupportedModel
from asyncengine.execution.layers.attention import AttentionConfig
from asyncengine.execution.layers.basic import LayerInputConfig, NormConfig
from asyncengine.execution.layers.experts import ExpertsConfig, Stacked
from asyncengine.execution.layers.latent_attention import LatentAttentionConfig
from asyncengine.execution.layers.mlp import LatentExpertsConfig, MLPConfig, MoEConfig, SideExpertsConfig
from asyncengine.execution.layers.rotary import RotaryConfig
from asyncengine.execution.layers.routing import RouterConfig
from asyncengine.execution.models.config import UnknownLayers, unknown_layers
from asyncengine.execution.models.decoder import DecoderConfig, LayerConfig
from asyncengine.execution.models.decoder_layer import MTPConfig, head_layers
from asyncengine.execution.models.families import common
from asyncengine.execution.models.families.values import NAMED


def read_tables(file: str) -> dict[str, Any]:
    """The tables of a file of this folder, by model_type."""
    return tomllib.loads((resources.files(__package__) / file).read_text(encoding="utf-8"))


_FILES = {file: read_tables(file) for file in ("dense.toml", "mixtures.toml", "latent.toml", "states.toml")}
_TABLES = {family: table for tables in _FILES.values() for family, table in tables.items()}
NATIVE: Mapping[str, str] = {
    family: file for file, tables in _FILES.items() for family in tables if not family.startswith("_")
}
"""model_type -> the file in this folder with its table."""
_CLASSES: Mapping[str, Callable[..., Any]] = {
    "latent": LatentExpertsConfig, "layer_inputs": LayerInputConfig, "side": SideExpertsConfig,
    "router": RouterConfig, "experts": ExpertsConfig,
}  # fmt: skip
"""Configuration class of each field whose value is a table; every other such field is a norm."""
_ACTIVATIONS: Mapping[str, str] = read_tables("decoders.toml")["activations"]
_ADDED = ("refused", "unknown", "layers")
"""Sections that a table appends to those of the tables that it is `like`, instead of replacing them."""


def known_layer_types(family: str) -> Sequence[str] | None:
    """The layer types that a family may have; None if it has no table here."""
    return _declared_layer_types(family) or common.ATTENTION if family in NATIVE else None


def _declared_layer_types(name: str) -> Sequence[str]:
    table = _TABLES[name]
    return table.get("layer_types") or next(filter(None, map(_declared_layer_types, table.get("like", ()))), ())


def decoder_config(config: Any, length: int) -> DecoderConfig:
    """The decoder of a family with a table, for sequences of up to `length` tokens. `config`: a `ModelConfig`, or
    transformers' config object. Raises `UnsupportedModel` for an option that the table lacks (the model then runs
    through transformers), and `UnknownLayers` for one that transformers cannot run here either."""
    return decoder_of(config, length, sections_of(_TABLES, config))


def decoder_of(config: Any, length: int, sections: dict[str, Any], **changes: Any) -> DecoderConfig:
    """The decoder that `sections` (of `sections_of`) describe. `changes`: further fields of `DecoderConfig`."""
    types = _checked_layer_types(config, sections)
    outer = {name: sections.pop(name, None) for name in ("norm", "rotary", "mtp", "model")}
    norm, rotary, mtp, model = (values_of(given, config) for given in outer.values())
    overrides, by_type = sections.pop("layers", ()), {}
    for layer_type in dict.fromkeys(types):
        by_type[layer_type] = dict(sections)
        for override in overrides:
            _read(_TABLES, override.get(layer_type, {}), config, by_type[layer_type])
    make_layer = {layer_type: _layer_maker(config, fields) for layer_type, fields in by_type.items()}
    if mtp:
        head = head_layers((_layer_maker(config, sections)(config.num_hidden_layers - 1, True),))
        changes["mtp"] = MTPConfig(head, **mtp)
    changes |= model or {}
    path = changes.pop("path", "model.layers.{}.")
    layers = [(path.format(index), types[index]) for index in range(config.num_hidden_layers)]
    return DecoderConfig(
        **{
            "vocab_size": config.vocab_size,
            "width": config.hidden_size,
            "layers": tuple(make_layer[layer_type](index) for index, (_, layer_type) in enumerate(layers)),
            "norm": NormConfig(**norm) if norm else NormConfig(epsilon=config.rms_norm_eps),
            "rotary": _rotations(config, length, {} if rotary is None else rotary),
            "layer": path,
            "tied": bool(getattr(config, "tie_word_embeddings", False)),
            "aliases": tuple(
                (layer + name, layer + override)
                for layer, layer_type in layers
                for name, override in by_type[layer_type].get("aliases", ())
            ),
            "ignored": (common.FREQUENCIES,),
            **changes,
        }
    )


def _checked_layer_types(config: Any, sections: dict[str, Any]) -> list[str]:
    """The type of each layer. Raises `UnsupportedModel` or `UnknownLayers` for a layer type, or an option of the
    family, that the table does not cover."""
    family, types = config.model_type, common.layer_types_of(config)
    known = sections.pop("layer_types", common.ATTENTION)
    for condition in sections.pop("refused", ()):
        if shown := _shown(condition, config):
            raise UnsupportedModel(f"family {family!r} with {shown} is not written down")
    for condition in sections.pop("unknown", ()):
        if shown := _shown(condition, config):
            raise UnknownLayers(f"family {family!r} with {shown} does not run here")
    if unknown := [name for name in types if name not in known]:
        raise unknown_layers(family, unknown[0], known)
    return types


def _layer_maker(config: Any, sections: dict[str, Any]) -> Callable[..., LayerConfig]:
    """A function (layer index, whether the layer has experts; None: as the table says) -> its `LayerConfig`. Lists
    among the fields of attention and of the MLP hold one value for each layer."""
    sections = {name: values_of(given, config) for name, given in sections.items()}
    mixture, sparse_layers, layer = _mixture(sections), sections.get("sparse", {}), sections.get("layer", {})
    latent, attention, mlp = (sections.get(name, {}) for name in ("latent", "attention", "mlp"))
    state = dict(sections.get("state", {}))
    module, _, name = state.pop("type", "").partition(".")
    if state:
        layer = layer | {"state": getattr(import_module(f"asyncengine.execution.layers.{module}"), name)(**state)}
    if latent:
        attention, layer = None, layer | {"attention": LatentAttentionConfig(**latent)}
    elif attention is not False:
        dim, heads = attention.get("head_dim") or common.head_dim_of(config), config.num_attention_heads
        keys = attention.get("num_kv_heads") or config.num_key_value_heads or heads
        attention = {"num_heads": heads, "head_dim": dim, **attention, "num_kv_heads": keys}
        if "scale" not in attention:
            attention["scale"] = dim**-0.5

    @cache
    def dense() -> Mapping[str, Any]:
        act = mlp.get("activation") or _activation(config)
        return {**mlp, "width": mlp.get("width") or config.intermediate_size, "activation": act}

    def make(index: int, sparse: bool | None = None) -> LayerConfig:
        def of_layer(fields: Mapping[str, Any]) -> dict[str, Any]:
            return {name: value[index] if isinstance(value, list) else value for name, value in fields.items()}

        mlp_config: MLPConfig | MoEConfig | None = None
        if mixture is not None and (sparse or not _dense(config, index, **sparse_layers)):
            mlp_config = mixture
        elif mlp is not False:
            mlp_config = MLPConfig(**of_layer(dense()))
        return LayerConfig(
            **{"attention": AttentionConfig(**of_layer(attention)) if attention else None, "mlp": mlp_config, **layer}
        )

    return make


def sections_of(tables: Mapping[str, Any], config: Any) -> dict[str, Any]:
    """The sections of a family's table over those of the tables that it is `like`: {section: fields as written}."""
    sections: dict[str, Any] = {}
    _read(tables, tables[config.model_type], config, sections)
    return sections


def _rotations(config: Any, length: int, table: Any) -> tuple[RotaryConfig, ...]:
    """The rotary embeddings that a table asks for: one, or one for each layer type (`by_layer_type`)."""
    if not isinstance(table, dict):
        return (RotaryConfig((), style="alibi"),) if table == "alibi" else ()
    kwargs = dict(table)
    types: Sequence[str | None] = common.attention_types(config) if kwargs.pop("by_layer_type", False) else [None]
    unrotated = kwargs.pop("unrotated_growth", None)
    fixed = {"exact": kwargs.pop("exact", False), "query_growth": _growth(kwargs.pop("query_growth", ()))}
    ropes = tuple(replace(_rotary(config, length, layer_type=name, **kwargs), **fixed) for name in types)
    # for layers that rotate nothing, and scale their queries at most (Llama 4)
    return ropes if unrotated is None else (*ropes, RotaryConfig((), query_growth=_growth(unrotated), growth_begins=1))


def _growth(values: Sequence[float]) -> tuple[float, int] | None:
    return (float(values[0]), int(values[1])) if values else None


def _rotary(config: Any, length: int, scalings: Sequence[float] = (), **kwargs: Any) -> RotaryConfig:
    """`scalings`: what cosines are multiplied by, up to the original positions and beyond, instead of what a scaling by
    length says itself (PhiMoE)."""
    parameters, family = config.rope_parameters, config.model_type
    if family == "gemma4_text":
        kwargs["head_dim"] = config.per_layer_config[kwargs["layer_type"]].head_dim
    if family == "hunyuan_v1_dense" and parameters["rope_type"] == "dynamic" and parameters.get("alpha"):
        # Hunyuan calls it dynamic, but the base is stretched by the same for all lengths
        dim = common.head_dim_of(config)
        return common.default_rotary(parameters["rope_theta"] * parameters["alpha"] ** (dim / (dim - 2)), dim)
    rotary = common.rotary_of(config, length, **kwargs)
    if not scalings:
        return rotary
    return replace(rotary, scaling=float(scalings[length > parameters["original_max_position_embeddings"]]))


def _read(tables: Mapping[str, Any], table: Mapping[str, Any], config: Any, sections: dict[str, Any]) -> None:
    """Merge a table into `sections`; its fields replace those already there. Conditions are evaluated on `config`."""
    for section, fields in table.items():
        if section == "like":
            for name in fields:
                _read(tables, tables[name], config, sections)
        elif section == "when":
            for condition, more in fields.items():
                if _shown(condition, config):
                    _read(tables, more, config, sections)
        elif section in _ADDED:
            sections[section] = [*sections.get(section, ()), *(fields if isinstance(fields, list) else [fields])]
        elif isinstance(fields, dict):
            sections[section] = (sections.get(section) or {}) | fields
        else:
            sections[section] = fields


def _shown(condition: str, config: Any) -> str:
    """The fields of a condition with their values, such as "clip_qkv=5.0"; "": it does not hold.

    A condition is "field" (is true), "field!" (is false), "field=value" or "field!=value", with "|" between values, or
    several with " and " between them. A field that is missing fulfils none.
    """
    shown = []
    for term in condition.split(" and "):
        path, sign, values = term.partition("=")
        field = path.rstrip("!")
        value = _field(config, field, ...)
        holds = str(value) in values.split("|") if sign else bool(value)
        if value is ... or holds == path.endswith("!"):
            return ""
        shown.append(f"{field}={value!r}")
    return " and ".join(shown)


def values_of(fields: Any, config: Any) -> Any:
    """A section with the expressions among its fields replaced by their values for one model."""
    return {name: _value(name, value, config) for name, value in fields.items()} if isinstance(fields, dict) else fields


def _value(name: str, given: Any, config: Any) -> Any:
    """The value of the field `name`, which a table gives as `given`."""
    if isinstance(given, dict):
        config_class: Callable[..., Any] = _CLASSES.get(name, NormConfig)
        return config_class(**{field: _value(field, value, config) for field, value in given.items()})
    if isinstance(given, list):
        values = tuple(_value("", each, config) for each in given)
        return Stacked(*values) if name == "stacked" else values
    if given in NAMED:
        return NAMED[given](config)
    if not isinstance(given, str):
        return given
    if not given.startswith("="):
        return given.replace("{layers}", str(config.num_hidden_layers)) or None
    field, _, power = given[1:].partition(" ** ")
    factors = field.split(" * ")
    product: Any = reduce(operator.mul, (int(each) if each.isdigit() else _field(config, each) for each in factors))
    if isinstance(product, (list, tuple)):
        return tuple(each ** float(power) if power else each for each in product)
    if power:
        return 1.0 / product if power == "-1" else product ** float(power)  # a power of -1 may be rounded otherwise
    return _activation(config, product) if name == "activation" else product


def _field(config: Any, path: str, *missing: Any) -> Any:
    """The field of config.json at a dotted path: "a.b" within an object, "a.1" within a list. `missing`: the value of a
    field that is not there; without it, such a field raises."""
    value = config
    for name in path.split("."):
        if isinstance(value, (list, tuple)):
            value = value[int(name)]
        else:
            value = value.get(name, *missing) if isinstance(value, Mapping) else getattr(value, name, *missing)
    return value


def _activation(config: Any, name: str | None = None) -> str:
    """The decoder's name of an activation. Raises `UnsupportedModel` for one it does not have."""
    activation = name or config.hidden_act
    if activation not in _ACTIVATIONS:
        raise UnsupportedModel(f"family {config.model_type!r} with activation {activation!r} is not written down")
    return _ACTIVATIONS[activation]


def _mixture(sections: dict[str, Any]) -> MoEConfig | None:
    """The mixture of experts that the sections describe; None if the model has no experts."""
    router, experts, shared, more = (sections.get(name, {}) for name in ("router", "experts", "shared", "mixture"))
    if not router.get("experts"):
        return None
    return MoEConfig(
        RouterConfig(**router), ExpertsConfig(router["experts"], **experts), MLPConfig(**shared) if shared else None,
        **more,
    )  # fmt: skip


def _dense(
    config: Any, index: int, first: int = 0, last: int | None = None, every: int = 0,
    layers: Sequence[int] | None = None,
) -> bool:  # fmt: skip
    """Whether a layer of a mixture-of-experts model has a dense MLP. `first`, `last`: layers that may have experts;
    `every`: step from one such layer to the next; `layers`: exactly these have experts."""
    if layers is not None:
        return index not in layers
    if index < first or (last is not None and index > last):
        return True
    skipped = getattr(config, "mlp_only_layers", None) or ()
    return index in skipped or bool((index + 1) % (every or getattr(config, "decoder_sparse_step", 1)))
