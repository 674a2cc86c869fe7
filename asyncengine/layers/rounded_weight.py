"""Weights that the engine itself rounds to 8 or 4 bits, on an NVIDIA GPU: by the rule of `kernels.cpu.quantize`."""

from __future__ import annotations

from typing import Any

import torch

from asyncengine.layers.stored import NumberForm, StoredForm, StoredMatrix
from asyncengine.layers.stored_weight import ChunkedWeight
from asyncengine.layers.weight_forms import Release, keep_all, parts_of

SHRINK = (1.0, 0.95, 0.9, 0.85, 0.8, -1.15, -1.05, -0.95)
"""Candidates of the scale by which a group's largest weight is -8; negative: the largest is +7 or so."""
_FORMS = {8: NumberForm(8, 0), 4: NumberForm(4, 64, scale_dtype="bfloat16")}
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
    """Numbers uint8 [n, inputs] with 8 added, and scales [n, groups], of float32 [n, inputs]."""
    inputs, group = rows.shape[1], _FORMS[4].group
    groups = torch.nn.functional.pad(rows, (0, -inputs % group)).view(len(rows), -1, group)
    largest = groups.gather(2, groups.abs().argmax(2, keepdim=True))
    least = torch.full_like(largest, torch.inf)
    scales, numbers = torch.zeros_like(largest), torch.zeros_like(groups)
    for factor in SHRINK:
        scale = (largest * (factor / -8)).bfloat16().float()
        found = (groups * torch.where(scale == 0, 0.0, 1 / scale)).round_().clamp_(-8, 7)
        error = (found * scale - groups).square_().sum(2, keepdim=True)
        better = error < least
        least, scales = torch.where(better, error, least), torch.where(better, scale, scales)
        numbers = torch.where(better, found, numbers)
    return {"numbers": numbers.add_(8).byte().view(len(rows), -1)[:, :inputs], "scales": scales.squeeze(2)}
