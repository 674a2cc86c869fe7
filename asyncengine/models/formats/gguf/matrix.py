"""A quantized matrix of a mapped GGUF file: rows of blocks, unpacked where somebody asks for them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from asyncengine.kernels.cpu import compiler_missing
from asyncengine.layers.stored import GroupedRows, NumberForm
from asyncengine.models.formats.gguf.container import GgufFile, TensorPlace
from asyncengine.models.formats.gguf.unpack import UNPACKERS, compiled


@dataclass(slots=True, eq=False)
class BlockMatrix:
    """A `StoredMatrix`."""

    name: str
    shape: tuple[int, int]
    form: NumberForm
    file: GgufFile
    place: TensorPlace
    source: NDArray[np.int64] | None = None
    """Row i of the matrix is row source[i] of the file, which may have more; None: they are the same."""
    order: NDArray[np.int64] | None = None

    @property
    def _row_bytes(self) -> int:
        return self.place.nbytes // self.place.shape[0]

    def rows(self, first: int, last: int) -> GroupedRows:
        """Rows [first, last), unpacked into memory of their own."""
        stored = self.file.array(self.place).reshape(self.place.shape[0], self._row_bytes)
        if compiler_missing(torch.float32, torch.device("cpu")) is None:
            places = np.arange(first, last) if self.source is None else self.source[first:last]
            return compiled(self.name, stored, places)
        wanted = stored[first:last] if self.source is None else stored[self.source[first:last]]
        return UNPACKERS[self.name](wanted.reshape(len(wanted), -1, self.place.kind.nbytes))

    def release(self, first: int, last: int) -> None:
        """Rows [first, last) will not be read again; if they lie among others in the file, those may be read again."""
        if last <= first:
            return
        if self.source is not None:
            first, last = int(self.source[first:last].min()), int(self.source[first:last].max()) + 1
        self.file.release(self.place.offset + first * self._row_bytes, self.place.offset + last * self._row_bytes)
