"""Eight-bit floats (e4m3): DeepSeek's and Qwen's with a scale for each block of 128 x 128, others by row or matrix.

A GPU that knows such floats keeps them. Others, and CPUs, keep eight-bit whole numbers in groups of `GROUP` inputs,
whose step is a power of two: of a group's largest
number all four significant bits are kept, and whatever is at least a sixteenth of it stays exact. What is smaller is
rounded to that step, to both sides alike. A product loses 0.40 % by it (the norm of the difference over that of the
result) where weights are normally distributed, 0.50 % where their tails are those of Student's t with 10 degrees of
freedom, 0.69 % with 5; rounding x to 8 bits costs 0.59 %, and the eight-bit floats themselves 2.6 %. Steps of a 127th
of the largest number, as usual, lose 0.54, 0.60 and 0.67 %. bfloat16 would read twice the bytes for every token.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from asyncengine.errors import ModelNotFound, UnsupportedModel, shorten
from asyncengine.execution.layers.stored import GroupedRows, NumberForm
from asyncengine.execution.models.formats.mxfp4 import powers
from asyncengine.execution.models.formats.stored_tensors import SCALES, FoundMatrix, Parts, StoredTensors
from asyncengine.execution.models.formats.unpacking import floats
from asyncengine.kernels.api import compiler_missing

GROUP = 32
_KIND = "F8_E4M3"
_BLOCK = 1 << 17
"""Numbers that are worked on at once: they stay in a core's cache."""
_LEAST_EXPONENT = 127 - 3
"""The least exponent of a group's largest number, as float32 has it: with a smaller one all numbers are exact in the
step of this."""

Reach = Literal["matrix", "rows", "blocks"]


def find(config: Mapping[str, Any], tensors: StoredTensors) -> dict[str, FoundMatrix]:
    """All matrices of quant_method "fp8" (`weight_scale_inv`) and "fbgemm_fp8" (`weight_scale`)."""
    layout = config.get("fmt", "e4m3")
    if layout != "e4m3":
        raise UnsupportedModel(f"FP8 as {shorten(repr(layout), 80)} is not read; e4m3 is")
    block = block_of(config.get("weight_block_size"))
    found = {}
    for path in eight_bit_paths(tensors):
        ending = next((end for end in ("weight_scale_inv", "weight_scale") if f"{path}.{end}" in tensors.headers), "")
        name = f"{path}.{ending or 'weight_scale_inv'}"
        found[f"{path}.weight"] = replace(
            matrix(path, tensors, name, block), ignored=present(tensors, path, ("input_scale", "activation_scale"))
        )
    return found


def eight_bit_paths(tensors: StoredTensors) -> list[str]:
    """Modules whose `weight` is of eight-bit floats. Raises `UnsupportedModel` for those of the other kind."""
    for name, stored in tensors.headers.items():
        if stored.kind == "F8_E5M2":
            raise UnsupportedModel(f"FP8 as e5m2 is not read, e4m3 is: {name}")
    return [path for path in tensors.paths(".weight") if tensors.headers[f"{path}.weight"].kind == _KIND]


def present(tensors: StoredTensors, path: str, endings: Sequence[str]) -> tuple[str, ...]:
    """Tensors of a module that are there, of those with these endings."""
    return tuple(name for name in (f"{path}.{ending}" for ending in endings) if name in tensors.headers)


def block_of(value: object) -> tuple[int, int] | None:
    """Rows and inputs that share a scale, as configurations have them. Raises `ModelNotFound`."""
    if value is None:
        return None
    sizes = list(value) if isinstance(value, (list, tuple)) else []
    if len(sizes) != 2 or not all(isinstance(size, int) and not isinstance(size, bool) and size > 0 for size in sizes):
        raise ModelNotFound(f"quantization_config: a block must be two sizes, got {shorten(repr(value), 80)}")
    return sizes[0], sizes[1]


