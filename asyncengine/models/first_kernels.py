"""Which compiled kernels a decoder or an encoder calls, by name, known before its weights are read.

For `kernels.compile_ahead`: what Python calls while a model is loaded and run. Of the kernels that these call by
address, those need mention that most models never call (`calls.call_rare`). A kernel that is missing here is compiled
when it is first called, which `tests/models` would find.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from asyncengine.kernels.compile_ahead import called, named
from asyncengine.layers.attention import Attention
from asyncengine.layers.kimi_delta import KimiDelta
from asyncengine.layers.mlp import MLP
from asyncengine.layers.norm import Norm
from asyncengine.layers.sharded import own_form
from asyncengine.layers.sparse_mlp import SparseMLP
from asyncengine.layers.stored_weight import SideBySide
from asyncengine.layers.weight_forms import PackedWeight, PanelWeight, RowMajorWeight, WeightForm
from asyncengine.models.decoder import Decoder, DecoderLayer
from asyncengine.models.encoder import Encoder


class FirstKernels(NamedTuple):
    """Names as `calls.compile_named` takes them, those that take longest first. None where nothing is compiled."""

    needed: Sequence[str] = ()
    """Kernels of a first answer to a short prompt."""
    later: Sequence[str] = ()
    """Kernels of long prompts and contexts, and of requests that sample in another way than the model's own
    defaults."""


def kernels_of(decoder: Decoder, page_size: int, defaults: Mapping[str, Any]) -> FirstKernels:
    """`defaults`: the model's own sampling parameters, by name."""
    if decoder.options.kernels.name != "compiled":
        return FirstKernels()
    from asyncengine.attention.cpu import tile_types
    from asyncengine.kernels.cpu.jit import kind_of

    kind = _type(kind_of(decoder.dtype))
    tiles = [_type(each) for each in tile_types(page_size, decoder.dtype)]
    weights = [leaf for layer in decoder.layers for linear in layer.linears() for leaf in _leaves(linear.weight)]
    head = decoder.head.weight
    table = head if decoder.config.tied else decoder.embedding.stored
    rows = [] if table is None else _rows(own_form(table), kind)
    logits = [name for leaf in _leaves(head) for name in _products(leaf, kind, "float32")]
    sampled, later = _sampling(defaults)
    later.append(called("attention:join", 3, kind, 2))
    if any(own.config.query_growth is not None for own in decoder.rotary):
        later.append(named("scaling:multiply_rows", 7, kind, 1))
    needed = _mixtures(decoder, kind) + _states(decoder, kind) + _attention(decoder.layers, kind, tiles)
    needed += [name for weight in weights for name in _products(weight, kind, kind)] + logits + rows
    needed += _norms([norm for layer in decoder.layers for norm in layer.norms()], kind)
    needed += _activations(decoder.layers, kind) + _scalings(decoder.layers, kind)
    needed += [named("gather:_copy_few_rows", 5), named("attention_fields:scratch_places", 3), *sampled]
    known = dict.fromkeys(needed)
    return FirstKernels(list(known), [name for name in dict.fromkeys(later) if name not in known])


