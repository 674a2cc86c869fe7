"""compressed-tensors, as LLM Compressor writes it: whole numbers or floats of 4 and 8 bits.

What a module has follows from its tensors, so that the configuration's lists of targets need not be matched:

    weight_packed int32 [outputs, inputs bits / 32]   numbers along the inputs, the lowest bits first
    weight_shape  int64 [2], weight_scale [outputs, groups], weight_g_idx int [inputs]
    weight_zero_point int32 [outputs bits / 32, groups]
    weight int8 [outputs, inputs]                     weight_scale [outputs, 1 or groups]
    weight e4m3, weight_packed uint8                  see `fp8`, `mxfp4`

Activations of w8a8 models are rounded here as they come, by groups of 64 of each token: at least as finely as by token.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from asyncengine.errors import ModelNotFound, UnsupportedModel, shorten
from asyncengine.execution.layers.stored import GroupedRows, NumberForm
from asyncengine.execution.models.formats import fp8, mxfp4, unpacking
from asyncengine.execution.models.formats.gptq import order_of
from asyncengine.execution.models.formats.stored_tensors import SCALES, FoundMatrix, Parts, StoredTensors, integer

logger = logging.getLogger("asyncengine")

_FORMATS = (
    "dense", "pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "nvfp4-pack-quantized",
    "mxfp4-pack-quantized", "mixed-precision",
)  # fmt: skip
_BITS = (4, 8)
_OF_ACTIVATIONS = ("input_scale", "input_zero_point", "input_global_scale", "output_scale", "output_zero_point")


@dataclass(frozen=True, slots=True)
class CompressedSettings:
    """CompressedSettings of quantization_config, as far as the tensors do not."""

    bits: frozenset[int]
    block: tuple[int, int] | None
    needs_index: bool

    @staticmethod
    def read(config: Mapping[str, Any]) -> CompressedSettings:
        """Raises `UnsupportedModel` for a variant that is not read, `ModelNotFound` for what is no configuration."""
        groups = config.get("config_groups") or {}
        if not isinstance(groups, Mapping) or not all(isinstance(group, Mapping) for group in groups.values()):
            raise ModelNotFound("quantization_config: config_groups must be an object of objects")
        _check_formats([config, *groups.values()])
        sparse = config.get("sparsity_config")
        if isinstance(sparse, Mapping) and sparse and sparse.get("format", "dense") != "dense":
            raise UnsupportedModel(
                f"sparse weights ({shorten(repr(sparse.get('format')), 80)}) are not read: use a model that is "
                "quantized only"
            )
        rotated = config.get("transform_config")
        if isinstance(rotated, Mapping) and rotated.get("config_groups"):
            raise UnsupportedModel("compressed-tensors with a transform_config (rotated weights) is not read")
        weights = [group["weights"] for group in groups.values() if isinstance(group.get("weights"), Mapping)]
        for each in weights:
            bits = integer(each, "num_bits", 8)
            if bits not in _BITS:
                raise UnsupportedModel(f"compressed-tensors with {bits} bits is not read; 4 and 8 bits are")
        blocks = {fp8.block_of(each.get("block_structure")) for each in weights} - {None}
        if len(blocks) > 1:
            raise UnsupportedModel("compressed-tensors with blocks of several sizes is not read")
        if config.get("kv_cache_scheme"):
            logger.info("the checkpoint asks for a quantized KV cache: kv_cache_scheme is not followed")
        ordered = [each.get("actorder") in ("group", "dynamic", True) for each in weights]
        return CompressedSettings(
            frozenset(integer(each, "num_bits", 8) for each in weights) or frozenset(_BITS),
            next(iter(blocks), None),
            bool(ordered) and all(ordered),
        )


def _check_formats(groups: list[Mapping[str, Any]]) -> None:
    for group in groups:
        name = group.get("format")
        if name is not None and name not in _FORMATS:
            raise UnsupportedModel(f"compressed-tensors in the format {shorten(repr(name), 80)} is not read")


def find(config: Mapping[str, Any], tensors: StoredTensors) -> dict[str, FoundMatrix]:
    """All matrices, by the names that they have without quantization."""
    settings = CompressedSettings.read(config)
    return {
        f"{path}.weight": replace(found, ignored=fp8.present(tensors, path, _OF_ACTIVATIONS))
        for path, found in _matrices(settings, tensors)
    }


def _matrices(settings: CompressedSettings, tensors: StoredTensors) -> Iterator[tuple[str, FoundMatrix]]:
    for path in tensors.paths(".weight_packed"):
        if tensors.headers[f"{path}.weight_packed"].kind == "I32":
            yield path, _packed(path, settings, tensors)
        elif f"{path}.weight_global_scale" in tensors.headers:
            yield path, mxfp4.nv_matrix(path, tensors, "weight_packed", "weight_global_scale", divides=True)
        else:
            yield path, mxfp4.matrix(path, tensors)
    for path in fp8.eight_bit_paths(tensors):
        yield path, fp8.matrix(path, tensors, f"{path}.weight_scale", settings.block)
    for path in tensors.paths(".weight"):
        if tensors.headers[f"{path}.weight"].kind == "I8":
            yield path, _whole(path, tensors)


def _packed(path: str, settings: CompressedSettings, tensors: StoredTensors) -> FoundMatrix:
    """Numbers of 4 or 8 bits in words of 32."""
    outputs, words = tensors.matrix(f"{path}.weight_packed", ("I32",)).shape
    tensors.need(f"{path}.weight_shape", ("I64", "I32"), (2,))
    rows, inputs = tensors.read(f"{path}.weight_shape").tolist()
    bits = next((bits for bits in sorted(settings.bits) if inputs > 0 and words == -(-inputs * bits // 32)), None)
    if rows != outputs or bits is None:
        raise tensors.misshapen(f"{path}.weight_packed", (outputs, words), f"that of {rows} x {inputs} numbers")
    zeros = f"{path}.weight_zero_point"
    form, groups = _groups(path, tensors, (outputs, inputs), bits, zeros=zeros in tensors.headers)
    parts = {"numbers": f"{path}.weight_packed", "scales": f"{path}.weight_scale", "shape": f"{path}.weight_shape"}
    if zeros in tensors.headers:
        parts["zeros"] = zeros
        stored = tensors.need(zeros, ("I32", "I8"))
        wanted = (-(-outputs * bits // 32), groups) if stored.kind == "I32" else (outputs, groups)
        tensors.need(zeros, ("I32", "I8"), wanted)
    order = None
    if f"{path}.weight_g_idx" in tensors.headers:
        parts["index"] = f"{path}.weight_g_idx"
        tensors.need(parts["index"], ("I32", "I64"), (inputs,))
        order = order_of(tensors, parts["index"], inputs, groups)
    elif settings.needs_index and groups > 1:
        raise tensors.wrong(path, "was quantized in activation order and has no weight_g_idx to say which")
    unpack = partial(_unpack, form=form, inputs=inputs, order=order)
    return FoundMatrix(f"w{bits}a16", (outputs, inputs), form, parts, unpack, order)


def _whole(path: str, tensors: StoredTensors) -> FoundMatrix:
    """Numbers of a byte each, with a sign."""
    outputs, inputs = tensors.matrix(f"{path}.weight", ("I8",)).shape
    zeros = f"{path}.weight_zero_point"
    form, groups = _groups(path, tensors, (outputs, inputs), 8, zeros=zeros in tensors.headers)
    parts = {"numbers": f"{path}.weight", "scales": f"{path}.weight_scale"}
    if zeros in tensors.headers:
        parts["zeros"] = zeros
        tensors.need(zeros, ("I8",), (outputs, groups))
    unpack = partial(_unpack, form=form, inputs=inputs, order=None)
    return FoundMatrix("w8a8", (outputs, inputs), form, parts, unpack)


def _groups(
    path: str, tensors: StoredTensors, shape: tuple[int, int], bits: int, *, zeros: bool
) -> tuple[NumberForm, int]:
    """The form, and how many scales a row has in the files."""
    name, (outputs, inputs) = f"{path}.weight_scale", shape
    stored = tensors.need(name, SCALES)
    if stored.shape in ((), (1,), (outputs,)):
        groups = 1
    elif len(stored.shape) == 2 and stored.shape[0] in (1, outputs) and stored.shape[1] > 0:
        groups = stored.shape[1]
    else:
        raise tensors.misshapen(name, stored.shape, f"[{outputs}, groups]")
    form = unpacking.form_of_groups(inputs, groups, bits, stored.kind, zeros=zeros)
    if form is None:
        raise tensors.wrong(name, f"has {groups} groups for {inputs} inputs, which cannot be read here")
    return form, groups


def _unpack(
    parts: Parts, first: int, last: int, *, form: NumberForm, inputs: int, order: NDArray[np.int64] | None
) -> GroupedRows:
    stored = parts["numbers"]
    if stored.dtype == torch.int8:
        numbers = stored[first:last].view(torch.uint8).numpy() ^ np.uint8(0x80)
    else:
        numbers = np.ascontiguousarray(unpacking.along_inputs(stored, first, last, form.bits)[:, :inputs])
    if order is not None:
        numbers = np.take(numbers, order, axis=1)
    zeros = None
    if form.below == "zeros" and parts["zeros"].dtype == torch.int8:
        signed = _rows(parts["zeros"], first, last).contiguous().view(torch.uint8).numpy()
        zeros = (signed ^ np.uint8(1 << (form.bits - 1))) & np.uint8((1 << form.bits) - 1)
    elif form.below == "zeros":
        zeros = unpacking.along_outputs(parts["zeros"], first, last, form.bits)
    return unpacking.grouped_rows(form, numbers, unpacking.floats(_rows(parts["scales"], first, last)), zeros)


def _rows(scales: torch.Tensor, first: int, last: int) -> torch.Tensor:
    """[last - first, groups] of scales for each output, or one for all."""
    if scales.dim() == 2 and scales.shape[0] > 1:
        return scales[first:last]
    if scales.numel() == 1 or scales.dim() == 2:
        return scales.reshape(1, -1).expand(last - first, -1)
    return scales[first:last, None]
