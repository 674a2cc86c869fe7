"""What a converter did to a tensor beside its name, as what undoes it: another order of rows or columns, other numbers,
another shape."""

from __future__ import annotations

import math
from collections.abc import Sequence
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
    among: int = 0
    """Rows of the file's tensor, where `rows` takes some of them; 0: it takes all."""
    columns: Order | None = None
    """Column i of the file is column columns[i] of transformers'."""
    decay: bool = False
    """The file has -exp of the numbers."""
    shape: Literal["", "taps", "flat", "heads"] = ""
    """Transformers has [channels, 1, taps] for [channels, taps]; one dimension; or [1, 1, heads, 1]."""

    def shape_of(self, found: tuple[int, ...]) -> tuple[int, ...]:
        """In transformers, of a tensor of that shape. Raises `ValueError` for one that it cannot have."""
        rows, columns = found[0], found[-1]
        if (self.rows is not None and (self.among or len(self.rows)) != rows) or (
            self.columns is not None and (len(found) != 2 or len(self.columns) != columns)
        ):
            raise ValueError(f"its shape is {list(found)}")
        if self.shape == "taps" and len(found) < 2:
            raise ValueError(f"its shape is {list(found)}")
        numbers = math.prod(found)
        match self.shape:
            case "taps":
                return numbers // columns, 1, columns
            case "flat":
                return (numbers,)
            case "heads":
                return 1, 1, numbers, 1
        return found if self.rows is None else (len(self.rows), *found[1:])

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


def taking_turns(groups: int, sizes: Sequence[int], wanted: Sequence[int]) -> Order:
    """Rows go group by group, and in each part by part of so many rows (`sizes`): those of the parts `wanted`, of each
    the rows of all groups, as `Undo.rows`."""
    begins = np.cumsum([0, *sizes])
    groups_at = np.arange(groups, dtype=np.int64)[:, None] * begins[-1]
    return np.concatenate([(groups_at + begins[part] + np.arange(sizes[part])).reshape(-1) for part in wanted])


def grouped_heads(keys: int, values: int, size: int, before: int = 0) -> Order:
    """llama.cpp has heads of values in turns of the heads of keys that they belong to, transformers has those of one
    head of keys beside each other: the order of `before` rows that stay and values * size rows, as `Undo.rows`."""
    each = values // keys
    head = np.arange(values, dtype=np.int64)
    places = (head % each) * keys + head // each
    moved = (places[:, None] * size + np.arange(size, dtype=np.int64)).reshape(-1)
    return np.concatenate([np.arange(before, dtype=np.int64), before + moved])
