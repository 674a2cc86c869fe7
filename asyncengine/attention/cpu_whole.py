"""Attention of encoders on the CPU, by the compiled kernels of paged attention over a pool of the step alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from asyncengine.attention.base import LayerSpec, StepView
from asyncengine.attention.cpu import CompiledBackend

PAGE = 64
"""Tokens of a page: a sequence begins with one of its own."""


class CompiledSequences:
    """`SequenceAttention` in compiled kernels, for what `CompiledBackend` takes."""

    def __init__(self, layers: Sequence[LayerSpec], dtype: torch.dtype) -> None:
        self._layers, self._dtype = tuple(layers), dtype
        self._paged = CompiledBackend(self._layers, 1, PAGE, dtype, one_pool=True)

    def plan(self, counts: Sequence[int]) -> CompiledBackend:
        """The pool grows to the longest step there was: one layer's keys and values of its tokens."""
        lengths = np.array(counts, dtype=np.int64)
        pages = -(-lengths // PAGE)
        ends = np.cumsum(pages)
        needed = int(ends[-1])
        if needed > self._paged.num_pages:
            self._paged = CompiledBackend(self._layers, needed, PAGE, self._dtype, one_pool=True)
        table = (ends - pages)[:, None] + np.arange(pages.max())
        bounds = np.concatenate(([0], np.cumsum(lengths)))
        places = np.arange(bounds[-1]) + np.repeat((ends - pages) * PAGE - bounds[:-1], lengths)
        self._paged.plan(
            StepView(np.zeros_like(lengths), lengths, bounds, table.astype(np.int32), torch.from_numpy(places))
        )
        return self._paged
