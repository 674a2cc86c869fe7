"""Sampling by kernels on a GPU: the parameters of slots, kept there, and a token for each row. Needs Triton."""

from __future__ import annotations

import numpy as np
import torch

from asyncengine.execution.device.transfer import Int64Array, upload
from asyncengine.execution.sampling.logit_processors import SlotParams
from asyncengine.kernels.api import RowSampler


class DeviceSampler(RowSampler):
    """Chooses a token for each of up to `max_rows` rows by the parameters of their slots."""

    def __init__(self, params: SlotParams, max_rows: int, vocab_size: int, device: torch.device) -> None:
        super().__init__(len(params.temperature), max_rows, vocab_size, device)
        self.params, self._device = params, device
        self._version = -1

    def refresh(self) -> None:
        """Send the parameters of slots, if some have changed; before a graph is replayed, never part of one."""
        if self._version != self.params.version:
            self._version = self.params.version
            self.settings[:-1].copy_(upload(self.params.packed(), self._device))

    def choose(
        self, logits: torch.Tensor, slots: Int64Array, positions: Int64Array
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Sample into new memory, (tokens, best) as `sample` writes them. Launches only what these slots need."""
        self.refresh()
        where = upload(np.stack((slots, positions)), self._device)
        tokens, best = torch.empty_like(where[0]), torch.empty(len(slots), device=self._device)
        self.sample(logits, where[0], where[1], tokens, best, bool(self.params.truncated[slots].any()))
        return tokens, best
