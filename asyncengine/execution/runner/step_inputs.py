"""The inputs of one forward pass, as every process of a model takes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any, NamedTuple

import numpy as np
import torch

from asyncengine.execution.attention.base import StepView
from asyncengine.execution.layers.states import StateSegments
from asyncengine.execution.layers.step import StepImages
from asyncengine.execution.runner.images import ImageRows, ImageStore
from asyncengine.execution.runner.step_buffers import Step
from asyncengine.step import Row


class StepInputs(NamedTuple):
    """Everything that a forward pass is told beside the weights. T tokens, R rows, N rows of logits."""

    view: StepView
    """For the attention backend."""
    ids: torch.Tensor
    """int64 [T]."""
    positions: torch.Tensor
    """int64 [T]."""
    logit_rows: torch.Tensor
    """int64 [N], ascending."""
    adapters: list[int]
    """[R] adapter slot or 0."""
    segments: StateSegments | None = None
    """The rows' recurrent states; None: they have none."""
    pictures: StepImages | None = None
    """Hidden states of pictures; None: no row has any."""

    def packed(self) -> tuple[Any, ...]:
        """The same for `pickle`: of tensors that numpy knows, arrays, which take a tenth of the time."""
        view = [_packed(part) for part in _moved(_parts(self.view), _HOST)]
        return (view, *(_packed(part) for part in _moved(self[1:], _HOST)))

    @staticmethod
    def unpacked(packed: tuple[Any, ...], device: torch.device) -> StepInputs:
        """The inputs of which `packed` was made, in memory of their own on a device."""
        view, *others = packed
        parts = tuple(map(_unpacked, view)), *map(_unpacked, others)
        seen, *rest = _moved(parts, device)
        return StepInputs(StepView(*seen), *rest)


def inputs_of(step: Step, rows: Sequence[Row], images: ImageStore | None) -> tuple[StepInputs, dict[int, str]]:
    """The inputs of a step's pass, with the pictures of its rows, and why some of these rows failed. `images`: None
    where no row has any."""
    found = ImageRows() if images is None else images.of_step(rows)
    own, view = [row.adapter_slot for row in rows], found.seen_in(step.view)
    parts = step.input_ids, step.positions, step.logit_rows
    return StepInputs(view, *parts, own, step.segments, found.hidden), dict(found.failed)


_HOST = torch.device("cpu")


def _parts(fielded: Any) -> tuple[Any, ...]:
    return tuple(getattr(fielded, field.name) for field in fields(fielded))


def _moved(part: Any, device: torch.device) -> Any:
    """A part with its tensors on a device: for those that come from a GPU, the host waits."""
    if isinstance(part, torch.Tensor):
        return part.to(device)
    if isinstance(part, StepImages):
        return StepImages(*_moved(_parts(part), device))
    if type(part) is tuple:
        return tuple(_moved(each, device) for each in part)
    return part


class _Packed(NamedTuple):
    """A tensor as an array."""

    array: Any


def _packed(part: Any) -> Any:
    return _Packed(part.numpy()) if isinstance(part, torch.Tensor) else part


def _unpacked(part: Any) -> Any:
    return torch.from_numpy(np.ascontiguousarray(part.array)) if isinstance(part, _Packed) else part
