"""Memory for one large result after the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

_use_count: Callable[[int], int] | None = getattr(torch._C, "_storage_Use_Count", None)


_ALIKE = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64}
"""numpy's types by bytes of a number: it has no bfloat16."""


def new_tensor(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """An uninitialised tensor on the CPU, made without letting go of the interpreter's lock as `torch.empty` does."""
    return torch.from_numpy(np.empty(shape, dtype=_ALIKE[dtype.itemsize])).view(dtype)


_LARGE = 2**18
"""Numbers of a result for which the system maps fresh pages each time."""


class OutputBufferPool:
    """float32 memory for one result after the other: mapping fresh pages for megabytes takes longer than filling them.

    A result keeps its numbers as long as it, or a view of it, is referenced.
    """

    def __init__(self) -> None:
        self._last: torch.Tensor | None = None

    def take(self, shape: tuple[int, ...]) -> torch.Tensor:
        """An uninitialised tensor of that shape, contiguous."""
        size = 1
        for extent in shape:
            size *= extent
        if size < _LARGE:
            return torch.empty(shape, dtype=torch.float32)
        if self._last is None or self._last.numel() < size or self._last.numel() > 4 * size or self._is_held():
            self._last = None if _use_count is None else torch.empty(size, dtype=torch.float32)
        return torch.empty(shape, dtype=torch.float32) if self._last is None else self._last[:size].view(shape)

    def _is_held(self) -> bool:
        """Whether the last result is still referenced, by torch's count: this tensor, and the storage looked at
        here."""
        assert self._last is not None
        assert _use_count is not None
        storage: Any = self._last.untyped_storage()
        return _use_count(storage._cdata) > 2
