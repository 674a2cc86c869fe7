"""Attention of encoders on the CPU, by the compiled kernels of paged attention over a pool of the step alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from asyncengine.attention.base import LayerSpec, MergedHeads, StepView
from asyncengine.attention.cpu import CompiledBackend

PAGE = 64
"""Tokens of a page: a sequence begins with one of its own."""


class CompiledSequences:
    """`SequenceAttention` in compiled kernels, for what `CompiledBackend` takes."""

    name = "compiled"

    def __init__(self, layers: Sequence[LayerSpec], dtype: torch.dtype) -> None:
        self._layers, self._dtype = tuple(layers), dtype
        self._paged = CompiledBackend(self._layers, 1, PAGE, dtype, one_pool=True)
        self.tile_types = self._paged.tile_types

    def plan(self, counts: Sequence[int]) -> None:
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

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        self._paged.write(layer, key, value)

    def attend(self, layer: int, query: torch.Tensor) -> torch.Tensor:
        return self._paged.attend(layer, query)

    def attend_merged(
        self, layer: int, qkv: torch.Tensor, heads: MergedHeads, cos: torch.Tensor, sin: torch.Tensor
    ) -> torch.Tensor:
        """Attend to whole texts, with the arguments of `CompiledBackend.attend_merged`."""
        return self._paged.attend_merged(layer, qkv, heads, cos, sin)
