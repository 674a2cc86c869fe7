"""Which compiled kernels a decoder calls, by name, known before its weights are read.

For `kernels.compile_ahead`: what Python calls while a model is loaded and run; the kernels that these call by address
need no mention. A kernel that is missing here is compiled when it is first called, which `tests/models` would find.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from asyncengine.models.decoder import Decoder

_PACKAGE = "asyncengine.kernels.cpu."
_BITS = {"int8": "uint8", "int4": "int8"}
"""By name of a weight's form, the type by which kernels know it."""


def kernels_of(decoder: Decoder, page_size: int) -> list[str]:
    """Names as `calls.compile_named` takes them, those that take longest first; [] where nothing is compiled."""
    if decoder.options.kernels.name != "compiled":
        return []
    from asyncengine.attention.cpu import tile_types
    from asyncengine.kernels.cpu.jit import kind_of

    kind = _type(kind_of(decoder.dtype))
    tiles = [_type(each) for each in tile_types(page_size, decoder.dtype)]
    forms = dict.fromkeys(linear.weight.name for layer in decoder.layers for linear in layer.linears())
    names = [_named("sampling:_choose_at_once", 10)]
    if decoder.fused is not None:
        bits = _BITS.get(next(iter(forms)), "none")
        names.append(_named("fused_layers:_run_layers", 4, "float32", 11, bits, kind, *tiles, 5))
    names += _attention(decoder, kind, tiles)
    for form in forms:
        names += _products(form, kind, kind)
    names += _products(decoder.head.weight.name, kind, "float32")
    if decoder.config.tied and decoder.head.weight.name == "packed":
        names += [_named(f"packed:{name}", 6, kind, 1) for name in ("_read_few_rows", "_read_rows")]
    elif decoder.config.tied and decoder.head.weight.name in _BITS:
        names.append(_named("quantize:_read_rows", 7, kind, 1))
    if any(norm.fusable for layer in decoder.layers for norm in layer.norms()):
        names += [_named("norm:norm", 5, "float32", kind, 1), _named("norm:add_norm", 7, "float32", "float32", kind, 1)]
    if any(layer.mlp.gated is not None for layer in decoder.layers):
        names.append(_named("activation:gate", 5, kind, 1))
    names += [_named("sampling:_choose", 10), _named("gather:_copy_few_rows", 5)]
    return list(dict.fromkeys(names))


def _attention(decoder: Decoder, kind: str, tiles: list[str]) -> list[str]:
    merged = [layer.merged is not None and not layer.attention.makes_values for layer in decoder.layers]
    names = [_named("attention:attend", 6, kind, *tiles, 1), _named("attention:join", 3, kind, 2)]
    if any(merged):
        names.append(_named("attention_write:prepare_and_write", 4, "float64", 5, kind, 1))
    if not all(merged):
        names.append(_named("attention_write:write", 8, kind, 1))
    return [*names, _named("attention_fields:scratch_places", 3), _named("attention_fields:partial_floats", 2)]


def _products(form: str, kind: str, out: str) -> list[str]:
    if form == "packed":
        return [_named("packed:multiply", 10, kind, out, 2), _named("packed:panels_at_once", 2)]
    if form == "row-major":
        return [_named("gemm_rowmajor:_product", 6, kind, 1)]
    if form in _BITS:
        return [_named("gemm_quantized:multiply_rounded", 9, _BITS[form], kind, out, 2)]
    return []


def _named(function: str, *types: str | int) -> str:
    """A number stands for so many int64."""
    written = [name for each in types for name in (["int64"] * each if isinstance(each, int) else [each])]
    return f"{_PACKAGE}{function}:({', '.join(written)})"


def _type(kind: Any) -> str:
    return str(np.dtype(type(kind)))
