"""Floats of eight and four bits.

FP8 (e4m3): DeepSeek's and Qwen's with a scale for each block of 128 x 128, others by row or matrix.
A GPU that knows such floats keeps them. Others, and CPUs, keep eight-bit whole numbers in groups of `GROUP` inputs,
whose step is a power of two: of a group's largest
number all four significant bits are kept, and numbers of at least a sixteenth of it stay exact. A smaller number is
rounded to that step, to both sides alike. A product loses 0.40 % by it (the norm of the difference over that of the
result) where weights are normally distributed, 0.50 % where their tails are those of Student's t with 10 degrees of
freedom, 0.69 % with 5; rounding x to 8 bits costs 0.59 %, and the eight-bit floats themselves 2.6 %. Steps of a 127th
of the largest number, as usual, lose 0.54, 0.60 and 0.67 %. bfloat16 would read twice the bytes for every token.

MXFP4 (Open Compute Project 2023), of which every 32 share a power of two, and NVFP4, of which every 16 share an
eight-bit float, and the whole matrix one number: each is one of 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives, half of
a small whole number, so that a table of sixteen keeps it exact. gpt-oss has all experts' matrices in one tensor,
[experts, outputs, groups, 16] with scales [experts, outputs, groups]; they come as one matrix, expert below expert.
compressed-tensors has one for each module, and of NVFP4 `weight_packed`, `weight_scale`, `weight_global_scale`, which
divides; NVIDIA's ModelOpt `weight`, `weight_scale`, `weight_scale_2`, which multiplies, beside FP8 with a scale for
each matrix.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from asyncengine.errors import ModelNotFound, UnsupportedModel, shorten
from asyncengine.execution.layers.stored import GroupedRows, NumberForm
from asyncengine.execution.models.formats.stored_tensors import (
    SCALES,
    MatrixSpec,
    StoredTensors,
    Tensors,
    floats,
    spread,
)
from asyncengine.kernels.api import compiler_missing

GROUP = 32
_FP8 = "F8_E4M3"
_BLOCK = 1 << 17
"""Numbers that are converted at a time, so that they stay in a core's cache."""
_LEAST_EXPONENT = 127 - 3
"""The least exponent of a group's largest number, as float32 has it: with a smaller one all numbers are exact in the
step of this."""

Reach = Literal["matrix", "rows", "blocks"]


def find_fp8(config: Mapping[str, Any], tensors: StoredTensors) -> dict[str, MatrixSpec]:
    """All matrices of quant_method "fp8" (`weight_scale_inv`) and "fbgemm_fp8" (`weight_scale`)."""
    layout = config.get("fmt", "e4m3")
    if layout != "e4m3":
        raise UnsupportedModel(f"FP8 as {shorten(repr(layout), 80)} is not read; e4m3 is")
    block = block_of(config.get("weight_block_size"))
    specs = {}
    for path in eight_bit_paths(tensors):
        ending = next((end for end in ("weight_scale_inv", "weight_scale") if f"{path}.{end}" in tensors.headers), "")
        name = f"{path}.{ending or 'weight_scale_inv'}"
        specs[f"{path}.weight"] = replace(
            fp8_matrix(path, tensors, name, block), ignored=present(tensors, path, ("input_scale", "activation_scale"))
        )
    return specs


def eight_bit_paths(tensors: StoredTensors) -> list[str]:
    """Modules whose `weight` is FP8 (e4m3). Raises `UnsupportedModel` for one in e5m2."""
    for name, stored in tensors.headers.items():
        if stored.dtype == "F8_E5M2":
            raise UnsupportedModel(f"FP8 as e5m2 is not read, e4m3 is: {name}")
    return [path for path in tensors.paths(".weight") if tensors.headers[f"{path}.weight"].dtype == _FP8]


def present(tensors: StoredTensors, path: str, endings: Sequence[str]) -> tuple[str, ...]:
    """Names of a module's tensors with these endings that the checkpoint has."""
    return tuple(name for name in (f"{path}.{ending}" for ending in endings) if name in tensors.headers)


