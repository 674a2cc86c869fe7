"""A quantized matrix of a mapped GGUF file: rows of blocks, unpacked when they are asked for."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from asyncengine.layers.stored import GroupedRows, NumberForm
from asyncengine.models.formats.gguf.container import GgufFile, TensorPlace


@dataclass(slots=True, eq=False)
class BlockMatrix:
    """A `StoredMatrix` of a mapped file, unpacked when rows are asked for.

    Row i is row `source[i]` of the file's tensor, which may have more rows; without `source` they are the same.
    """

    name: str
    shape: tuple[int, int]
    form: NumberForm
    file: GgufFile
    place: TensorPlace
    source: NDArray[np.int64] | None = None
    order: NDArray[np.int64] | None = None

    @property
    def _row_bytes(self) -> int:
        return self.place.nbytes // self.place.shape[0]

    def rows(self, first: int, last: int) -> GroupedRows:
        """Rows [first, last), unpacked into memory of their own."""
        from asyncengine.kernels.cpu.unpack_blocks import unpack_blocks  # numba's import is slow

        stored = self.file.array(self.place).reshape(self.place.shape[0], self._row_bytes)
        wanted = np.arange(first, last) if self.source is None else self.source[first:last]
        found = unpack_blocks(self.name, stored, wanted)
        scales = _exponents(found.scales) if self.name.startswith("MXFP4") else _halves(found.scales)
        minima = _halves(found.minima) if found.minima.size else None
        if minima is not None and self.name in ("Q4_1", "Q5_1"):
            minima = -minima  # these types add their minimum
        return GroupedRows(
            found.numbers, scales, found.steps if found.steps.size else None,
            minima=minima, minimum_steps=found.minimum_steps if found.minimum_steps.size else None,
        )  # fmt: skip

    def release(self, first: int, last: int) -> None:
        """Rows [first, last) will not be read again; if they lie among others in the file, those may be read again."""
        if last <= first:
            return
        if self.source is not None:
            first, last = int(self.source[first:last].min()), int(self.source[first:last].max()) + 1
        self.file.release(self.place.offset + first * self._row_bytes, self.place.offset + last * self._row_bytes)


def _halves(stored: NDArray[np.uint16]) -> NDArray[np.float32]:
    return stored.view("<f2").astype(np.float32)


def _exponents(stored: NDArray[np.uint16]) -> NDArray[np.float32]:
    """Half of 2^(e - 127), as the table holds twice the numbers; below e = 2 that is no normal number."""
    exponents = stored.astype(np.uint32)
    bits = np.where(exponents < 2, np.uint32(0x200000) << np.minimum(exponents, 2), (exponents - 1) << 23)
    return bits.astype(np.uint32).view(np.float32)
