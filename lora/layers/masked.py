"""Low-rank deltas with the same shapes in every step, whoever uses which adapter: what CUDA graphs need.

* stacked: x @ [A_1; A_2; ...]^T, zero wherever a row's slot is another one, @ [B_1; B_2; ...]. Two products whatever
  the number of adapters;
* by segment: two products for neighbouring rows of one adapter. Less work when there are many slots and long segments
  (prompts), more calls otherwise.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch.nn.functional import linear

from asyncengine.lora.layers.stack import LoraStack, Segment

_CALL = 2_000_000_000
"""Multiplications that take as long as calling one product: an estimate for GPUs, which do some 4e14 a second, at 5
microseconds a launch. On a CPU it would be 4.5e6."""


class MaskedStep:
    """The rows of a step: `slots` int64 [rows] on the device, -1 for none. `segments` cover all rows with an adapter;
    None: never go by segment."""

    def __init__(self, num_slots: int, slots: torch.Tensor, segments: tuple[Segment, ...] | None = None) -> None:
        self.size = len(slots)
        self.segments = segments
        self.slots = slots.clamp(min=0)
        self.spared = self.size * (num_slots - 1) / len(segments) if segments else 0.0
        """Rows x slots that each segment spares the stacked products."""
        self.keep = (slots[:, None] == torch.arange(num_slots, device=slots.device))[:, None, :, None]
        """bool [rows, 1, slots, 1]: True where the row uses the slot."""


class MaskedStack(LoraStack):
    """Factors laid out for products with all of them at once."""

    by_input = False

    def add(self, x: torch.Tensor, y: torch.Tensor, step: MaskedStep) -> None:
        x, y = self._flat(x, y, step.size)
        if step.segments is not None and step.spared > self._segment_price():
            self._add_segments(x, y, step.segments)
            return
        parts = len(self.place.parts)
        if self.place.embedding:  # each row's own, repeated
            down = self._a[step.slots, :, :, x][:, None].expand(-1, self._slots, -1, -1)
        else:
            down = linear(x, self._a.flatten(0, 2)).view(step.size, self._slots, parts, self.rank)
        # chosen, not multiplied, so that no neighbour's infinity spreads
        own = down.new_empty(step.size, parts, self._slots, self.rank)
        torch.where(step.keep, down.transpose(1, 2), down.new_zeros(()), out=own)
        b = self._b.flatten(0, 1)
        for part, (left, right) in enumerate(pairwise(self._ends)):
            y[:, left:right].addmm_(own[:, part].flatten(1), b[:, left:right])

    def _segment_price(self) -> float:
        """Rows x slots whose products take as long as the calls of one segment."""
        parts = len(self.place.parts)
        inputs = 0 if self.place.embedding else parts * self.place.in_features
        return _CALL * (1 + parts) / (self.rank * (inputs + self.out_features))
