"""The inputs of one forward pass, as every process of a model takes them, encoded pictures included."""

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
    """All inputs of a forward pass. T tokens, R rows, N rows of logits."""

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
        """A copy for `pickle`, with tensors on the host as numpy arrays, which pickle in a tenth of the time."""
        view = [_packed(value) for value in _moved(_parts(self.view), _HOST)]
        return (view, *(_packed(value) for value in _moved(self[1:], _HOST)))

    @staticmethod
    def unpacked(packed: tuple[Any, ...], device: torch.device) -> StepInputs:
        """The inputs from which `packed` was made, in new memory on a device."""
        view, *rest = packed
        values = tuple(map(_unpacked, view)), *map(_unpacked, rest)
        seen, *view_rest = _moved(values, device)
        return StepInputs(StepView(*seen), *view_rest)


def inputs_of(step: Step, rows: Sequence[Row], images: ImageStore | None) -> tuple[StepInputs, dict[int, str]]:
    """(inputs of a step's pass, pictures of its rows included; batch index -> why that row failed). `images`: None if
    no row has pictures."""
    pictures = ImageRows() if images is None else images.of_step(rows)
    adapters = [row.adapter_slot for row in rows]
    view = replace(step.view, blocks=pictures.blocks, near_blocks=pictures.near) if pictures.blocks else step.view
    tensors = step.input_ids, step.positions, step.logit_rows
    return StepInputs(view, *tensors, adapters, step.segments, pictures.hidden), dict(pictures.failed)


_HOST = torch.device("cpu")


def _parts(fielded: Any) -> tuple[Any, ...]:
    return tuple(getattr(fielded, field.name) for field in fields(fielded))


def _moved(value: Any, device: torch.device) -> Any:
    """`value` with its tensors copied to a device. The host waits for tensors that come from a GPU."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, StepImages):
        return StepImages(*_moved(_parts(value), device))
    if type(value) is tuple:
        return tuple(_moved(item, device) for item in value)
    return value


class _Packed(NamedTuple):
    """A pickled tensor."""

    array: Any


def _packed(value: Any) -> Any:
    return _Packed(value.numpy()) if isinstance(value, torch.Tensor) else value


def _unpacked(value: Any) -> Any:
    return torch.from_numpy(np.ascontiguousarray(value.array)) if isinstance(value, _Packed) else value


# Encoded pictures on the device, and the slices of them that a step needs.

logger = logging.getLogger("asyncengine")

Block = tuple[int, int, int]


class ImageRows(NamedTuple):
    """The pictures of a step."""

    hidden: StepImages | None = None
    """None: the step has no tokens of pictures, and positions have one axis."""
    blocks: tuple[Block, ...] = ()
    """(row, first, end) positions that attend to each other both ways, as `StepView.blocks`."""
    near: bool = False
    """Whether they do so only in layers with windows, as `StepView.near_blocks` says."""
    failed: dict[int, str] = {}  # noqa: RUF012
    """Batch index -> why the row's picture could not be encoded."""


class ImageStore:
    """Hidden states of pictures by digest. The scheduler decides which are encoded, and which dropped
    (`scheduler/encoding.py`)."""

    def __init__(self, tower: TransformersTower, axes: bool, device: torch.device, *, near: bool = False) -> None:
        """`axes`: positions have three axes. `near`: tokens attend to each other both ways in layers with windows
        alone."""
        self.tower = tower
        self.axes, self.near = axes, near
        self._device = device
        self._encoded: dict[bytes, Encoded | str] = {}
        """Digest -> hidden states; a str: why the picture could not be encoded."""

    def encode(self, asked: Encode) -> None:
        """Run the vision tower on one picture. An error is kept for the rows that have the picture."""
        for digest in asked.dropped:
            self._encoded.pop(digest, None)
        try:
            encoded: Encoded | str = self.tower.encode(asked.image.pixels())
            if len(encoded[0]) != asked.image.tokens:
                encoded = f"its picture has {asked.image.tokens} tokens, and the tower made {len(encoded[0])} of it"
        except Exception as error:  # a bad picture, or too little memory for it: only its own requests fail
            logger.warning("a picture could not be encoded: %s", first_line(error))
            encoded = f"its picture could not be encoded: {type(error).__name__}: {first_line(error)}"
        self._encoded[asked.image.digest] = encoded

    def of_step(self, rows: Sequence[Row]) -> ImageRows:
        """The pictures of the step of these `rows`."""
        tokens: list[int] = []
        chunks: list[Encoded] = []
        blocks: list[Block] = []
        failed: dict[int, str] = {}
        begin = 0
        for index, row in enumerate(rows):
            end = row.start + row.num_scheduled
            for span in row.spec.images:
                first, last = max(span.first, row.start), min(span.end, end)
                if first >= last:
                    continue
                encoded = self._encoded.get(span.image.digest, "its picture is not there")
                if isinstance(encoded, str):
                    failed[index] = encoded
                    continue
                if span.whole:
                    if last < span.end:
                        raise ValueError(f"row of slot {row.slot}: its chunk cuts a picture that must be whole")
                    blocks.append((index, span.first, span.end))
                tokens += range(begin + first - row.start, begin + last - row.start)
                rows_of = slice(span.offset + first - span.first, span.offset + last - span.first)
                chunks.append(Encoded(encoded.features[rows_of], tuple(layer[rows_of] for layer in encoded.deep)))
            begin += row.num_scheduled
        axes = None
        if self.axes:
            axes_by_row = [axes_of(row.spec.images, row.start, row.start + row.num_scheduled) for row in rows]
            axes = upload(np.concatenate(axes_by_row, axis=1), self._device)
        if not chunks:
            return ImageRows(None if axes is None else StepImages(axes=axes), failed=failed)
        features = torch.cat([chunk.features for chunk in chunks])
        deep = tuple(torch.cat(layer) for layer in zip(*(chunk.deep for chunk in chunks), strict=True))
        where = upload(np.array(tokens, dtype=np.int64), self._device)
        return ImageRows(StepImages(where, features, deep, axes), tuple(blocks), self.near, failed)


def axes_of(images: Sequence[ImageSpan], start: int, end: int) -> Int64Array:
    """[3, end - start] positions in time, rows and columns of the tokens [start, end) (M-RoPE, Wang et al. 2024).

    A picture has one position in time; its rows and columns count from the end of the text before it, and the text
    after it continues behind the larger of the two.
    """
    positions = np.empty((3, end - start), dtype=np.int64)
    filled, shift = start, 0  # tokens before `filled` have positions; text positions are token positions less `shift`
    for span in images:
        if span.image.grid is None:
            continue
        if span.first >= end:
            break
        if span.end > start:
            first, last = max(span.first, start), min(span.end, end)
            positions[:, filled - start : first - start] = np.arange(filled - shift, first - shift)
            rows, columns = np.divmod(np.arange(first, last) - span.first, span.image.grid[1])
            positions[0, first - start : last - start] = span.first - shift
            positions[1, first - start : last - start] = span.first - shift + rows
            positions[2, first - start : last - start] = span.first - shift + columns
            filled = last
        shift += span.length - max(span.image.grid)
    positions[:, filled - start :] = np.arange(filled - shift, end - shift)
    return positions
