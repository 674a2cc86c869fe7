"""The layout of a quantized matrix: panels of sixteen outputs, each one stream of chunks.

A chunk is `chunk` inputs of a panel's outputs: first what their groups have (scales, steps, minima, zeros), filled up
to whole lines of 64 bytes, then the numbers, sixteen inputs after sixteen. So a panel is read from its beginning to its
end, and whatever is asked for ahead, it is one distance.

    numbers of 16 inputs   8 bits: 4 lines, each 4 inputs of 16 outputs
                           4 bits: 2 lines, each 8 inputs: the first four in the lower halves of the bytes
                           6 bits: the same 2 lines of the lower four bits, and a line with the upper two of all 16
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from asyncengine.kernels.cpu.vectors import LANES, LINE

PANEL = LANES
"""Outputs of a panel."""
GROUP = 64
"""Inputs of a row of x that share a scale at most."""
UNIT = 16
"""Inputs whose numbers follow each other in whole lines."""
INT4_GROUP = 32
"""Inputs of a weight that share a scale where the engine itself rounds to 4 bits."""
GROUPS = (128, 64, 32, 16)
"""Inputs of a weight that can share a scale."""
_SIZES = {"float16": 2, "bfloat16": 2, "float32": 4}


@dataclass(frozen=True)
class PanelForm:
    """The part of `layers.stored.NumberForm` that a kernel is compiled for. Raises `ValueError` if there is no kernel.

    Whether rows have scales of their own is not part of it: that is one product more at the end.
    """

    bits: int
    """4, 6 or 8."""
    group: int
    """16, 32, 64 or 128; 0 where rows alone have scales."""
    below: str = "middle"
    """"middle", "zeros", "minima" or "table"."""
    block: int = 0
    """Inputs that share a scale of scales; 0: scales are numbers of their own."""
    scale: str = "float16"
    """The type of scales and minima (of blocks, where there are blocks)."""
    table: tuple[int, ...] = ()
    """With `below` "table"; it has sixteen entries of -128 .. 127."""
    exact: bool = False
    """Whether x is multiplied as it comes, in float32; else it is rounded to 8 bits. Panels are the same."""

    def __post_init__(self) -> None:
        wrong = self.bits not in (4, 6, 8) or self.group not in (0, *GROUPS) or self.scale not in _SIZES
        wrong |= self.below not in ("middle", "zeros", "minima", "table")
        wrong |= (self.below == "table") != (len(self.table) == 16) or (self.below == "table" and self.bits != 4)
        wrong |= self.block % max(self.group, GROUP) != 0 or (self.block > 0 and self.group == 0)
        wrong |= self.below in ("zeros", "minima") and self.group == 0
        if wrong or (self.below == "zeros" and self.block > 0):
            raise ValueError(f"there is no kernel for {self}")

    @cached_property
    def chunk(self) -> int:
        """Inputs of a chunk: a block, or enough that filling lines up wastes few bytes."""
        if self.block:
            return self.block
        return 2 * GROUP if self.group == 2 * GROUP or self.group * _SIZES[self.scale] == 2 * GROUP else GROUP

    @cached_property
    def planes(self) -> dict[str, tuple[int, int, int]]:
        """Planes of scales, steps, minima and zeros of groups, by `GroupedRows`' names: (offset in a chunk, bytes of an
        item, items of a chunk for each output)."""
        if not self.group:
            return {}
        groups, size = self.chunk // self.group, _SIZES[self.scale]
        wide = (size, 1 if self.block else groups)
        sizes = {"scales": wide, **({"minima": wide} if self.below == "minima" else {})}
        if self.block:
            sizes["steps"] = (1, groups)
            if self.below == "minima":
                sizes["minimum_steps"] = (1, groups)
        if self.below == "zeros":
            sizes["zeros"] = (1, groups)
        planes, offset = {}, 0
        for name, (item_size, count) in sizes.items():
            planes[name] = (offset, item_size, count)
            offset += item_size * count * PANEL
        return planes

    @cached_property
    def head(self) -> int:
        """Bytes before a chunk's numbers."""
        used = max((offset + size * count * PANEL for offset, size, count in self.planes.values()), default=0)
        return -(-used // LINE) * LINE

    @cached_property
    def unit_bytes(self) -> int:
        """Bytes of the numbers of `UNIT` inputs."""
        return UNIT * PANEL * self.bits // 8

    @cached_property
    def chunk_bytes(self) -> int:
        return self.head + self.chunk // UNIT * self.unit_bytes

    @cached_property
    def shared(self) -> int:
        """Inputs of x that share a scale: no more than those of a weight's group, but 32 at least."""
        return GROUP // 2 if 0 < self.group < GROUP else GROUP

    @cached_property
    def summed(self) -> int:
        """Inputs of x whose sum a product needs: those of a group, and of one scale of x."""
        return min(self.group or GROUP, self.shared)

    @cached_property
    def spares(self) -> bool:
        """Whether the largest number of a row of x is multiplied by itself, in float32, and not rounded with those that
        would share its scale. In real models one input is often a hundred times as large as most: to spare it halves
        what rounding costs. It takes as long as a few inputs more, too long beside groups of 64."""
        return self.shared < GROUP and not self.exact

    @cached_property
    def row_bytes(self) -> tuple[int, int, int]:
        """Bytes of a row of x for a chunk: its numbers, their scales, and sums."""
        numbers, scales = (self.chunk * 4, 0) if self.exact else (self.chunk, self.chunk // self.shared * 4)
        return numbers, scales, self.chunk // self.summed * 4

    @cached_property
    def offset(self) -> int:
        """The offset of stored numbers from those that are multiplied, which the sums of x take off again."""
        if self.below == "table":
            return max(0, -min(self.table))
        return 1 << (self.bits - 1) if self.below == "middle" else 0

    @cached_property
    def largest(self) -> int:
        """The largest of stored numbers, as they are multiplied."""
        return self.offset + max(self.table) if self.table else (1 << self.bits) - 1

    def chunks(self, inputs: int) -> int:
        """Chunks of a panel."""
        return -(-inputs // self.chunk)


def int_form(bits: int) -> PanelForm:
    """The form that `quantize` rounds to: 8 bits with a scale for each output, or 4 bits with a scale and a
    minimum for every 32 inputs."""
    return PanelForm(8, 0) if bits == 8 else PanelForm(4, INT4_GROUP, "minima", scale="bfloat16")
