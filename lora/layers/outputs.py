"""Changes that adapters make to a linear's own outputs, before low-rank deltas are added: DoRA's magnitudes (Liu et al.
2024), biases of their own, and rows of their own of the embedding or of the output layer.

Rows of a step with another adapter, or none, are unchanged to the bit. Each adapter's rows are changed separately,
elementwise or by the model's own kernel for an output layer, so that a row does not depend on the others in its batch.
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
"""Elements of a weight that are dequantized at once, to float32."""

MakeRows = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(x [rows, ...], y [rows, out]) -> the outputs [rows, out] that replace y."""


class OutputChanges(Weighted):
    """The changes to one product's outputs by slot, counted from 0."""

    def __init__(self, target: LoraTarget, slots: int, device: torch.device) -> None:
        self.target, self._device = target, device
        self._ends = [0, *accumulate(target.widths)]
        self._lined: set[int] = set()
        """Slots with factors or shifts other than 1 and -0. These change no bit, while adding +0 would turn -0 to 0."""
        self._factors = torch.ones(slots, self._ends[-1], device=device)
        self._shifts = torch.full((slots, self._ends[-1]), -0.0, device=device)
        self.rows: dict[int, MakeRows] = {}
        """Functions that compute the outputs of slots with rows of their own; they own the memory of these rows."""

    def used_by(self, step: Any) -> bool:
        """Whether some row of a step may be changed."""
        return not step.used.isdisjoint(self._lined | self.rows.keys())

    def put(self, slot: int, index: int, change: LoraWeights) -> torch.Tensor:
        """Put the changes of `change` to the module at `index` of the target into an empty slot. Returns the b
        [outputs of the module, r] of its low-rank delta, scaled by the factors."""
        if change.table is not None:
            self.rows[slot] = self._make_rows(change.table, change.tokens, change.bias)
            return change.b
        target, rows = self.target, slice(*self._ends[index : index + 2])
        old = torch.zeros(rows.stop - rows.start) if target.bias is None else target.bias[rows].float().cpu()
        bias = old if change.bias is None else target.local_rows(index, change.bias) + (old if change.adds_bias else 0)
        factor, b = torch.ones_like(old), change.b
        if change.magnitude is not None:
            # a zero row has norm 0: without this its quotient would be infinite, and spread to other rows by 0 * inf
            magnitude = target.local_rows(index, change.magnitude)
            factor = (magnitude / self._norms(rows, change.a, b)).nan_to_num(0.0, 0.0, 0.0)
            b = (b.float() * factor[:, None]).to(b.dtype).nan_to_num()
        self._lined.add(slot)
        self._factors[slot, rows].copy_(send(factor, self._device))
        self._shifts[slot, rows].copy_(send(bias - factor * old, self._device))
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

    def _norms(self, rows: slice, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """Norms [outputs], float32, of the rows `rows` of the weight plus b @ a. A quantized weight is dequantized."""
        assert self.target.read_rows is not None
        a, b = send(a, self._device).float(), send(b, self._device)
        norms, step = [], max(1, _AT_ONCE // a.shape[1])
        for first in range(rows.start, rows.stop, step):
            ids = torch.arange(first, min(first + step, rows.stop), device=self._device)
            read = torch.empty(len(ids), a.shape[1], dtype=b.dtype, device=self._device)
            self.target.read_rows(ids, read)
            weight_rows = read.float().addmm_(b[ids - rows.start].float(), a)
            norms.append(torch.linalg.vector_norm(weight_rows, dim=1))
        return torch.cat(norms).cpu()

    def _make_rows(self, table: torch.Tensor, tokens: torch.Tensor | None, bias: torch.Tensor | None) -> MakeRows:
        ids = None if tokens is None else send(tokens, self._device)
        if self.target.embedding:
            row_of = torch.full((self.target.in_features,), -1)
            row_of[slice(len(table)) if tokens is None else tokens] = torch.arange(len(table))
            row_of_token, rows = send(row_of, self._device), send(table, self._device)

            def look_up(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
                row = row_of_token[x]
                return torch.where(row[:, None] >= 0, rows[row.clamp(min=0)], y)

            return look_up
        make, shape = self.target.new_weight, (len(table), self.target.in_features)
        weight = DenseWeight(*shape, table.dtype, self._device) if make is None else make(len(table))
        memory = OutputBufferPool()
        weight.load(0, table)
        row_bias = self.target.bias if bias is None else send(bias, self._device).to(weight.bias_dtype)
        if row_bias is not None and ids is not None:
            row_bias = row_bias[ids]

        def multiply(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            logits = weight.logits(x, row_bias, memory).to(y.dtype)
            if ids is not None:
                return y.index_copy(1, ids, logits)
            return functional.pad(logits, (0, y.shape[1] - logits.shape[1]), value=-torch.inf)  # others do not exist

        return multiply
