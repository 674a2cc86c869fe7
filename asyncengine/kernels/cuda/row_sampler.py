"""Sampling on a GPU by `sampling`'s kernels: what a step launches, and the memory that they work in."""

from __future__ import annotations

from typing import Any

import torch

from asyncengine.kernels.cuda.sampling import BLOCK, PIVOTS, SETTINGS, STATE, gather, narrow, scan, settle, total

_SHAPES = {"scan": (8, 4), "narrow": (2, 1), "gather": (2, 1), "settle": (2, 4), "total": (2, 1)}
"""Shape of each kernel's programs: blocks that one reads, and its warps."""
_PROGRAMS = 2048
"""Programs of a kernel that most rows need nothing of: about what a GPU runs at once."""
_NARROWINGS = 2
_ROOM = 16384
"""Candidates of a row for its threshold."""


class RowSampler:
    """Chooses a token for each of up to `max_rows` rows. Holds working memory: one step at a time."""

    def __init__(self, slots: int, max_rows: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size, self._max_rows = vocab_size, max_rows
        self._blocks = -(-vocab_size // BLOCK.value)
        self._chunks = {name: -(-self._blocks // blocks) for name, (blocks, _) in _SHAPES.items()}
        int32: dict[str, Any] = {"dtype": torch.int32, "device": device}
        self.settings = torch.zeros((slots + 1, SETTINGS.value), **int32)
        """Parameters by slot; the last slot is for padding and takes the largest logit."""
        # arrivals must begin at zero, and each kernel leaves them so
        self._counters = torch.zeros((4, max_rows), **int32)
        self._stats = torch.empty((max_rows, 3, self._blocks), device=device)
        self.states = torch.empty((max_rows, STATE.value), device=device)
        self._parts = torch.empty((max_rows, self._chunks["narrow"], PIVOTS.value), device=device)
        self._candidates = torch.empty((max_rows, _ROOM), device=device)

    def sample(
        self,
        logits: torch.Tensor,
        slots: torch.Tensor,
        positions: torch.Tensor,
        tokens: torch.Tensor,
        best: torch.Tensor,
        truncated: bool = True,
    ) -> None:
        """Write each row's token, 0 where void, and its largest logit, infinite where one is not a number.

        logits [rows, vocab] of any float type, slots and positions int64 [rows] on the device; tokens int64 [rows],
        best float32 [rows]. Only launches kernels; fewer if no row is `truncated`.
        """
        if len(logits) > self._max_rows:
            for begin in range(0, len(logits), self._max_rows):
                rows = slice(begin, begin + self._max_rows)
                self.sample(logits[rows], slots[rows], positions[rows], tokens[rows], best[rows], truncated)
        elif len(logits):
            inputs = (self.settings, slots, positions, tokens)
            needs, arrivals, awaited, counts = self._counters
            shared, most = (self._stats, self.states, needs), {"most": 1 << (self._blocks - 1).bit_length()}
            gathered = (counts, self._candidates.view(logits.dtype), 4 * _ROOM // logits.element_size())
            later = _SHAPES["total"][0]
            self._launch(scan, logits, *inputs, best, *shared, arrivals, awaited, counts, **most, later=later)
            if truncated:
                for _ in range(_NARROWINGS):
                    self._launch(narrow, logits, *shared, arrivals, awaited, self._parts, **most)
                self._launch(gather, logits, *shared, *gathered)
                self._launch(settle, logits, *shared, awaited, *gathered, **most)
                self._launch(total, logits, *inputs, *shared, arrivals, awaited, **most)

    def _launch(self, kernel: Any, logits: torch.Tensor, *arguments: Any, **options: int) -> None:
        (blocks, warps), chunks, rows = _SHAPES[kernel.__name__], self._chunks[kernel.__name__], len(logits)
        grid = (chunks, rows) if kernel is scan else (rows if kernel is settle else min(rows * chunks, _PROGRAMS),)
        size = (rows, self._vocab_size, self._blocks, chunks)
        options = {"per_chunk": blocks, "num_warps": warps, "num_stages": 1, **options}
        kernel[grid](logits, logits.stride(0), *arguments, *size, **options)
