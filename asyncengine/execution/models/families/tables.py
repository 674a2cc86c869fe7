"""Decoders that are written down: tables of dense.toml, mixtures.toml, latent.toml and states.toml, where they are
described."""

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
"""Classes of fields by their names, where these are tables; all others are norms."""
_ACTIVATIONS = {
    "silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh", "gelu_accurate": "gelu_tanh", "relu": "relu", "relu2": "relu2",
}  # fmt: skip
_ADDED = ("refused", "unknown", "layers")
"""Parts that a table adds to those of a table beneath it."""


def layer_kinds(family: str) -> Sequence[str] | None:
    """The layer types that a family has; None: it is not written down here."""
    return _known_kinds(family) or common.KINDS if family in NATIVE else None


def _known_kinds(name: str) -> Sequence[str]:
    table = _TABLES[name]
    return table.get("kinds") or next(filter(None, map(_known_kinds, table.get("like", ()))), ())


def decoder_config(config: Any, length: int) -> DecoderConfig:
    """The decoder of a family with a table, for sequences of up to `length` tokens. `config`: a `ModelConfig`, or
    transformers' config object. Raises `UnsupportedModel` for an option of the family that is not written down: such a
    model runs through transformers; and `UnknownLayers` for one that runs nowhere."""
    return decoder_of(config, length, parts_of(_TABLES, config))


def decoder_of(config: Any, length: int, parts: dict[str, Any], **changes: Any) -> DecoderConfig:
    """The decoder of parts that a family's table names. `changes`: further fields of `DecoderConfig`."""
    kinds = _checked_kinds(config, parts)
    whole = {name: parts.pop(name, None) for name in ("norm", "rotary", "mtp", "model")}
    norm, rotary, mtp, model = (values_of(given, config) for given in whole.values())
    others, by_kind = parts.pop("layers", ()), {}
    for kind in dict.fromkeys(kinds):
        by_kind[kind] = dict(parts)
        for other in others:
            _read(_TABLES, other.get(kind, {}), config, by_kind[kind])
    one = {kind: _layer_maker(config, own) for kind, own in by_kind.items()}
    if mtp:
        head = head_layers((_layer_maker(config, parts)(config.num_hidden_layers - 1, True),))
        changes["mtp"] = MTPConfig(head, **mtp)
    changes |= model or {}
    path = changes.pop("path", "model.layers.{}.")
    layers = [(path.format(index), kinds[index]) for index in range(config.num_hidden_layers)]
    return DecoderConfig(
        **{
            "vocab_size": config.vocab_size,
            "width": config.hidden_size,
            "layers": tuple(one[kind](index) for index, (_, kind) in enumerate(layers)),
            "norm": NormConfig(**norm) if norm else NormConfig(epsilon=config.rms_norm_eps),
            "rotary": _rotations(config, length, {} if rotary is None else rotary),
            "layer": path,
            "tied": bool(getattr(config, "tie_word_embeddings", False)),
            "aliases": tuple(
                (layer + name, layer + other)
                for layer, kind in layers
                for name, other in by_kind[kind].get("aliases", ())
            ),
            "ignored": (common.FREQUENCIES,),
            **changes,
        }
    )


def _checked_kinds(config: Any, parts: dict[str, Any]) -> list[str]:
    """The type of each layer. Raises `UnsupportedModel` or `UnknownLayers` for one, or an option of the family, that is
    not written down."""
    family, known, kinds = config.model_type, parts.pop("kinds", common.KINDS), common.layer_types_of(config)
    for condition in parts.pop("refused", ()):
        if shown := _shown(condition, config):
            raise UnsupportedModel(f"family {family!r} with {shown} is not written down")
    for condition in parts.pop("unknown", ()):
        if shown := _shown(condition, config):
            raise UnknownLayers(f"family {family!r} with {shown} does not run here")
    if unknown := [kind for kind in kinds if kind not in known]:
        raise unknown_layers(family, unknown[0], known)
    return kinds


def _layer_maker(config: Any, parts: dict[str, Any]) -> Callable[..., LayerConfig]:
    """A function (index, whether it has experts; None: as the table says) -> a layer of these parts. A list among the
    fields of attention and of the feed-forward part has one value for each layer."""
    parts = {name: values_of(given, config) for name, given in parts.items()}
    mixture, where, layer = _mixture(parts), parts.get("sparse", {}), parts.get("layer", {})
    latent, attention, mlp = (parts.get(name, {}) for name in ("latent", "attention", "mlp"))
    state = dict(parts.get("state", {}))
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

    def one(index: int, sparse: bool | None = None) -> LayerConfig:
        def own(fields: Mapping[str, Any]) -> dict[str, Any]:
            return {name: value[index] if isinstance(value, list) else value for name, value in fields.items()}

        inner: MLPConfig | MoEConfig | None = None
        if mixture is not None and (sparse or not _dense(config, index, **where)):
            inner = mixture
        elif mlp is not False:
            inner = MLPConfig(**own(dense()))
        return LayerConfig(
            **{"attention": AttentionConfig(**own(attention)) if attention else None, "mlp": inner, **layer}
        )

    return one


def parts_of(tables: Mapping[str, Any], config: Any) -> dict[str, Any]:
    """The fields of each part that the tables of a family have, as they are written there."""
    parts: dict[str, Any] = {}
    _read(tables, tables[config.model_type], config, parts)
    return parts


