"""What a converter did to a tensor beside its name, as what undoes it: another order of rows or columns, other numbers,
another shape."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

Order = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Undo:
    """Of one tensor. Rows and columns of quantized matrices as well; the rest of plain numbers alone."""

    rows: Order | None = None
    """Row i of transformers' tensor is row rows[i] of the file."""
    columns: Order | None = None
    """Column i of the file is column columns[i] of transformers'."""
    decay: bool = False
    """The file has -exp of the numbers."""
    shape: Literal["", "taps", "flat"] = ""
    """Transformers has [channels, 1, taps] for [channels, taps]; or one dimension."""

    def shape_of(self, found: tuple[int, ...]) -> tuple[int, ...]:
        """In transformers, of a tensor of that shape. Raises `ValueError` for one that it cannot have."""
        rows, columns = found[0], found[-1]
        if (self.rows is not None and len(self.rows) != rows) or (
            self.columns is not None and (len(found) != 2 or len(self.columns) != columns)
        ):
            raise ValueError(f"its shape is {list(found)}")
        if self.shape == "taps" and len(found) != 2:
            raise ValueError(f"its shape is {list(found)}")
        if self.shape == "taps":
            return rows, 1, columns
        return (int(np.prod(found)),) if self.shape == "flat" else found

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Transformers' tensor, of a plain one in the file."""
        if self.rows is not None:
            tensor = tensor.index_select(0, torch.from_numpy(self.rows))
        if self.columns is not None:
            moved = torch.empty_like(tensor)
            moved[:, torch.from_numpy(self.columns)] = tensor
            tensor = moved
        if self.decay:
            tensor = torch.log(-tensor.float())
        return tensor.reshape(self.shape_of(tuple(tensor.shape))) if self.shape else tensor


def grouped_heads(keys: int, values: int, size: int, before: int = 0) -> Order:
    """llama.cpp has heads of values in turns of the heads of keys that they belong to, transformers has those of one
    head of keys beside each other: the order of `before` rows that stay and values * size rows, as `Undo.rows`."""
    each = values // keys
    head = np.arange(values, dtype=np.int64)
    places = (head % each) * keys + head // each
    moved = (places[:, None] * size + np.arange(size, dtype=np.int64)).reshape(-1)
    return np.concatenate([np.arange(before, dtype=np.int64), before + moved])
