"""The output layer: logits of a few rows over a large vocabulary, from a weight that is often the embedding as well.

Packing such a weight for oneDNN would make a second copy of the largest matrix of a small model. A compiled kernel
reads it as it lies, at memory's speed, and gives float32, which is what sampling works in.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear

from asyncengine.cpu import compiler_missing

logger = logging.getLogger("asyncengine")

_PROBE_ROWS = 5
_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
_use_count: Callable[[int], int] | None = getattr(torch._C, "_storage_Use_Count", None)


class OutputLayer(nn.Module):
    """x -> float32 x W^T + b. The parameter `weight` [vocabulary, width] may be the embedding's very own."""

    def __init__(self, weight: Any, bias: Any) -> None:
        from asyncengine.cpu import products

        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.weight, self.bias = weight, bias
        self._products = products
        self._memory = ReusedMemory()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.numel() // self.in_features
        if not self._products.product_pays(x.dtype, rows):
            return linear(x, self.weight, self.bias).float()
        out = self._memory.take((*x.shape[:-1], self.out_features))
        self._products.product(x, self.weight, out)
        return out if self.bias is None else out.add_(self.bias)


class ReusedMemory:
    """float32 memory for one result after the other: mapping fresh pages for megabytes takes longer than filling them.

    A result keeps its numbers for as long as anybody holds it, or a part of it.
    """

    def __init__(self) -> None:
        self._last: torch.Tensor | None = None

    def take(self, shape: tuple[int, ...]) -> torch.Tensor:
        """An uninitialised tensor of that shape, contiguous."""
        size = 1
        for extent in shape:
            size *= extent
        if self._last is None or self._last.numel() < size or self._last.numel() > 4 * size or self._is_held():
            self._last = None if _use_count is None else torch.empty(size, dtype=torch.float32)
        return torch.empty(shape, dtype=torch.float32) if self._last is None else self._last[:size].view(shape)

    def _is_held(self) -> bool:
        """Does anybody hold what was handed out last? torch counts: this tensor, and the storage looked at here."""
        assert self._last is not None
        assert _use_count is not None
        storage: Any = self._last.untyped_storage()
        return _use_count(storage._cdata) > 2


def faster_output_layer(head: Any, dtype: torch.dtype) -> OutputLayer | None:
    """The same as `head`, if that is a linear on this CPU and a compiled kernel gives the same numbers; else None."""
    if type(head) is not nn.Linear or compiler_missing(dtype, head.weight.device) or not head.weight.is_contiguous():
        return None
    from asyncengine.cpu.products import product_fits

    if not product_fits(dtype, head.in_features, head.out_features):
        return None
    x = torch.randn((1, _PROBE_ROWS, head.in_features), generator=torch.Generator().manual_seed(0)).to(dtype)
    expected = head(x).float()
    try:
        candidate = OutputLayer(head.weight, head.bias)
        found = candidate(x)
    except Exception as error:  # a compiler that does not know this CPU: torch's own form stays
        logger.warning("the output layer is torch's own: %s: %s", type(error).__name__, error)
        return None
    difference = float((expected - found).abs().max())
    return candidate if difference <= _TOLERANCE[dtype] * max(float(expected.abs().max()), 1e-6) else None