def _sampling(defaults: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """(what requests need that say nothing, what others do)"""
    needed: list[str] = [named("sampling:_choose_at_once", 10), named("sampling:_choose", 10)]
    others: list[str] = []
    draws = defaults.get("do_sample", True) and defaults.get("temperature", 1.0) > 0
    top_k = draws and defaults.get("top_k", 0) > 0
    top_p = draws and not top_k and defaults.get("top_p", 1.0) < 1
    for wanted, name in (
        (top_p, called("truncation:top_p_threshold", 5, "float32", "float32")),
        (draws, called("sampling:_draw", 4, "float32", "float32", 3)),
        (top_k, called("truncation:top_k_threshold", 5, "float32", 1, "float32")),
    ):
        (needed if wanted else others).append(name)
    return needed, others


def sampling_kernels() -> list[str]:
    """Kernels that sample, for models without names here (`fallback`): their first steps do not call them."""
    needed, others = _sampling({"temperature": 0.0})
    return [name for name in needed + others if ":void(" in name]


def encoder_kernels_of(encoder: Encoder) -> list[str]:
    """The same of an encoder."""
    if encoder.options.kernels.name != "compiled":
        return []
    from asyncengine.attention.cpu import tile_types
    from asyncengine.attention.cpu_whole import PAGE
    from asyncengine.kernels.cpu.jit import kind_of

    kind, layers = _type(kind_of(encoder.dtype)), encoder.layers
    names = _attention(layers, kind, [_type(each) for each in tile_types(PAGE, encoder.dtype)])
    linears = [linear for layer in layers for linear in layer.linears()]
    linears += [] if encoder.head is None else encoder.head.linears()
    names += [name for linear in linears for leaf in _leaves(linear.weight) for name in _products(leaf, kind, kind)]
    outer = [norm for norm in (encoder.embedding_norm, encoder.norm) if norm is not None]
    names += _norms([*outer, *(norm for layer in layers for norm in layer.norms())], kind)
    return list(dict.fromkeys(names + _activations(layers, kind)))


def _norms(norms: Iterable[Norm], kind: str) -> list[str]:
    names = []
    for norm in norms:
        if norm.fusable:
            names += [
                named("norm:norm", 5, "float32", kind, 1), named("norm:add_norm", 7, "float32", "float32", kind, 1)
            ]  # fmt: skip
        elif norm.by_rows:
            names.append(named("layer_norm:normalise", 8, "float32", "float32", kind, 1))
    return names


def _activations(layers: Sequence[DecoderLayer], kind: str) -> list[str]:
    parts = [part for layer in layers if (part := _dense_part(layer.mlp)) is not None]
    names = [named("activation:gate", 5, kind, 1)] if any(part.gated is not None for part in parts) else []
    if any(part.in_place for part in parts):
        names.append(named("activation:activate", 5, kind, 1))
    return names + _gates(parts, kind)


def _gates(parts: Sequence[MLP], kind: str) -> list[str]:
    """Kernels of gated parts' activations."""
    from asyncengine.kernels.cpu.activation import gated_by

    names = dict.fromkeys(gated_by(part.gated) for part in parts)
    return [called(f"activation:{name}", 5, kind) for name in names if name is not None]


def _attention(layers: Sequence[DecoderLayer], kind: str, tiles: list[str]) -> list[str]:
    attentions = [layer for layer in layers if layer.attention is not None]
    merged = [layer.merged is not None for layer in attentions]
    if not merged:
        return []
    names = [named("attention:attend", 6, kind, *tiles, 1)]
    if any(merged):
        names.append(named("attention_write:prepare_and_write", 4, "float64", 5, kind, 1))
    if not all(merged):
        names.append(named("attention_write:write", 8, kind, 1))
    for own in (layer.attention for layer in layers if layer.attention is not None):
        if not isinstance(own, Attention) or len(own.config.qkv) == 2:
            names.append(named("gather:copy_columns", 9))
        if getattr(own, "clip", None) is not None:
            names.append(named("activation:activate", 5, kind, 1))
        angles = getattr(own, "rotated_apart", None)
        if angles is not None:
            angle_kind = "float32" if angles == torch.float32 else kind
            names.append(named("qk_norm_rope:rotate_columns", 8, "bool", kind, angle_kind, 1))
        if getattr(own, "norms_apart", False) or getattr(own, "value_norm", None) is not None:
            names.append(named("norm:norm_columns", 9, "float32", "bool", kind, 1))
    return [*names, named("attention_fields:scratch_places", 3), named("attention_fields:partial_floats", 2)]


def _states(decoder: Decoder, kind: str) -> list[str]:
    """Kernels of layers that keep states, and of gates of heads."""
    kernels = [getattr(layer.state, "kernel", None) for layer in decoder.layers]
    names = [kernel.code(decoder.dtype) for kernel in kernels if kernel is not None]
    if any(layer.attention is not None and layer.attention.gate is not None for layer in decoder.layers):
        names += [named("head_gate:split", 6, kind, 1), named("head_gate:multiply_gates", 7, kind, 1)]
    return names


def _scalings(layers: Sequence[DecoderLayer], kind: str) -> list[str]:
    """Kernels that multiply or add numbers on the way."""
    names = []
    parts = [part for layer in layers if (part := _dense_part(layer.mlp)) is not None]
    if any(part.config.scales != (1.0, 1.0) for part in parts):
        names.append(named("scaling:scale", 1, "float32", 3, kind, 1))
    scaled = any(layer.scalar is not None for layer in layers)
    if scaled or any(getattr(layer.state, "scales", None) is not None for layer in layers):
        names.append(named("scaling:scale_columns", 5, kind, 1))
    if scaled or any(layer.attention is not None and layer.state is not None for layer in layers):
        names.append(named("scaling:add_beside", 1, "float32", 3, kind, 1))
    if any(layer.config.parallel for layer in layers):
        names.append(named("scaling:add_branches", 6, kind, 1))
    if any(layer.inputs is not None or isinstance(layer.state, KimiDelta) for layer in layers):
        names.append(named("gather:copy_columns", 9))
    return names


def _mixtures(decoder: Decoder, kind: str) -> list[str]:
    """Kernels of routers and experts."""
    from asyncengine.kernels.cpu.linears import forms_of

    names = []
    for mixture in (found for layer in decoder.layers for found in layer.mixtures()):
        experts, router = mixture.experts, mixture.router
        weights = [*experts.up.forms, *experts.down.forms]
        if experts.kernel is not None:
            forms = forms_of([experts.up.product(), experts.down.product()])
            written = ["none" if form is None else _type(form) for form in forms]
            names.append(named("experts:run_experts", 10, "float32", "float32", *written, kind, 2))
            names += [name for each in weights if isinstance(each, PanelWeight) for name in each.kernels(kind)]
        else:
            names += [name for each in weights for leaf in _leaves(each) for name in _products(leaf, kind, kind)]
        names += _products(router.weight, "float32" if router.config.exact else kind, "float32")
        if router.config.exact and kind != "float32":
            names.append(named("scaling:widen_all", 4, kind, 1))
        if isinstance(mixture, SparseMLP) and mixture.config.scales_inputs:
            names.append(named("scaling:multiply_rows", 7, kind, 1))
        if not isinstance(mixture, SparseMLP) or mixture.shared is not None:
            names.append(named("scaling:add_shared", 7, kind, 1))
        if router.settings is not None:
            signature = (9, "bool", 2, "bool", "float32", "float32", "float32")
            names += [named(f"routing:{name}", *signature) for name in ("_route_few", "route_rows")]
    return list(dict.fromkeys(names))


def _dense_part(mlp: MLP | SparseMLP | None) -> MLP | None:
    """The part that all rows go through: the feed-forward part, or what a mixture has beside its experts."""
    return mlp.shared if isinstance(mlp, SparseMLP) else mlp


def _leaves(weight: WeightForm) -> Sequence[WeightForm]:
    own = own_form(weight)
    return own.forms if isinstance(own, SideBySide) else [own]


def _products(weight: WeightForm, kind: str, out: str) -> list[str]:
    if isinstance(weight, PackedWeight):
        return [named("packed:multiply", 11, kind, 2)]
    if isinstance(weight, RowMajorWeight):
        return [named("gemm_rowmajor:_product", 6, kind, 1)]
    if isinstance(weight, PanelWeight):
        return [named("gemm_quantized:_multiply", 8, kind, out, 2), *weight.kernels(out)]
    return []


def _rows(weight: WeightForm, kind: str) -> list[str]:
    if isinstance(weight, PackedWeight):
        return [named(f"packed:{name}", 6, kind, 1) for name in ("_read_few_rows", "_read_rows")]
    if isinstance(weight, PanelWeight):
        return [named(f"quantized_panels:{name}", 9, kind, 1) for name in ("_read_few_rows", "_read_rows")]
    return []


def _type(kind: Any) -> str:
    return str(np.dtype(type(kind)))
