"""gpt-oss' experts: llama.cpp's converter takes gate and up apart; in transformers' tensors their rows take turns, as
they did in Ollama's first files.

Transformers has one tensor for all experts, [experts, inputs, outputs]; a file has [experts, outputs, inputs].
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from asyncengine.layers.stored import GroupedRows, StoredMatrix

GATE, UP, DOWN = "mlp.experts.gate_proj", "mlp.experts.up_proj", "mlp.experts.down_proj"
GATE_UP = "mlp.experts.gate_up_proj"
MATRICES = tuple(f"{name}.weight" for name in (GATE, UP, DOWN, GATE_UP))
"""How names of tensors [experts, outputs, inputs] end."""


class ExpertTensors(NamedTuple):
    """The names in the file of what is one tensor of transformers'."""

    parts: tuple[str, ...]
    """Gate and up, whose rows take turns; or the one there is."""
    shape: tuple[int, ...]
    """In transformers."""


def joined(shapes: dict[str, tuple[int, ...]]) -> dict[str, ExpertTensors]:
    """Transformers' tensors of experts by name, out of the `shapes` of a file's by name. Raises `ValueError` for
    tensors that do not go together."""
    found: dict[str, ExpertTensors] = {}
    for name, shape in shapes.items():
        for stem, there in ((GATE, GATE_UP), (GATE_UP, GATE_UP), (DOWN, DOWN)):
            prefix, part, suffix = name.partition(stem)
            if not part or suffix not in (".weight", ".bias"):
                continue
            parts = (name, f"{prefix}{UP}{suffix}") if stem == GATE else (name,)
            if len(shape) != (3 if suffix == ".weight" else 2) or any(shapes.get(each) != shape for each in parts):
                raise ValueError(f"{parts[-1]} does not go with {name}")
            outputs = shape[1] * len(parts)
            whole = (shape[0], shape[2], outputs) if suffix == ".weight" else (shape[0], outputs)
            found[f"{prefix}{there}{'' if suffix == '.weight' else '_bias'}"] = ExpertTensors(parts, whole)
    return found


def interleaved(parts: list[torch.Tensor]) -> torch.Tensor:
    """Tensors [experts, outputs] or [experts, outputs, inputs], whose outputs take turns, as transformers has them."""
    whole = parts[0] if len(parts) == 1 else torch.stack(parts, dim=2).flatten(1, 2)
    return whole.transpose(1, 2) if whole.ndim == 3 else whole


class TakingTurns:
    """A `StoredMatrix`: row 2i is row i of `even`, row 2i + 1 that of `odd`. Both are of one form."""

    order: NDArray[np.int64] | None = None

    def __init__(self, even: StoredMatrix, odd: StoredMatrix) -> None:
        self.name, self.form = even.name, even.form
        self.shape = (2 * even.shape[0], even.shape[1])
        self._even, self._odd = even, odd

    def rows(self, first: int, last: int) -> GroupedRows:
        """Rows [first, last), unpacked into memory of their own."""
        even = self._even.rows((first + 1) // 2, (last + 1) // 2)
        odd = self._odd.rows(first // 2, last // 2)
        begin = first % 2

        def woven(left: NDArray[Any] | None, right: NDArray[Any] | None) -> Any:
            if left is None or right is None:
                return None
            both = np.empty((last - first, *left.shape[1:]), dtype=left.dtype)
            both[begin::2], both[1 - begin :: 2] = left, right
            return both

        return GroupedRows(*(woven(left, right) for left, right in zip(even, odd, strict=True)))

    def release(self, first: int, last: int) -> None:
        """Rows [first, last) will not be read again."""
        self._even.release((first + 1) // 2, (last + 1) // 2)
        self._odd.release(first // 2, last // 2)
