"""Four-bit floats: MXFP4 (Open Compute Project 2023), of which every 32 share a power of two, and NVFP4.

A number is one of 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives: half of a small whole number, so that a table of
sixteen keeps it exact. gpt-oss has all experts' matrices in one tensor, [experts, outputs, groups, 16] with scales
[experts, outputs, groups]; they come as one matrix, expert below expert. compressed-tensors has one for each module.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from asyncengine.execution.layers.stored import GroupedRows, NumberForm
from asyncengine.execution.models.formats.stored_tensors import FoundMatrix, Parts, StoredTensors
from asyncengine.execution.models.formats.unpacking import floats, spread

TABLE = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""Twice the value of each four-bit float."""
GROUP = 32
_FORM = NumberForm(4, GROUP, "table", scale_dtype="bfloat16", table=TABLE)
_BIAS = 127 + 1
"""The bias of a scale's exponent; one more, because the table has twice the values."""


def find(config: Mapping[str, Any], tensors: StoredTensors) -> dict[str, FoundMatrix]:
    """The experts' matrices of gpt-oss, {name of the parameter: matrix [experts outputs, inputs]}."""
    return {path: _stacked(path, tensors) for path in tensors.paths("_blocks")}


def _stacked(path: str, tensors: StoredTensors) -> FoundMatrix:
    shape = tensors.need(f"{path}_blocks", ("U8",)).shape
    if len(shape) != 4 or 0 in shape or shape[3] != GROUP // 2:
        raise tensors.misshapen(f"{path}_blocks", shape, "[experts, outputs, groups, 16]")
    tensors.need(f"{path}_scales", ("U8",), shape[:3])
    parts = {"numbers": f"{path}_blocks", "scales": f"{path}_scales"}
    experts, outputs, groups, _ = shape
    return FoundMatrix(
        "mxfp4", (experts * outputs, GROUP * groups), _FORM, parts, unpack, sliced=(), experts=experts
    )  # fmt: skip


def matrix(path: str, tensors: StoredTensors) -> FoundMatrix:
    """One module's, `weight_packed` uint8 [outputs, inputs / 2] and `weight_scale` uint8 [outputs, inputs / 32]."""
    outputs, inputs = _shape(path, "weight_packed", ("U8", "F8_E8M0"), GROUP, tensors)
    parts = {"numbers": f"{path}.weight_packed", "scales": f"{path}.weight_scale"}
    return FoundMatrix("mxfp4", (outputs, inputs), _FORM, parts, unpack, sliced=("numbers", "scales"))


def _shape(path: str, numbers: str, scales: Sequence[str], group: int, tensors: StoredTensors) -> tuple[int, int]:
    """(outputs, inputs) of one module's matrix. `numbers`: its tensor of these; `scales`: the kinds of its scales."""
    outputs, width = tensors.matrix(f"{path}.{numbers}", ("U8",)).shape
    if 2 * width % group:
        raise tensors.wrong(f"{path}.{numbers}", f"has {2 * width} inputs, no whole groups of {group}")
    tensors.need(f"{path}.weight_scale", scales, (outputs, 2 * width // group))
    return outputs, 2 * width


def powers(exponents: torch.Tensor, bias: int) -> NDArray[np.float32]:
    """2 ** (exponent - bias) of bytes."""
    exponent = exponents.contiguous().view(torch.uint8).numpy().astype(np.int32)
    return np.ldexp(np.float32(1), exponent - bias)


def unpack(parts: Parts, first: int, last: int) -> GroupedRows:
    """Some rows of numbers [..., groups, 16] or [rows, inputs / 2], with scales [..., groups]."""
    groups = parts["scales"].shape[-1]
    numbers = parts["numbers"].view(torch.uint8).reshape(-1, groups * GROUP // 2)[first:last]
    scales = parts["scales"].reshape(-1, groups)[first:last]
    return GroupedRows(spread(numbers.numpy()), powers(scales, _BIAS))


# NVFP4: every 16 share an eight-bit float, and the whole matrix one number. Written by compressed-tensors
# (`weight_packed`, `weight_scale`, `weight_global_scale`, which divides) and by NVIDIA's ModelOpt (`weight`,
# `weight_scale`, `weight_scale_2`, which multiplies).

_NV_GROUP = 16
_NV_FORM = NumberForm(4, _NV_GROUP, "table", scale_dtype="float16", table=TABLE)


def nv_matrix(path: str, tensors: StoredTensors, numbers: str, whole: str, *, divides: bool) -> FoundMatrix:
    """One module's. `numbers`, `whole`: its tensors of numbers and of the number for the whole matrix."""
    outputs, inputs = _shape(path, numbers, ("F8_E4M3",), _NV_GROUP, tensors)
    found = tensors.need(f"{path}.{whole}", ("F32",))
    if found.shape not in ((), (1,)):
        raise tensors.misshapen(f"{path}.{whole}", found.shape, (1,))
    parts = {"numbers": f"{path}.{numbers}", "scales": f"{path}.weight_scale", "whole": f"{path}.{whole}"}
    unpack = partial(_nv_unpack, divides=divides)
    return FoundMatrix("nvfp4", (outputs, inputs), _NV_FORM, parts, unpack, sliced=("numbers", "scales"))


def _nv_unpack(parts: Parts, first: int, last: int, *, divides: bool) -> GroupedRows:
    whole = np.float32(parts["whole"].reshape(-1)[0].item())
    scale = np.float32(0.5) / whole if divides else np.float32(0.5) * whole  # 0.5: the table has twice the values
    scales = floats(parts["scales"].view(torch.float8_e4m3fn)[first:last])
    return GroupedRows(
        spread(parts["numbers"][first:last].numpy()), scales, row_scales=np.full(last - first, scale, dtype=np.float32)
    )
