"""Changes that adapters make to a product's own outputs, before low-rank deltas are added: DoRA's magnitudes (Liu et
al. 2024), biases of their own, and rows of their own of the embedding or of the output layer.

A row of another adapter, or of none, is left as it is, to the bit. Each adapter's rows are changed by themselves, one
number after the other or by the model's own kernel for an output layer, so that a row does not depend on the others.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch
from torch.nn import functional

from asyncengine.execution.device.arena import OutputBufferPool
from asyncengine.execution.device.transfer import send
from asyncengine.execution.layers.step import LoraTarget
from asyncengine.execution.layers.stored import Weighted
from asyncengine.execution.layers.weight_forms import DenseWeight
from asyncengine.seams import LoraWeights

_AT_ONCE = 2**22
"""Numbers of a weight that are read at once, as float32."""

MakeRows = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(x [rows, ...], y [rows, out]) -> what stands in the place of y."""


class OutputChanges(Weighted):
    """The changes to one product's outputs by slot, counted from 0."""

    def __init__(self, target: LoraTarget, slots: int, device: torch.device) -> None:
        self.target, self._device = target, device
        self._ends = [0, *accumulate(target.widths)]
        self._lined: set[int] = set()
        """Slots with factors or shifts other than 1 and -0, which leave all numbers as they are, to the bit."""
        self._factors = torch.ones(slots, self._ends[-1], device=device)
        self._shifts = torch.full((slots, self._ends[-1]), -0.0, device=device)
        self.rows: dict[int, MakeRows] = {}
        """Makers of the rows that slots have of their own: memory that goes with their content."""

    def used_by(self, step: Any) -> bool:
        """Whether some row of a step may be changed."""
        return not step.used.isdisjoint(self._lined | self.rows.keys())

    def put(self, slot: int, part: int, own: LoraWeights) -> torch.Tensor:
        """Note what `own` changes in an empty slot. The b [out of the part, r] of what it adds."""
        if own.table is not None:
            self.rows[slot] = self._make_rows(own.table, own.tokens, own.bias)
            return own.b
        target, here = self.target, slice(*self._ends[part : part + 2])
        old = torch.zeros(here.stop - here.start) if target.bias is None else target.bias[here].float().cpu()
        given = old if own.bias is None else target.local_rows(part, own.bias) + (old if own.adds_bias else 0)
        factor, b = torch.ones_like(old), own.b
        if own.magnitude is not None:
            # a row of zeros has no direction, and a neighbour's row must not meet an infinity
            factor = (target.local_rows(part, own.magnitude) / self._norms(here, own.a, b)).nan_to_num(0.0, 0.0, 0.0)
            b = (b.float() * factor[:, None]).to(b.dtype).nan_to_num()
        self._lined.add(slot)
        self._factors[slot, here].copy_(send(factor, self._device))
        self._shifts[slot, here].copy_(send(given - factor * old, self._device))
        return b

    def clear(self, slot: int) -> None:
        self.rows.pop(slot, None)
        if slot in self._lined:
            self._lined.remove(slot)
            self._factors[slot].fill_(1.0)
            self._shifts[slot].fill_(-0.0)

    def apply(self, x: torch.Tensor, y: torch.Tensor, step: Any) -> None:
        """Change the rows of y [..., out] in place; x [..., in], or token ids for an embedding."""
        flat = y.view(-1, self._ends[-1])
        if self.rows:
            inputs = x.reshape(-1) if self.target.embedding else x.reshape(-1, self.target.in_features)
            for slot in sorted(self.rows.keys() & step.used):
                step.replace(slot, inputs, flat, self.rows[slot])
        if not step.used.isdisjoint(self._lined):
            step.scale(flat, self._factors, self._shifts)

    def _norms(self, here: slice, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """Norms [outputs] of the rows `here` of the weight with b @ a added, as float32: of a quantized weight, of the
        numbers that it stands for."""
        assert self.target.read_rows is not None
        a, b = send(a, self._device).float(), send(b, self._device)
        found, step = [], max(1, _AT_ONCE // a.shape[1])
        for first in range(here.start, here.stop, step):
            ids = torch.arange(first, min(first + step, here.stop), device=self._device)
            rows = torch.empty(len(ids), a.shape[1], dtype=b.dtype, device=self._device)
            self.target.read_rows(ids, rows)
            whole = rows.float().addmm_(b[ids - here.start].float(), a)
            found.append(torch.linalg.vector_norm(whole, dim=1))
        return torch.cat(found).cpu()

    def _make_rows(self, table: torch.Tensor, tokens: torch.Tensor | None, bias: torch.Tensor | None) -> MakeRows:
        ids = None if tokens is None else send(tokens, self._device)
        if self.target.embedding:
            places = torch.full((self.target.in_features,), -1)
            places[slice(len(table)) if tokens is None else tokens] = torch.arange(len(table))
            known, rows = send(places, self._device), send(table, self._device)

            def look_up(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
                found = known[x]
                return torch.where(found[:, None] >= 0, rows[found.clamp(min=0)], y)

            return look_up
        make, shape = self.target.new_weight, (len(table), self.target.in_features)
        weight = DenseWeight(*shape, table.dtype, self._device) if make is None else make(len(table))
        memory = OutputBufferPool()
        weight.load(0, table)
        added = self.target.bias if bias is None else send(bias, self._device).to(weight.bias_dtype)
        if added is not None and ids is not None:
            added = added[ids]

        def multiply(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            own = weight.logits(x, added, memory).to(y.dtype)
            if ids is not None:
                return y.index_copy(1, ids, own)
            return functional.pad(own, (0, y.shape[1] - own.shape[1]), value=-torch.inf)  # others do not exist

        return multiply
