"""Whole numbers of four and eight bits: GPTQ (Frantar et al. 2023), as AutoGPTQ and GPTQModel write it, AWQ (Lin et al.
2024), as AutoAWQ writes it for its "gemm" kernels, and compressed-tensors, as LLM Compressor writes it.

GPTQ and AWQ:

    qweight int32 [inputs bits / 32, outputs]     GPTQ: numbers along the inputs, the lowest bits first
            int32 [inputs, outputs / 8]           AWQ: along the outputs; in a word, the outputs 0, 2, 4, 6, 1, 3, 5, 7
    qzeros  int32 [groups, outputs bits / 32]     as AWQ's numbers, or in order; format "gptq": each less 1
    scales        [groups, outputs]
    g_idx   int32 [inputs]                        GPTQ: the group of each input; with activation order they are mixed

The sizes follow from the tensors; the configuration has to agree, but for modules that `dynamic` rules may change. Of
compressed-tensors, what a module has follows from its tensors, so that the configuration's lists of targets need not be
matched:

    weight_packed int32 [outputs, inputs bits / 32]   numbers along the inputs, the lowest bits first
    weight_shape  int64 [2], weight_scale [outputs, groups], weight_g_idx int [inputs]
    weight_zero_point int32 [outputs bits / 32, groups]
    weight int8 [outputs, inputs]                     weight_scale [outputs, 1 or groups]
    weight e4m3, weight_packed uint8                  see `float_formats`

Activations of w8a8 models are rounded here as they come, by groups of 64 of each token: at least as finely as by token.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from asyncengine.errors import ModelNotFound, UnsupportedModel, shorten
from asyncengine.execution.layers.stored import GroupedRows, NumberForm
from asyncengine.execution.models.formats import float_formats, stored_tensors
from asyncengine.execution.models.formats.stored_tensors import SCALES, MatrixSpec, StoredTensors, Tensors, setting

logger = logging.getLogger("asyncengine")

_GPTQ_FORMATS = {"gptq": 1, "gptq_v2": 0}
"""`checkpoint_format` -> number that is added to a stored zero point (AutoGPTQ's first format stores it less 1)."""
_BITS = (4, 8)
_AWQ_LAYOUTS = ("gemm", "exllama", "ipex", "marlin")
"""Values of `version`: names of kernels, all of which read the same layout."""
_AWQ_OUTPUTS = (0, 2, 4, 6, 1, 3, 5, 7)
"""The output, among a word's eight, that its n-th four bits belong to."""


@dataclass(frozen=True, slots=True)
class GPTQSettings:
    """Fields of a GPTQ model's quantization_config that decide how its tensors are read."""

    bits: tuple[int, ...]
    groups: tuple[int, ...]
    """Allowed inputs per group, -1 for all; `dynamic` rules may add sizes of single modules."""
    added: int
    """Number that is added to each stored zero point."""
    needs_index: bool

    @staticmethod
    def read(config: Mapping[str, Any]) -> GPTQSettings:
        """Raises `UnsupportedModel` for a variant that is not read, `ModelNotFound` for a malformed configuration."""
        layout = config.get("checkpoint_format") or config.get("format") or "gptq"
        if not isinstance(layout, str) or layout not in _GPTQ_FORMATS:
            raise UnsupportedModel(f"GPTQ in the layout {shorten(repr(layout), 80)} is not read; gptq and gptq_v2 are")
        if config.get("pack_dtype", "int32") != "int32":
            raise UnsupportedModel(f"GPTQ packed into {shorten(repr(config['pack_dtype']), 80)} is not read; int32 is")
        dynamic = config.get("dynamic")
        rules = [rule for rule in dynamic.values() if isinstance(rule, Mapping)] if isinstance(dynamic, Mapping) else []
        every = [config, *rules]
        bits, group = setting(config, "bits", 4), setting(config, "group_size", 128)
        ordered = any(setting(each, "desc_act", False) for each in every)
        settings = GPTQSettings(
            tuple(setting(each, "bits", bits) for each in every),
            tuple(setting(each, "group_size", group) for each in every),
            _GPTQ_FORMATS[layout],
            ordered and not setting(config, "static_groups", False),
        )
        wrong = next((number for number in settings.bits if number not in _BITS), None)
        if wrong is not None:
            raise UnsupportedModel(f"GPTQ with {wrong} bits is not read; 4 and 8 bits are")
        return settings


def find_gptq(config: Mapping[str, Any], tensors: StoredTensors) -> dict[str, MatrixSpec]:
    """All matrices, by the names that they have without quantization."""
    settings = GPTQSettings.read(config)
    return {f"{path}.weight": _gptq_matrix(path, settings, tensors) for path in tensors.paths(".qweight")}


def find_awq(config: Mapping[str, Any], tensors: StoredTensors) -> dict[str, MatrixSpec]:
    """All matrices, by the names that they have without quantization."""
    layout = str(config.get("version") or config.get("format") or "gemm").lower()
    if layout not in _AWQ_LAYOUTS:
        raise UnsupportedModel(f"AWQ in the layout {shorten(repr(layout), 80)} is not read; gemm is")
    bits = setting(config, "bits", setting(config, "w_bit", 4))
    if bits != 4:
        raise UnsupportedModel(f"AWQ with {bits} bits is not read; 4 bits are")
    group = setting(config, "group_size", setting(config, "q_group_size", 128))
    return {f"{path}.weight": _awq_matrix(path, group, tensors) for path in tensors.paths(".qweight")}


def _gptq_matrix(path: str, settings: GPTQSettings, tensors: StoredTensors) -> MatrixSpec:
    numbers = tensors.matrix(f"{path}.qweight", ("I32",))
    groups, _ = tensors.matrix(f"{path}.scales", SCALES).shape
    zeros = tensors.matrix(f"{path}.qzeros", ("I32",))
    words, outputs = numbers.shape
    bits, rest = divmod(32 * zeros.shape[1], outputs)
    if rest or bits not in settings.bits:
        raise tensors.misshapen(f"{path}.qzeros", zeros.shape, f"{settings.bits[0]} bits for each of {outputs} outputs")
    tensors.need(f"{path}.scales", SCALES, (groups, outputs))
    tensors.need(f"{path}.qzeros", ("I32",), (groups, zeros.shape[1]))
    shape, index, order = (outputs, words * 32 // bits), f"{path}.g_idx", None
    form = _gptq_form(path, tensors, shape, bits, settings.groups, settings.added)
    if index in tensors.headers:
        tensors.need(index, ("I32",), shape[1:])
        order = order_of(tensors, index, shape[1], groups)
    elif settings.needs_index and groups > 1:
        raise tensors.wrong(path, "was quantized in activation order (desc_act) and has no g_idx to say which")
    name = "gptq" if bits == 4 else f"gptq {bits} bits"
    return _int32_matrix(name, path, tensors, shape, form, order=order, added=settings.added)


def _awq_matrix(path: str, group: int, tensors: StoredTensors) -> MatrixSpec:
    inputs, words = tensors.matrix(f"{path}.qweight", ("I32",)).shape
    groups, outputs = tensors.matrix(f"{path}.scales", SCALES).shape
    if outputs != 8 * words:
        raise tensors.misshapen(f"{path}.scales", (groups, outputs), f"{8 * words} outputs")
    tensors.need(f"{path}.qzeros", ("I32",), (groups, words))
    form = _gptq_form(path, tensors, (outputs, inputs), 4, (group,), 0)
    return _int32_matrix("awq", path, tensors, (outputs, inputs), form, lanes=_AWQ_OUTPUTS)


def _gptq_form(
    path: str, tensors: StoredTensors, shape: tuple[int, int], bits: int, sizes: Sequence[int], added: int
) -> NumberForm:
    """The form of a matrix whose groups have one of `sizes`. If every zero point is the middle of the range (symmetric
    quantization), the form has none and they are not kept."""
    scales, inputs = tensors.headers[f"{path}.scales"], shape[1]
    groups, allowed = scales.shape[0], [inputs if size == -1 else size for size in sizes]
    if inputs % groups or inputs // groups not in allowed:
        raise tensors.wrong(f"{path}.scales", f"has {groups} groups for {inputs} inputs, not groups of {allowed[0]}")
    middle = (1 << (bits - 1)) - added
    byte = middle * 0x11 if bits == 4 else middle
    stored = tensors.read(f"{path}.qzeros").contiguous().view(torch.uint8)
    form = stored_tensors.form_of_groups(inputs, groups, bits, scales.dtype, zeros=not bool((stored == byte).all()))
    if form is None:
        raise tensors.wrong(f"{path}.scales", f"has {groups} groups for {inputs} inputs, too narrow to be read here")
    return form


def _int32_matrix(
    name: str, path: str, tensors: StoredTensors, shape: tuple[int, int], form: NumberForm, *,
    order: NDArray[np.int64] | None = None, added: int = 0, lanes: Sequence[int] | None = None,
) -> MatrixSpec:  # fmt: skip
    """The matrix of int32 words that GPTQ or AWQ stores. `lanes`: as in `along_outputs`, for words along the outputs
    (AWQ); None: they lie along the inputs."""
    names = {"numbers": f"{path}.qweight", "scales": f"{path}.scales", "zeros": f"{path}.qzeros"}
    turned = tuple(names)
    if lanes is None and f"{path}.g_idx" in tensors.headers:
        names["index"] = f"{path}.g_idx"
    unpack = partial(_unpack_gptq, form=form, order=order, added=added, lanes=lanes)
    return MatrixSpec(name, shape, form, names, unpack, order, sliced=(), turned=turned)


def order_of(tensors: StoredTensors, name: str, inputs: int, groups: int) -> NDArray[np.int64] | None:
    """Inputs sorted by group, from the tensor `name` with the group of each input; None if they are sorted already."""
    index = tensors.read(name).numpy().astype(np.int64)
    size = inputs // groups
    if np.array_equal(index, np.arange(inputs) // size):
        return None
    if index.min() < 0 or index.max() >= groups or (np.bincount(index, minlength=groups) != size).any():
        raise tensors.wrong(name, f"does not give each of {groups} groups {size} inputs")
    return np.argsort(index, kind="stable")


def _unpack_gptq(
    tensors: Tensors, first: int, last: int, *, form: NumberForm, order: NDArray[np.int64] | None, added: int,
    lanes: Sequence[int] | None,
) -> GroupedRows:  # fmt: skip
    if lanes is None:
        numbers = stored_tensors.along_inputs(tensors["numbers"], first, last, form.bits)
    else:
        numbers = stored_tensors.along_outputs(tensors["numbers"], first, last, form.bits, lanes)
    if order is not None:
        numbers = np.take(numbers, order, axis=1)
    zeros = None
    if form.below == "zeros":
        zeros = stored_tensors.along_outputs(tensors["zeros"], first, last, form.bits, lanes or range(8))
        zeros = (zeros + np.uint8(added)) & np.uint8((1 << form.bits) - 1)
    scales = stored_tensors.floats(tensors["scales"][first:last])
    return stored_tensors.grouped_rows(form, numbers, scales, zeros)


# compressed-tensors.

_COMPRESSED_FORMATS = (
    "dense", "pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "nvfp4-pack-quantized",
    "mxfp4-pack-quantized", "mixed-precision",
)  # fmt: skip
_OF_ACTIVATIONS = ("input_scale", "input_zero_point", "input_global_scale", "output_scale", "output_zero_point")


@dataclass(frozen=True, slots=True)
class CompressedSettings:
    """Fields of a compressed-tensors quantization_config that do not follow from the tensors."""

    bits: frozenset[int]
    block: tuple[int, int] | None
    needs_index: bool

    @staticmethod
    def read(config: Mapping[str, Any]) -> CompressedSettings:
        """Raises `UnsupportedModel` for a variant that is not read, `ModelNotFound` for a malformed configuration."""
        groups = config.get("config_groups") or {}
        if not isinstance(groups, Mapping) or not all(isinstance(group, Mapping) for group in groups.values()):
            raise ModelNotFound("quantization_config: config_groups must be an object of objects")
        for name in [group["format"] for group in (config, *groups.values()) if group.get("format") is not None]:
            if name not in _COMPRESSED_FORMATS:
                raise UnsupportedModel(f"compressed-tensors in the format {shorten(repr(name), 80)} is not read")
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
            bits = setting(each, "num_bits", 8)
            if bits not in _BITS:
                raise UnsupportedModel(f"compressed-tensors with {bits} bits is not read; 4 and 8 bits are")
        blocks = {float_formats.block_of(each.get("block_structure")) for each in weights} - {None}
        if len(blocks) > 1:
            raise UnsupportedModel("compressed-tensors with blocks of several sizes is not read")
        if config.get("kv_cache_scheme"):
            logger.info("the checkpoint asks for a quantized KV cache: kv_cache_scheme is not followed")
        ordered = [each.get("actorder") in ("group", "dynamic", True) for each in weights]
        return CompressedSettings(
            frozenset(setting(each, "num_bits", 8) for each in weights) or frozenset(_BITS),
            next(iter(blocks), None),
            bool(ordered) and all(ordered),
        )


def find_compressed(config: Mapping[str, Any], tensors: StoredTensors) -> dict[str, MatrixSpec]:
    """All matrices, by the names that they have without quantization."""
    settings = CompressedSettings.read(config)
    return {
        f"{path}.weight": replace(spec, ignored=float_formats.present(tensors, path, _OF_ACTIVATIONS))
        for path, spec in _matrices(settings, tensors)
    }


def _matrices(settings: CompressedSettings, tensors: StoredTensors) -> Iterator[tuple[str, MatrixSpec]]:
    for path in tensors.paths(".weight_packed"):
        if tensors.headers[f"{path}.weight_packed"].dtype == "I32":
            yield path, _packed(path, settings, tensors)
        elif f"{path}.weight_global_scale" in tensors.headers:
            yield path, float_formats.nv_matrix(path, tensors, "weight_packed", "weight_global_scale", divides=True)
        else:
            yield path, float_formats.mx_matrix(path, tensors)
    for path in float_formats.eight_bit_paths(tensors):
        yield path, float_formats.fp8_matrix(path, tensors, f"{path}.weight_scale", settings.block)
    for path in tensors.paths(".weight"):
        if tensors.headers[f"{path}.weight"].dtype == "I8":
            yield path, _whole(path, tensors)


def _packed(path: str, settings: CompressedSettings, tensors: StoredTensors) -> MatrixSpec:
    """A module's matrix of 4- or 8-bit numbers packed into 32-bit words."""
    outputs, words = tensors.matrix(f"{path}.weight_packed", ("I32",)).shape
    tensors.need(f"{path}.weight_shape", ("I64", "I32"), (2,))
    rows, inputs = tensors.read(f"{path}.weight_shape").tolist()
    bits = next((bits for bits in sorted(settings.bits) if inputs > 0 and words == -(-inputs * bits // 32)), None)
    if rows != outputs or bits is None:
        raise tensors.misshapen(f"{path}.weight_packed", (outputs, words), f"that of {rows} x {inputs} numbers")
    zeros = f"{path}.weight_zero_point"
    form, groups = _groups(path, tensors, (outputs, inputs), bits, zeros=zeros in tensors.headers)
    names = {"numbers": f"{path}.weight_packed", "scales": f"{path}.weight_scale", "shape": f"{path}.weight_shape"}
    if zeros in tensors.headers:
        names["zeros"] = zeros
        stored = tensors.need(zeros, ("I32", "I8"))
        wanted = (-(-outputs * bits // 32), groups) if stored.dtype == "I32" else (outputs, groups)
        tensors.need(zeros, ("I32", "I8"), wanted)
    order = None
    if f"{path}.weight_g_idx" in tensors.headers:
        names["index"] = f"{path}.weight_g_idx"
        tensors.need(names["index"], ("I32", "I64"), (inputs,))
        order = order_of(tensors, names["index"], inputs, groups)
    elif settings.needs_index and groups > 1:
        raise tensors.wrong(path, "was quantized in activation order and has no weight_g_idx to say which")
    unpack = partial(_unpack_compressed, form=form, inputs=inputs, order=order)
    return MatrixSpec(f"w{bits}a16", (outputs, inputs), form, names, unpack, order)


def _whole(path: str, tensors: StoredTensors) -> MatrixSpec:
    """A module's matrix of signed bytes."""
    outputs, inputs = tensors.matrix(f"{path}.weight", ("I8",)).shape
    zeros = f"{path}.weight_zero_point"
    form, groups = _groups(path, tensors, (outputs, inputs), 8, zeros=zeros in tensors.headers)
    names = {"numbers": f"{path}.weight", "scales": f"{path}.weight_scale"}
    if zeros in tensors.headers:
        names["zeros"] = zeros
        tensors.need(zeros, ("I8",), (outputs, groups))
    unpack = partial(_unpack_compressed, form=form, inputs=inputs, order=None)
    return MatrixSpec("w8a8", (outputs, inputs), form, names, unpack)


def _groups(
    path: str, tensors: StoredTensors, shape: tuple[int, int], bits: int, *, zeros: bool
) -> tuple[NumberForm, int]:
    """(the form of a module's matrix, number of scales that a row has in the file)"""
    name, (outputs, inputs) = f"{path}.weight_scale", shape
    stored = tensors.need(name, SCALES)
    if stored.shape in ((), (1,), (outputs,)):
        groups = 1
    elif len(stored.shape) == 2 and stored.shape[0] in (1, outputs) and stored.shape[1] > 0:
        groups = stored.shape[1]
    else:
        raise tensors.misshapen(name, stored.shape, f"[{outputs}, groups]")
    form = stored_tensors.form_of_groups(inputs, groups, bits, stored.dtype, zeros=zeros)
    if form is None:
        raise tensors.wrong(name, f"has {groups} groups for {inputs} inputs, which cannot be read here")
    return form, groups


def _unpack_compressed(
    tensors: Tensors, first: int, last: int, *, form: NumberForm, inputs: int, order: NDArray[np.int64] | None
) -> GroupedRows:
    stored = tensors["numbers"]
    if stored.dtype == torch.int8:
        numbers = stored[first:last].view(torch.uint8).numpy() ^ np.uint8(0x80)
    else:
        numbers = np.ascontiguousarray(stored_tensors.along_inputs(stored, first, last, form.bits)[:, :inputs])
    if order is not None:
        numbers = np.take(numbers, order, axis=1)
    zeros = None
    if form.below == "zeros" and tensors["zeros"].dtype == torch.int8:
        signed = _rows(tensors["zeros"], first, last).contiguous().view(torch.uint8).numpy()
        zeros = (signed ^ np.uint8(1 << (form.bits - 1))) & np.uint8((1 << form.bits) - 1)
    elif form.below == "zeros":
        zeros = stored_tensors.along_outputs(tensors["zeros"], first, last, form.bits)
    scales = stored_tensors.floats(_rows(tensors["scales"], first, last))
    return stored_tensors.grouped_rows(form, numbers, scales, zeros)


def _rows(scales: torch.Tensor, first: int, last: int) -> torch.Tensor:
    """Rows [first, last) of scales (or zero points), broadcast to [last - first, groups]."""
    if scales.dim() == 2 and scales.shape[0] > 1:
        return scales[first:last]
    if scales.numel() == 1 or scales.dim() == 2:
        return scales.reshape(1, -1).expand(last - first, -1)
    return scales[first:last, None]
