"""ggml's tensor types: block layouts, and the forms of their numbers.

A k-quant is a block of 256 numbers in groups of 16 or 32 whose scales are small whole numbers times the block's; a
legacy type is a block of 32 numbers with a scale, and perhaps a minimum. Layouts: ggml-common.h.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from asyncengine.execution.layers.stored import Below, NumberForm

IQ4_TABLE = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
MXFP4_TABLE = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""Twice the value of each e2m1 number: the block's scale is half of the standard's."""


@dataclass(frozen=True, slots=True)
class BlockType:
    """A type of tensors: blocks of `numbers` numbers of a row take `nbytes` bytes.

    `form` is that of a quantized type and `plain` the name that safetensors has for a type of plain numbers; a type
    with neither is not read.
    """

    name: str
    numbers: int
    nbytes: int
    form: NumberForm | None = None
    plain: str | None = None


def _legacy(name: str, nbytes: int, bits: int, below: Below = "middle") -> BlockType:
    return BlockType(name, 32, nbytes, NumberForm(bits, 32, below, table=IQ4_TABLE if below == "table" else ()))


def _kquant(name: str, nbytes: int, bits: int, group: int, below: Below = "middle") -> BlockType:
    table = IQ4_TABLE if below == "table" else ()
    return BlockType(name, 256, nbytes, NumberForm(bits, group, below, block=256, table=table))


_MXFP4 = NumberForm(4, 32, "table", scale_dtype="bfloat16", table=MXFP4_TABLE)

_UNREAD = {
    9: ("Q8_1", 32, 40), 15: ("Q8_K", 256, 292), 16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50), 21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82),
    24: ("I8", 1, 1), 25: ("I16", 1, 2), 26: ("I32", 1, 4), 27: ("I64", 1, 8), 29: ("IQ1_M", 256, 56),
    34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66), 40: ("NVFP4", 64, 36), 41: ("Q1_0", 128, 18),
}  # fmt: skip
BLOCK_TYPES: Mapping[int, BlockType] = {
    0: BlockType("F32", 1, 4, plain="F32"),
    1: BlockType("F16", 1, 2, plain="F16"),
    28: BlockType("F64", 1, 8, plain="F64"),
    30: BlockType("BF16", 1, 2, plain="BF16"),
    2: _legacy("Q4_0", 18, 4),
    3: _legacy("Q4_1", 20, 4, "minima"),
    6: _legacy("Q5_0", 22, 6),
    7: _legacy("Q5_1", 24, 6, "minima"),
    8: _legacy("Q8_0", 34, 8),
    20: _legacy("IQ4_NL", 18, 4, "table"),
    10: _kquant("Q2_K", 84, 4, 16, "minima"),
    11: _kquant("Q3_K", 110, 4, 16),
    12: _kquant("Q4_K", 144, 4, 32, "minima"),
    13: _kquant("Q5_K", 176, 6, 32, "minima"),
    14: _kquant("Q6_K", 210, 6, 16),
    23: _kquant("IQ4_XS", 136, 4, 32, "table"),
    39: BlockType("MXFP4", 32, 17, _MXFP4),
    # Ollama's first gpt-oss files (August 2025) have the standard's order: two neighbours in a byte
    4: BlockType("MXFP4_PAIRS", 32, 17, _MXFP4),
    **{number: BlockType(*given) for number, given in _UNREAD.items()},
}
"""Types by their number in files."""

GONE: Mapping[int, str] = {
    5: "Q4_3", 31: "Q4_0_4_4", 32: "Q4_0_4_8", 33: "Q4_0_8_8", 36: "IQ4_NL_4_4", 37: "IQ4_NL_4_8",
    38: "IQ4_NL_8_8",
}  # fmt: skip
"""Types that llama.cpp itself no longer reads."""
