"""Tensors of transformers' that are several in a file: gpt-oss' experts, Granite's gates above what they multiply, what
makes keys and values of a latent vector."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from asyncengine.layers.stored import GroupedRows, StoredMatrix
from asyncengine.models.formats.gguf import gpt_oss

Shapes = dict[str, tuple[int, ...]]
GATE, UP, BOTH = "gate_linear.weight", "up_linear.weight", "input_linear.weight"
_OUT = "block_sparse_moe.output_linear.weight"
_KEYS, _VALUES, _BOTH = (f"self_attn.{name}_b_proj.weight" for name in ("k", "v", "kv"))
MATRICES = (*gpt_oss.MATRICES, f"block_sparse_moe.{GATE}", f"block_sparse_moe.{UP}", _OUT, _KEYS, _VALUES)
"""How names of tensors [experts, outputs, inputs] end."""


class Join(NamedTuple):
    """The names in the file of what is one tensor of transformers'."""

    parts: tuple[str, ...]
    """Two, or the one that lies otherwise."""
    shape: tuple[int, ...]
    """In transformers."""
    below: bool = False
    """Of each expert, the second lies below the first; else their rows take turns, and inputs come first."""
    turned: bool = False
    """Of each head, the second lies below the first, whose rows are columns in the file: never as it is stored."""


def joined(family: str, shapes: Shapes) -> dict[str, Join]:
    """Transformers' tensors by name, out of the `shapes` of a file's by name. Raises `ValueError` for tensors that do
    not go together."""
    if family == "gpt_oss":
        return {name: Join(*each) for name, each in gpt_oss.joined(shapes).items()}
    if family == "kimi_linear":
        return _latent(shapes)
    return _granite(shapes) if family == "granitemoehybrid" else {}


def _granite(shapes: Shapes) -> dict[str, Join]:
    found: dict[str, Join] = {}
    for name, shape in shapes.items():
        if name.endswith(_OUT):
            found[name] = Join((name,), shape, True)
        if not name.endswith(GATE):
            continue
        other = name.removesuffix(GATE) + UP
        if shapes.get(other) != shape or len(shape) < 2:
            raise ValueError(f"{other} does not go with {name}")
        whole = (*shape[:-2], 2 * shape[-2], shape[-1])
        found[name.removesuffix(GATE) + BOTH] = Join((name, other), whole, True)
    return found


def _latent(shapes: Shapes) -> dict[str, Join]:
    """Of each head, keys [rank, size] and values [size, rank]."""
    found: dict[str, Join] = {}
    for name, shape in shapes.items():
        if not name.endswith(_KEYS):
            continue
        other = name.removesuffix(_KEYS) + _VALUES
        values = shapes.get(other, ())
        if len(shape) != 3 or len(values) != 3 or (shape[0], shape[1]) != (values[0], values[2]):
            raise ValueError(f"{other} does not go with {name}")
        whole = (shape[0] * (shape[2] + values[1]), shape[1])
        found[name.removesuffix(_KEYS) + _BOTH] = Join((name, other), whole, turned=True)
    return found


def plain(join: Join, parts: list[torch.Tensor]) -> torch.Tensor:
    """Of tensors as the file has them."""
    if join.turned:
        keys, values = parts
        dtype = torch.promote_types(keys.dtype, values.dtype)
        return torch.cat((keys.transpose(1, 2).to(dtype), values.to(dtype)), dim=1).reshape(join.shape)
    return torch.cat(parts, dim=-2) if join.below else gpt_oss.interleaved(parts)


def stored(join: Join, matrices: list[StoredMatrix]) -> StoredMatrix:
    """Of matrices [experts' outputs, inputs]."""
    if len(matrices) == 1:
        return matrices[0]
    if not join.below:
        return gpt_oss.TakingTurns(*matrices)
    experts = join.shape[0] if len(join.shape) == 3 else 1
    gate, up = matrices
    return PieceBelowPiece(gate, up, gate.shape[0] // experts)


class PieceBelowPiece:
    """A `StoredMatrix`: `size` rows of one matrix, so many of the other, and so on. Both are of one form."""

    order: NDArray[np.int64] | None = None

    def __init__(self, first: StoredMatrix, second: StoredMatrix, size: int) -> None:
        self.name, self.form = first.name, first.form
        self.shape = (2 * first.shape[0], first.shape[1])
        self._matrices, self._size = (first, second), size

    def _pieces(self, first: int, last: int) -> list[tuple[StoredMatrix, int, int]]:
        """(matrix, first row, last row) of what rows [first, last) are."""
        found, size = [], self._size
        while first < last:
            piece, inner = divmod(first, size)
            count = min(size - inner, last - first)
            begin = piece // 2 * size + inner
            found.append((self._matrices[piece % 2], begin, begin + count))
            first += count
        return found

    def rows(self, first: int, last: int) -> GroupedRows:
        """Rows [first, last), unpacked into memory of their own."""
        pieces = [matrix.rows(*span) for matrix, *span in self._pieces(first, last)] or [self._matrices[0].rows(0, 0)]

        def whole(parts: tuple[NDArray[Any] | None, ...]) -> Any:
            given = [part for part in parts if part is not None]
            return np.concatenate(given) if given else None

        return GroupedRows(*(whole(parts) for parts in zip(*pieces, strict=True)))

    def release(self, first: int, last: int) -> None:
        """Rows [first, last) will not be read again."""
        for matrix, *span in self._pieces(first, last):
            matrix.release(*span)
