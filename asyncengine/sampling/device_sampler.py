"""Sampling by kernels on a GPU: what a step launches, in a CUDA graph or by itself, and the memory that it needs."""

from __future__ import annotations

from typing import Any

import torch

from asyncengine.device.transfer import upload
from asyncengine.kernels.cuda.sampling import BLOCK, PIVOTS, SETTINGS, STATE, gather, narrow, scan, total
from asyncengine.sampling.slot_params import SlotParams

_SHAPES = {"scan": (8, 4), "narrow": (4, 4), "gather": (4, 4), "total": (8, 4)}
"""Of each kernel's programs: blocks that one reads, and its warps."""
_PROGRAMS = 1024
"""Of a kernel that most rows need nothing of: about what a GPU runs at once."""
_NARROWINGS = 2
_ROOM = 16384
"""Candidates of a row for its threshold."""


class DeviceSampler:
    """Chooses a token for each of up to `max_rows` rows. Holds working memory: one step at a time."""

    def __init__(self, params: SlotParams, max_rows: int, vocab_size: int, device: torch.device) -> None:
        self._params, self._device, self._vocab_size = params, device, vocab_size
        self._max_rows = max_rows
        self._blocks = -(-vocab_size // BLOCK.value)
        self._chunks = {name: -(-self._blocks // blocks) for name, (blocks, _) in _SHAPES.items()}
        whole: dict[str, Any] = {"dtype": torch.int32, "device": device}
        self._table = torch.zeros((len(params.temperature) + 1, SETTINGS.value), **whole)
        """Parameters by slot; the last slot is for padding and takes the largest logit."""
        self._counters = torch.zeros((3, max_rows), **whole)
        self._stats = torch.empty((max_rows, 3, self._blocks), device=device)
        self._states = torch.empty((max_rows, STATE.value), device=device)
        self._parts = torch.empty((max_rows, self._chunks["narrow"], PIVOTS.value), device=device)
        self._candidates = torch.empty((max_rows, _ROOM), device=device)
        self._version = -1

    def refresh(self) -> None:
        """Send the parameters of slots, if some have changed; before a graph is replayed, never part of one."""
        if self._version != self._params.version:
            self._version = self._params.version
            self._table[:-1].copy_(upload(self._params.packed(), self._device))

    def choose(
        self, logits: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What `sample` writes, in new memory."""
        tokens, best = torch.empty_like(slots), torch.empty(slots.shape, device=slots.device)
        self.sample(logits, slots, positions, tokens, best)
        return tokens, best

    def sample(
        self,
        logits: torch.Tensor,
        slots: torch.Tensor,
        positions: torch.Tensor,
        tokens: torch.Tensor,
        best: torch.Tensor,
    ) -> None:
        """Write each row's token, 0 where void, and its largest logit, infinite where one is not a number.

        logits [rows, vocab] of any float type, slots and positions int64 [rows] on the device; tokens int64 [rows],
        best float32 [rows]. Launches kernels and does nothing else.
        """
        for begin in range(0, logits.shape[0], self._max_rows):
            part = slice(begin, begin + self._max_rows)
            self._sample(logits[part], (slots[part], positions[part], tokens[part]), best[part])

    def _sample(self, logits: torch.Tensor, rows: tuple[torch.Tensor, ...], best: torch.Tensor) -> None:
        source, own = (logits, logits.stride(0)), (self._table, *rows)
        needs, arrivals, counts = self._counters
        shared = (self._stats, self._states, needs, arrivals)
        candidates = self._candidates.view(logits.dtype)
        most = {"most": _power_of_two(self._blocks)}
        size = (self._vocab_size, self._blocks)
        _launch(scan, (self._chunks["scan"], len(logits)), *source, *own, best, *shared, counts, *size, **most)
        for _ in range(_NARROWINGS):
            self._over_rows(narrow, logits, *shared, self._parts, most=_power_of_two(self._chunks["narrow"]))
        self._over_rows(gather, logits, *shared, counts, candidates, candidates.shape[1])
        self._over_rows(total, logits, *own, *shared, **most)

    def _over_rows(self, kernel: Any, logits: torch.Tensor, *arguments: Any, **options: Any) -> None:
        rows, chunks = len(logits), self._chunks[kernel.__name__]
        size = (rows, self._vocab_size, self._blocks, chunks)
        _launch(kernel, (min(rows * chunks, _PROGRAMS),), logits, logits.stride(0), *arguments, *size, **options)


def _launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    blocks, warps = _SHAPES[kernel.__name__]
    kernel[grid](*arguments, per_chunk=blocks, num_warps=warps, num_stages=1, **options)


def _power_of_two(number: int) -> int:
    """The smallest that is not below `number`."""
    return 1 << max(number - 1, 0).bit_length()