def matrix(path: str, tensors: StoredTensors, scale: str, block: tuple[int, int] | None) -> FoundMatrix:
    """One module's, with its scales in the tensor `scale`; `block`: rows and inputs that share one, if they do."""
    rows, inputs = tensors.matrix(f"{path}.weight", (_KIND,)).shape
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
    single = reach == "blocks" and stored.kind not in ("BF16", "F8_E8M0", "U8")
    shared = block[1] if reach == "blocks" and block is not None else 0
    form = NumberForm(8, GROUP, scale_dtype="float32" if single else "bfloat16", floats=shared)
    parts = {"numbers": f"{path}.weight", "scales": scale}
    return FoundMatrix("fp8", (rows, inputs), form, parts, partial(_unpack, reach=reach, block=block or (1, 1)))


def _unpack(parts: Parts, first: int, last: int, *, reach: Reach, block: tuple[int, int]) -> GroupedRows:
    own = parts["numbers"][first:last].view(torch.uint8).numpy()
    numbers, steps = whole_numbers(own)
    kept = parts["scales"]
    exponents = kept.dtype == torch.uint8 or kept.element_size() == 1
    scales = powers(kept, 127) if exponents else floats(kept)
    if reach == "matrix":
        whole = np.full(last - first, scales.reshape(-1)[0], dtype=np.float32)
        return GroupedRows(numbers, steps, row_scales=whole, floats=own)
    if reach == "rows":
        return GroupedRows(numbers, steps, row_scales=scales.reshape(-1)[first:last].copy(), floats=own)
    of_rows = scales[np.arange(first, last) // block[0]]
    of_groups = np.arange(steps.shape[1]) * GROUP // block[1]
    steps *= of_rows[:, of_groups]
    return GroupedRows(numbers, steps, floats=own, float_scales=of_rows)


def whole_numbers(floats: NDArray[np.uint8]) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """(numbers [n, inputs] with 128 added, steps [n, inputs / GROUP]) of e4m3 floats [n, inputs]."""
    if compiler_missing(torch.float32, torch.device("cpu")) is not None:
        return plain_whole_numbers(floats)
    from asyncengine.kernels.api import unpack_floats

    return unpack_floats(floats, GROUP, *_tables())


@functools.cache
def _tables() -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """Tables for `unpack_floats`: for each exponent, groups of one of all floats, and of it, up to this exponent."""
    table = np.zeros((16, 256), dtype=np.uint8)
    steps = np.empty(16, dtype=np.float32)
    for exponent in range(16):
        smaller = np.array([byte for byte in range(256) if (byte & 127) >> 3 <= exponent], dtype=np.uint8)
        groups = np.full((len(smaller), GROUP), exponent << 3, dtype=np.uint8)
        groups[:, 0] = smaller
        numbers, found = plain_whole_numbers(groups)
        table[exponent, smaller] = numbers[:, 0]
        steps[exponent] = found[0, 0]
    return table, steps


def plain_whole_numbers(floats: NDArray[np.uint8]) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """The same where no compiler is: what is right."""
    rows, inputs = floats.shape
    numbers = np.empty((rows, inputs), dtype=np.uint8)
    steps = np.empty((rows, inputs // GROUP), dtype=np.float32)
    block = min(rows, max(1, _BLOCK // inputs))
    halves, values = np.empty((block, inputs), dtype=np.int16), torch.empty((block, inputs))
    sizes = torch.empty((block, inputs))
    for first in range(0, rows, block):
        count = min(block, rows - first)
        own, part = halves[:count], values[:count]
        # a half-precision float of the same bits is a 256th of the number
        own[...] = floats[first : first + count].view(np.int8)
        own <<= np.int16(7)
        own &= np.int16(-16385)
        part.copy_(torch.from_numpy(own.view(np.float16)))
        largest = torch.abs(part, out=sizes[:count]).view(count, -1, GROUP).amax(-1).mul_(256.0)
        exponents = (largest.view(torch.int32) >> 23).clamp_(min=_LEAST_EXPONENT)
        step = (exponents - 6 << 23).view(torch.float32)
        part.view(count, -1, GROUP).mul_((256.0 / step)[..., None]).round_().add_(128.0)
        steps[first : first + count] = step.numpy()
        np.copyto(numbers[first : first + count], part.numpy(), casting="unsafe")
    return numbers, steps
