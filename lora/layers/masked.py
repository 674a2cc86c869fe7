"""Low-rank deltas with the same shapes in every step, whichever rows use which adapter: what CUDA graphs need.

By torch's operations: x @ [A_1; A_2; ...]^T, zero wherever a row's slot is another one, @ [B_1; B_2; ...]. A GPU has
kernels that read what a row's own slot holds (`kernels.cuda.lora`).
"""

from __future__ import annotations

from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from torch.nn.functional import linear

from asyncengine.lora.layers.stack import LoraStack


class MaskedStep:
    """The rows of a step: `slots` int64 [rows] on the device, -1 for none."""

    def __init__(self, num_slots: int, slots: torch.Tensor) -> None:
        self.size = len(slots)
        self.slots = slots
        self._num_slots = num_slots
        self._tiles: Any = None

    @cached_property
    def keep(self) -> torch.Tensor:
        """bool [rows, 1, slots, 1]: True where the row uses the slot."""
        every = torch.arange(self._num_slots, device=self.slots.device)
        return (self.slots[:, None] == every)[:, None, :, None]

    @cached_property
    def known(self) -> torch.Tensor:
        """`slots`, any where there is none."""
        return self.slots.clamp(min=0)

    def tiles(self) -> Any:
        """Rows by slot, as `kernels.cuda.lora` takes them."""
        if self._tiles is None:
            from asyncengine.kernels.api import gpu

            self._tiles = gpu.tiles_of(self.slots, self._num_slots)
        return self._tiles


class MaskedStack(LoraStack):
    """Factors laid out for products with all of them at once."""

    def add(self, x: torch.Tensor, y: torch.Tensor, step: MaskedStep) -> None:
        x, y = self._flat(x, y, step.size)
        parts = len(self.place.parts)
        if self.place.embedding:  # each row's own, repeated
            down = self._a[step.known, :, :, x][:, None].expand(-1, self._slots, -1, -1)
        else:
            down = linear(x, self._a.flatten(0, 2)).view(step.size, self._slots, parts, self.rank)
        # chosen, not multiplied, so that no neighbour's infinity spreads
        own = down.new_empty(step.size, parts, self._slots, self.rank)
        torch.where(step.keep, down.transpose(1, 2), down.new_zeros(()), out=own)
        b = self._b.flatten(0, 1)
        for part, (left, right) in enumerate(pairwise(self._ends)):
            y[:, left:right].addmm_(own[:, part].flatten(1), b[:, left:right])


class KernelStack(LoraStack):
    """Factors as Triton's kernels read them; no embedding's."""

    def add(self, x: torch.Tensor, y: torch.Tensor, step: MaskedStep) -> None:
        x, y = self._flat(x, y, step.size)
        self._add(x, y, self._factors, step.slots, step.tiles)

    def _allocate(self) -> None:
        from asyncengine.kernels.api import gpu

        super()._allocate()
        self._add, self._factors = gpu.add_deltas, gpu.Factors.of(self._a, self._b, self._ends)
