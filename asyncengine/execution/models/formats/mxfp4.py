"""MXFP4 (Open Compute Project 2023): four-bit floats, every 32 of which share a power of two.

A number is one of 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives: half of a small whole number, so that a table of
sixteen keeps it exact. gpt-oss has all experts' matrices in one tensor, [experts, outputs, groups, 16] with scales
[experts, outputs, groups]; they come as one matrix, expert below expert. compressed-tensors has one for each module.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from asyncengine.execution.layers.stored import GroupedRows, NumberForm
from asyncengine.execution.models.formats.mapped_matrix import FoundMatrix, Parts
from asyncengine.execution.models.formats.stored_tensors import StoredTensors
from asyncengine.execution.models.formats.unpacking import spread

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
    outputs, width = tensors.matrix(f"{path}.weight_packed", ("U8",)).shape
    if 2 * width % GROUP:
        raise tensors.wrong(f"{path}.weight_packed", f"has {2 * width} inputs, no whole groups of {GROUP}")
    tensors.need(f"{path}.weight_scale", ("U8", "F8_E8M0"), (outputs, 2 * width // GROUP))
    parts = {"numbers": f"{path}.weight_packed", "scales": f"{path}.weight_scale"}
    return FoundMatrix("mxfp4", (outputs, 2 * width), _FORM, parts, unpack, sliced=("numbers", "scales"))


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