def _rotations(config: Any, length: int, table: Any) -> tuple[RotaryConfig, ...]:
    """The rotary embeddings that a table asks for: one, or by each kind of layers its own."""
    if not isinstance(table, dict):
        return (RotaryConfig((), style="alibi"),) if table == "alibi" else ()
    how = dict(table)
    kinds: Sequence[str | None] = common.attention_kinds(config) if how.pop("by_kind", False) else [None]
    unrotated = how.pop("unrotated_growth", None)
    fixed = {"exact": how.pop("exact", False), "query_growth": _growth(how.pop("query_growth", ()))}
    made = tuple(replace(_rotary(config, length, layer_type=kind, **how), **fixed) for kind in kinds)
    # for layers that rotate nothing, and scale their queries at most (Llama 4)
    return made if unrotated is None else (*made, RotaryConfig((), query_growth=_growth(unrotated), growth_begins=1))


def _growth(given: Sequence[float]) -> tuple[float, int] | None:
    return (float(given[0]), int(given[1])) if given else None


def _rotary(config: Any, length: int, scalings: Sequence[float] = (), **how: Any) -> RotaryConfig:
    """`scalings`: what cosines are multiplied by, up to the original positions and beyond, instead of what a scaling by
    length says itself (PhiMoE)."""
    parameters, family = config.rope_parameters, config.model_type
    if family == "gemma4_text":
        how["head_dim"] = config.per_layer_config[how["layer_type"]].head_dim
    if family == "hunyuan_v1_dense" and parameters["rope_type"] == "dynamic" and parameters.get("alpha"):
        # Hunyuan calls it dynamic, but the base is stretched by the same for all lengths
        dim = common.head_dim_of(config)
        return common.default_rotary(parameters["rope_theta"] * parameters["alpha"] ** (dim / (dim - 2)), dim)
    made = common.rotary_of(config, length, **how)
    if not scalings:
        return made
    return replace(made, scaling=float(scalings[length > parameters["original_max_position_embeddings"]]))


def _read(tables: Mapping[str, Any], table: Mapping[str, Any], config: Any, parts: dict[str, Any]) -> None:
    """Put what a table says into `parts`, over what stands there. Fields of `config` are looked at for conditions."""
    for part, given in table.items():
        if part == "like":
            for name in given:
                _read(tables, tables[name], config, parts)
        elif part == "when":
            for condition, more in given.items():
                if _shown(condition, config):
                    _read(tables, more, config, parts)
        elif part in _ADDED:
            parts[part] = [*parts.get(part, ()), *(given if isinstance(given, list) else [given])]
        elif isinstance(given, dict):
            parts[part] = (parts.get(part) or {}) | given
        else:
            parts[part] = given


def _shown(condition: str, config: Any) -> str:
    """The fields of a condition with their values, such as "clip_qkv=5.0"; "": it does not hold.

    A condition is "field" (is true), "field!" (is false), "field=value" or "field!=value", with "|" between values, or
    several with " and " between them. A field that is missing fulfils none.
    """
    shown = []
    for each in condition.split(" and "):
        path, sign, values = each.partition("=")
        field = path.rstrip("!")
        found = _field(config, field, ...)
        holds = str(found) in values.split("|") if sign else bool(found)
        if found is ... or holds == path.endswith("!"):
            return ""
        shown.append(f"{field}={found!r}")
    return " and ".join(shown)


def values_of(part: Any, config: Any) -> Any:
    """The fields of a part with their values in a model."""
    return {name: _value(name, given, config) for name, given in part.items()} if isinstance(part, dict) else part


def _value(name: str, given: Any, config: Any) -> Any:
    """The value of a field of that name."""
    if isinstance(given, dict):
        made: Callable[..., Any] = _CLASSES.get(name, NormConfig)
        return made(**{field: _value(field, value, config) for field, value in given.items()})
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
    found: Any = reduce(operator.mul, (int(each) if each.isdigit() else _field(config, each) for each in factors))
    if isinstance(found, (list, tuple)):
        return tuple(each ** float(power) if power else each for each in found)
    if power:
        return 1.0 / found if power == "-1" else found ** float(power)  # a power of -1 may be rounded otherwise
    return _activation(config, found) if name == "activation" else found


def _field(config: Any, path: str, *missing: Any) -> Any:
    """A field of config.json, or "one.another" within an object or "one.1" of a list of it; `missing`: what it is if it
    is not there."""
    found = config
    for name in path.split("."):
        if isinstance(found, (list, tuple)):
            found = found[int(name)]
        else:
            found = found.get(name, *missing) if isinstance(found, Mapping) else getattr(found, name, *missing)
    return found


def _activation(config: Any, name: str | None = None) -> str:
    """The decoder's name of an activation. Raises `UnsupportedModel` for one it does not have."""
    known = name or config.hidden_act
    if known not in _ACTIVATIONS:
        raise UnsupportedModel(f"family {config.model_type!r} with activation {known!r} is not written down")
    return _ACTIVATIONS[known]


def _mixture(parts: dict[str, Any]) -> MoEConfig | None:
    """The mixture of what the tables say; None: there are no experts."""
    router, experts, shared, more = (parts.get(name, {}) for name in ("router", "experts", "shared", "mixture"))
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
    """Whether a layer's feed-forward part is no mixture, in a model that has one."""
    if layers is not None:
        return index not in layers
    if index < first or (last is not None and index > last):
        return True
    skipped = getattr(config, "mlp_only_layers", None) or ()
    return index in skipped or bool((index + 1) % (every or getattr(config, "decoder_sparse_step", 1)))
