"""Low-rank deltas on CPU by a compiled kernel (`kernels.cpu.lora`), for few rows of an adapter and for many."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from asyncengine.execution.device.arena import Arena
from asyncengine.execution.device.pinned import Int64Array
from asyncengine.execution.layers.places import Place
from asyncengine.execution.layers.step import AdapterRecords
from asyncengine.lora.layers.rows import RowStep
from asyncengine.lora.layers.stack import LoraStack


class CompiledStack(LoraStack):
    """Factors as they come: rows of A and of B are read one after the other."""

    def __init__(
        self, place: Place, slots: int, rank: int, dtype: torch.dtype, device: torch.device, memory: Arena | None = None
    ) -> None:
        from asyncengine.kernels.api import lora as kernel

        self._kernel = kernel
        self._ranks = np.zeros((slots, len(place.parts)), dtype=np.int64)
        """Ranks of the weights in each slot; nothing is read beyond them."""
        super().__init__(place, slots, rank, dtype, device, memory)

    def write(self, slot: int, part: int, a: torch.Tensor, b: torch.Tensor) -> None:
        super().write(slot, part, a, b)
        self._ranks[slot, part] = a.shape[0]

    def clear(self, slot: int) -> None:
        self._ranks[slot] = 0
        super().clear(slot)

    def add(self, x: torch.Tensor, y: torch.Tensor, step: RowStep) -> None:
        if self.held.isdisjoint(step.used):
            return
        x, y = self._flat(x, y, step.size)
        total = y.contiguous()
        self._kernel.add_deltas(x.contiguous(), total, self.factors, step.groups)
        if not y.is_contiguous():
            y.copy_(total)

    def _allocate(self) -> None:
        super()._allocate()
        self.factors: Any = self._kernel.Factors(self._a, self._b, self._ranks, list(self.place.widths))


class FactorTable:
    """Addresses of the factors of a model's products, for kernels of several layers: made anew only when memory
    moves."""

    def __init__(self, stacks: Mapping[str, LoraStack]) -> None:
        self._stacks = stacks
        self._known: dict[tuple[str, ...], tuple[Int64Array, int]] = {}
        """Addresses by the products' paths, with the most numbers of x A^T for a row."""
        self._down = np.empty(0, dtype=np.float32)

    def forget(self) -> None:
        """Memory of some stack is about to move."""
        self._known.clear()

    def records(self, paths: tuple[str, ...], step: RowStep) -> AdapterRecords:
        """Addresses for a step, as `RowAdapters.records`. They stay valid until the next call."""
        if paths not in self._known:
            stacks = [self._stacks.get(path) for path in paths]
            found = [stack.factors if isinstance(stack, CompiledStack) else None for stack in stacks]
            addresses = np.array([0 if each is None else each.address for each in found], dtype=np.int64)
            self._known[paths] = addresses, max((each.across for each in found if each is not None), default=0)
        addresses, across = self._known[paths]
        if len(self._down) < across * step.groups.count:
            self._down = np.empty(across * step.groups.count, dtype=np.float32)
        return AdapterRecords(addresses.ctypes.data, step.groups.address, self._down.ctypes.data)
