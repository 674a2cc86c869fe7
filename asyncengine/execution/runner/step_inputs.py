"""The inputs of one forward pass, as every process of a model takes them, and encoded pictures among them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any, NamedTuple

import numpy as np
import torch

from asyncengine.execution.attention.base import StepView
from asyncengine.execution.device.transfer import Int64Array, upload
from asyncengine.execution.layers.states import StateSegments
from asyncengine.execution.layers.step import Encoded, StepImages
from asyncengine.execution.models.formats import first_line
from asyncengine.execution.models.vision.tower import TransformersTower
from asyncengine.execution.runner.step_buffers import Step
from asyncengine.images import ImageSpan
from asyncengine.step import Encode, Row


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
    own = [row.adapter_slot for row in rows]
    view = replace(step.view, blocks=found.blocks, near_blocks=found.near) if found.blocks else step.view
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


# Encoded pictures on the device, and the part of them that a step computes.

logger = logging.getLogger("asyncengine")

Block = tuple[int, int, int]


class ImageRows(NamedTuple):
    """The pictures of a step."""

    hidden: StepImages | None = None
    """None: none of their tokens is computed, and positions have one axis."""
    blocks: tuple[Block, ...] = ()
    """(row, first, end) positions that attend to each other both ways, as `StepView.blocks`."""
    near: bool = False
    """Whether they do so in layers with windows alone, as `StepView.near_blocks` says."""
    failed: dict[int, str] = {}  # noqa: RUF012
    """Row -> why its picture could not be encoded."""


class ImageStore:
    """Hidden states of pictures by digest. The scheduler says which are made and dropped (`scheduler/encoding.py`)."""

    def __init__(self, tower: TransformersTower, axes: bool, device: torch.device, *, near: bool = False) -> None:
        """`axes`: positions have three axes. `near`: tokens attend to each other both ways in layers with windows
        alone."""
        self.tower = tower
        self.axes, self.near = axes, near
        self._device = device
        self._encoded: dict[bytes, Encoded | str] = {}
        """A str: why it could not be encoded."""

    def encode(self, asked: Encode) -> None:
        """Run the tower on one picture. An error is kept for the rows that name the picture."""
        for digest in asked.dropped:
            self._encoded.pop(digest, None)
        try:
            found: Encoded | str = self.tower.encode(asked.image.pixels())
            if len(found[0]) != asked.image.tokens:
                found = f"its picture has {asked.image.tokens} tokens, and the tower made {len(found[0])} of it"
        except Exception as error:  # the fault of one picture, or of too little memory for it
            logger.warning("a picture could not be encoded: %s", first_line(error))
            found = f"its picture could not be encoded: {type(error).__name__}: {first_line(error)}"
        self._encoded[asked.image.digest] = found

    def of_step(self, rows: Sequence[Row]) -> ImageRows:
        """The pictures of the step of these `rows`."""
        tokens: list[int] = []
        parts: list[Encoded] = []
        blocks: list[Block] = []
        failed: dict[int, str] = {}
        begin = 0
        for index, row in enumerate(rows):
            end = row.start + row.num_scheduled
            for span in row.spec.images:
                first, last = max(span.first, row.start), min(span.end, end)
                if first >= last:
                    continue
                found = self._encoded.get(span.image.digest, "its picture is not there")
                if isinstance(found, str):
                    failed[index] = found
                    continue
                if span.whole:
                    if last < span.end:
                        raise ValueError(f"row of slot {row.slot}: its chunk cuts a picture that must be whole")
                    blocks.append((index, span.first, span.end))
                tokens += range(begin + first - row.start, begin + last - row.start)
                part = slice(span.offset + first - span.first, span.offset + last - span.first)
                parts.append(Encoded(found.features[part], tuple(each[part] for each in found.deep)))
            begin += row.num_scheduled
        axes = None
        if self.axes:
            each_row = [axes_of(row.spec.images, row.start, row.start + row.num_scheduled) for row in rows]
            axes = upload(np.concatenate(each_row, axis=1), self._device)
        if not parts:
            return ImageRows(None if axes is None else StepImages(axes=axes), failed=failed)
        features = torch.cat([part.features for part in parts])
        deep = tuple(torch.cat(each) for each in zip(*(part.deep for part in parts), strict=True))
        where = upload(np.array(tokens, dtype=np.int64), self._device)
        return ImageRows(StepImages(where, features, deep, axes), tuple(blocks), self.near, failed)


def axes_of(images: Sequence[ImageSpan], start: int, end: int) -> Int64Array:
    """[3, end - start] positions in time, rows and columns of the tokens [start, end) (M-RoPE, Wang et al. 2024).

    A picture is one moment; its rows and columns count from where the text before it ends, and the text behind it goes
    on after the larger of the two.
    """
    positions = np.empty((3, end - start), dtype=np.int64)
    known, shift = start, 0  # positions of tokens before `known` are there; text is behind by `shift`
    for span in images:
        if span.image.grid is None:
            continue
        if span.first >= end:
            break
        if span.end > start:
            first, last = max(span.first, start), min(span.end, end)
            positions[:, known - start : first - start] = np.arange(known - shift, first - shift)
            rows, columns = np.divmod(np.arange(first, last) - span.first, span.image.grid[1])
            positions[0, first - start : last - start] = span.first - shift
            positions[1, first - start : last - start] = span.first - shift + rows
            positions[2, first - start : last - start] = span.first - shift + columns
            known = last
        shift += span.length - max(span.image.grid)
    positions[:, known - start :] = np.arange(known - shift, end - shift)
    return positions
