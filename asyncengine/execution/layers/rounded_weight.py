"""Weights that the engine itself rounds to 8 or 4 bits, on an NVIDIA GPU: by the rule of `kernels.cpu.quantize`."""

from __future__ import annotations

from typing import Any

import torch

from asyncengine.execution.layers.stored import NumberForm, StoredForm, StoredMatrix
from asyncengine.execution.layers.stored_weight import ChunkedWeight
from asyncengine.execution.layers.weight_forms import Release, keep_all, parts_of

ENDS = ((0.0, 0.0), (0.05, 0.05), (0.1, 0.1), (0.05, 0.0), (0.0, 0.05), (0.1, 0.0), (0.0, 0.1))
"""Parts of a group's range by which its ends are drawn in, below and above: the first guesses of its sixteen steps."""
_FORMS = {8: NumberForm(8, 0), 4: NumberForm(4, 32, "minima", scale_dtype="bfloat16")}
_AT_ONCE = 2**24
"""Numbers that are rounded at once: 64 MiB as float32, some of them several times."""


class RoundedWeight(ChunkedWeight):
    """A weight in 8 or 4 bits, rounded on the device while it is read."""

    def __init__(self, outputs: int, inputs: int, bits: int, device: torch.device, release: Release = keep_all) -> None:
        super().__init__(outputs, inputs, StoredForm(f"int{bits}", _FORMS[bits]), device)
        self._release = release

    def takes(self, first: int) -> None:
        return None

    def load(self, first: int, weight: torch.Tensor | StoredMatrix) -> None:
        """Take rows from `first` on, as `WeightForm.load` does."""
        round_rows = rows_to_int8 if self.matrix.bits == 8 else rows_to_int4
        for begin, part in parts_of(weight, self._release):
            for place in range(0, len(part), step := max(1, _AT_ONCE // self.inputs)):
                rows = part[place : place + step].to(self._device, torch.float32)
                self._put(first + begin + place, **round_rows(rows))
        self._finish()


def rows_to_int8(rows: torch.Tensor) -> dict[str, Any]:
    """Numbers uint8 [n, inputs] with 128 added, and a scale for each row, of float32 [n, inputs]."""
    largest = rows.abs().amax(1)
    factor = torch.where(largest > 1e-30, 127 / largest, 0.0)
    return {"numbers": (rows * factor[:, None]).round_().add_(128).byte(), "row_scales": largest / 127}


def rows_to_int4(rows: torch.Tensor) -> dict[str, Any]:
    """Numbers uint8 [n, inputs], scales and minima [n, groups], of float32 [n, inputs]."""
    inputs, group = rows.shape[1], _FORMS[4].group
    groups = torch.nn.functional.pad(rows, (0, -inputs % group)).view(len(rows), -1, group)
    low, high = groups.amin(2, keepdim=True), groups.amax(2, keepdim=True)
    above, least = groups - low, torch.full_like(low, torch.inf)
    best = {"numbers": torch.zeros_like(groups), "scales": torch.zeros_like(low), "minima": torch.zeros_like(low)}

    def nearest(minimum: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return ((groups + minimum) * torch.where(scale > 1e-30, 1 / scale, 0.0)).round_().clamp_(0, 15)

    for below, beyond in ENDS:
        span = high - low
        found = nearest(-(low + span * below), span * ((1 - below - beyond) / 15))
        total = found.sum(2, keepdim=True)
        variance = group * found.square().sum(2, keepdim=True) - total.square()
        together = group * (found * above).sum(2, keepdim=True) - total * above.sum(2, keepdim=True)
        scale = torch.where(variance > 0, together / variance, 0.0)
        minimum = (-(low + (above.sum(2, keepdim=True) - scale * total) / group)).bfloat16().float()
        scale = scale.bfloat16().float()
        found = nearest(minimum, scale)
        error = (found * scale - minimum - groups).square_().sum(2, keepdim=True)
        better, least = error < least, torch.minimum(error, least)
        own = {"numbers": found, "scales": scale, "minima": minimum}
        best = {name: torch.where(better, own[name], best[name]) for name in best}
    numbers = best["numbers"].byte().view(len(rows), -1)[:, :inputs]
    return {"numbers": numbers, "scales": best["scales"].squeeze(2), "minima": best["minima"].squeeze(2)}