def block_of(value: object) -> tuple[int, int] | None:
    """Rows and inputs that share a scale, as configurations have them. Raises `ModelNotFound`."""
    if value is None:
        return None
    sizes = list(value) if isinstance(value, (list, tuple)) else []
    if len(sizes) != 2 or not all(isinstance(size, int) and not isinstance(size, bool) and size > 0 for size in sizes):
        raise ModelNotFound(f"quantization_config: a block must be two sizes, got {shorten(repr(value), 80)}")
    return sizes[0], sizes[1]


def fp8_matrix(path: str, tensors: StoredTensors, scale: str, block: tuple[int, int] | None) -> MatrixSpec:
    """A module's FP8 matrix with its scales in the tensor `scale`. `block`: rows and inputs that share a scale."""
    rows, inputs = tensors.matrix(f"{path}.weight", (_FP8,)).shape
    stored = tensors.need(scale, (*SCALES, "F8_E8M0", "U8"))
    grid = (1, 1) if block is None else (-(-rows // block[0]), -(-inputs // block[1]))
    reach: Reach
    if block is not None and stored.shape == grid:
        reach = "blocks"
    elif stored.shape in ((), (1,), (1, 1)):
        reach = "matrix"
    elif stored.shape in ((rows,), (rows, 1)):
        reach = "rows"
    else:
        raise tensors.misshapen(scale, stored.shape, grid if block is not None else (rows, 1))
    if inputs % GROUP or (reach == "blocks" and block is not None and block[1] % GROUP):
        raise tensors.wrong(f"{path}.weight", f"has inputs that are no whole groups of {GROUP}")
    single = reach == "blocks" and stored.dtype not in ("BF16", "F8_E8M0", "U8")
    shared = block[1] if reach == "blocks" and block is not None else 0
    form = NumberForm(8, GROUP, scale_dtype="float32" if single else "bfloat16", floats=shared)
    names = {"numbers": f"{path}.weight", "scales": scale}
    return MatrixSpec("fp8", (rows, inputs), form, names, partial(_unpack_fp8, reach=reach, block=block or (1, 1)))


def _unpack_fp8(tensors: Tensors, first: int, last: int, *, reach: Reach, block: tuple[int, int]) -> GroupedRows:
    stored = tensors["numbers"][first:last].view(torch.uint8).numpy()
    numbers, steps = whole_numbers(stored)
    stored_scales = tensors["scales"]
    exponents = stored_scales.dtype == torch.uint8 or stored_scales.element_size() == 1
    scales = powers(stored_scales, 127) if exponents else floats(stored_scales)
    if reach == "matrix":
        row_scales = np.full(last - first, scales.reshape(-1)[0], dtype=np.float32)
        return GroupedRows(numbers, steps, row_scales=row_scales, floats=stored)
    if reach == "rows":
        return GroupedRows(numbers, steps, row_scales=scales.reshape(-1)[first:last].copy(), floats=stored)
    of_rows = scales[np.arange(first, last) // block[0]]
    of_groups = np.arange(steps.shape[1]) * GROUP // block[1]
    steps *= of_rows[:, of_groups]
    return GroupedRows(numbers, steps, floats=stored, float_scales=of_rows)


def whole_numbers(floats: NDArray[np.uint8]) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """(integers [n, inputs] with 128 added, steps [n, inputs / GROUP]) of e4m3 floats [n, inputs]."""
    if compiler_missing(torch.float32, torch.device("cpu")) is not None:
        return plain_whole_numbers(floats)
    from asyncengine.kernels.api import unpack_floats

    return unpack_floats(floats, GROUP, *_tables())


@functools.cache
def _tables() -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """Tables for `unpack_floats`: (integer of each float in a group whose largest has this exponent, [16, 256]; step of
    such a group [16])."""
    table = np.zeros((16, 256), dtype=np.uint8)
    steps = np.empty(16, dtype=np.float32)
    for exponent in range(16):
        smaller = np.array([byte for byte in range(256) if (byte & 127) >> 3 <= exponent], dtype=np.uint8)
        groups = np.full((len(smaller), GROUP), exponent << 3, dtype=np.uint8)
        groups[:, 0] = smaller
        numbers, group_steps = plain_whole_numbers(groups)
        table[exponent, smaller] = numbers[:, 0]
        steps[exponent] = group_steps[0, 0]
    return table, steps


def plain_whole_numbers(floats: NDArray[np.uint8]) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """`whole_numbers` in numpy and torch: used without a compiler, and the reference for the kernel."""
    rows, inputs = floats.shape
    numbers = np.empty((rows, inputs), dtype=np.uint8)
    steps = np.empty((rows, inputs // GROUP), dtype=np.float32)
    block = min(rows, max(1, _BLOCK // inputs))
    halves, values = np.empty((block, inputs), dtype=np.int16), torch.empty((block, inputs))
    sizes = torch.empty((block, inputs))
    for first in range(0, rows, block):
        count = min(block, rows - first)
        block_halves, block_values = halves[:count], values[:count]
        # a half-precision float of the same bits is a 256th of the number
        block_halves[...] = floats[first : first + count].view(np.int8)
        block_halves <<= np.int16(7)
        # clears bit 14, into which the shift moved a copy of int8's sign bit
        block_halves &= np.int16(-16385)
        block_values.copy_(torch.from_numpy(block_halves.view(np.float16)))
        largest = torch.abs(block_values, out=sizes[:count]).view(count, -1, GROUP).amax(-1).mul_(256.0)
        exponents = (largest.view(torch.int32) >> 23).clamp_(min=_LEAST_EXPONENT)
        step = (exponents - 6 << 23).view(torch.float32)
        block_values.view(count, -1, GROUP).mul_((256.0 / step)[..., None]).round_().add_(128.0)
        steps[first : first + count] = step.numpy()
        np.copyto(numbers[first : first + count], block_values.numpy(), casting="unsafe")
    return numbers, steps


TABLE = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""Twice the value of each four-bit float."""
MX_FORM = NumberForm(4, GROUP, "table", scale_dtype="bfloat16", table=TABLE)
_BIAS = 127 + 1
"""The bias of a scale's exponent; one more, because the table has twice the values."""


def find_mxfp4(config: Mapping[str, Any], tensors: StoredTensors) -> dict[str, MatrixSpec]:
    """Experts' matrices of gpt-oss, {parameter name: matrix [experts * outputs, inputs]}."""
    return {path: _stacked(path, tensors) for path in tensors.paths("_blocks")}


def _stacked(path: str, tensors: StoredTensors) -> MatrixSpec:
    shape = tensors.need(f"{path}_blocks", ("U8",)).shape
    if len(shape) != 4 or 0 in shape or shape[3] != GROUP // 2:
        raise tensors.misshapen(f"{path}_blocks", shape, "[experts, outputs, groups, 16]")
    tensors.need(f"{path}_scales", ("U8",), shape[:3])
    names = {"numbers": f"{path}_blocks", "scales": f"{path}_scales"}
    experts, outputs, groups, _ = shape
    shape = experts * outputs, GROUP * groups
    return MatrixSpec("mxfp4", shape, MX_FORM, names, _unpack_mx, sliced=(), experts=experts)


def mx_matrix(path: str, tensors: StoredTensors) -> MatrixSpec:
    """A module's MXFP4: `weight_packed` uint8 [outputs, inputs / 2] and `weight_scale` uint8 [outputs, inputs / 32]."""
    outputs, inputs = _shape(path, "weight_packed", ("U8", "F8_E8M0"), GROUP, tensors)
    names = {"numbers": f"{path}.weight_packed", "scales": f"{path}.weight_scale"}
    return MatrixSpec("mxfp4", (outputs, inputs), MX_FORM, names, _unpack_mx, sliced=("numbers", "scales"))


def _shape(path: str, numbers: str, scales: Collection[str], group: int, tensors: StoredTensors) -> tuple[int, int]:
    """(outputs, inputs) of a module's four-bit matrix. `numbers`: its packed tensor; `scales`: their allowed dtypes."""
    outputs, width = tensors.matrix(f"{path}.{numbers}", ("U8",)).shape
    if 2 * width % group:
        raise tensors.wrong(f"{path}.{numbers}", f"has {2 * width} inputs, no whole groups of {group}")
    tensors.need(f"{path}.weight_scale", scales, (outputs, 2 * width // group))
    return outputs, 2 * width


def powers(exponents: torch.Tensor, bias: int) -> NDArray[np.float32]:
    """2 ** (exponent - bias) of bytes."""
    exponent = exponents.contiguous().view(torch.uint8).numpy().astype(np.int32)
    return np.ldexp(np.float32(1), exponent - bias)


def _unpack_mx(tensors: Tensors, first: int, last: int) -> GroupedRows:
    """Rows [first, last) of packed numbers [..., groups, 16] or [rows, inputs / 2] and scales [..., groups]."""
    groups = tensors["scales"].shape[-1]
    numbers = tensors["numbers"].view(torch.uint8).reshape(-1, groups * GROUP // 2)[first:last]
    scales = tensors["scales"].reshape(-1, groups)[first:last]
    return GroupedRows(spread(numbers.numpy()), powers(scales, _BIAS))


_NV_GROUP = 16
_NV_FORM = NumberForm(4, _NV_GROUP, "table", scale_dtype="float16", table=TABLE)


def nv_matrix(path: str, tensors: StoredTensors, numbers: str, factor: str, *, divides: bool) -> MatrixSpec:
    """A module's NVFP4 matrix. `numbers`: name of its packed tensor; `factor`: of the scale of the whole matrix, which
    `divides` or multiplies."""
    outputs, inputs = _shape(path, numbers, ("F8_E4M3",), _NV_GROUP, tensors)
    stored = tensors.need(f"{path}.{factor}", ("F32",))
    if stored.shape not in ((), (1,)):
        raise tensors.misshapen(f"{path}.{factor}", stored.shape, (1,))
    names = {"numbers": f"{path}.{numbers}", "scales": f"{path}.weight_scale", "whole": f"{path}.{factor}"}
    unpack = partial(_nv_unpack, divides=divides)
    return MatrixSpec("nvfp4", (outputs, inputs), _NV_FORM, names, unpack, sliced=("numbers", "scales"))


def _nv_unpack(tensors: Tensors, first: int, last: int, *, divides: bool) -> GroupedRows:
    factor = np.float32(tensors["whole"].reshape(-1)[0].item())
    scale = np.float32(0.5) / factor if divides else np.float32(0.5) * factor  # 0.5: the table has twice the values
    scales = floats(tensors["scales"].view(torch.float8_e4m3fn)[first:last])
    return GroupedRows(
        spread(tensors["numbers"][first:last].numpy()), scales, row_scales=np.full(last - first, scale, np.float32)
    )


_ALGORITHMS = ("FP8", "NVFP4", "MIXED_PRECISION")
_OF_ACTIVATIONS = ("input_scale", "k_scale", "v_scale")


def find_modelopt(config: Mapping[str, Any], tensors: StoredTensors) -> dict[str, MatrixSpec]:
    """All matrices, by the names that they have without quantization."""
    algorithm = config.get("quant_algo")
    if algorithm not in _ALGORITHMS:
        raise UnsupportedModel(f"ModelOpt's {shorten(repr(algorithm), 80)} is not read; FP8 and NVFP4 are")
    specs = {}
    for path in eight_bit_paths(tensors):
        specs[path] = fp8_matrix(path, tensors, f"{path}.weight_scale", None)
    for path in tensors.paths(".weight"):
        if tensors.headers[f"{path}.weight"].dtype == "U8":
            specs[path] = nv_matrix(path, tensors, "weight", "weight_scale_2", divides=False)
    return {
        f"{path}.weight": replace(spec, ignored=present(tensors, path, _OF_ACTIVATIONS)) for path, spec in specs.items()
    }
