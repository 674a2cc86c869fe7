"""Numbers and scales of quantized matrices put into panels (`panel_form`), and rows of them read back."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from asyncengine.kernels.cpu import jit
from asyncengine.kernels.cpu.calls import team_kernel
from asyncengine.kernels.cpu.jit import allocates, array, inline, keep, pointer, serial, serial_in_order, with_gil
from asyncengine.kernels.cpu.panel_form import PANEL, UNIT, PanelForm
from asyncengine.kernels.cpu.team import use_team
from asyncengine.kernels.cpu.vectors import bits_of, number_of

_WORK = 2
"""Bytes that could be read while a number is packed."""
_AT_ONCE = 2**14
"""Numbers up to which rows are read with the interpreter's lock kept: some ten microseconds."""
_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
_TAGS: dict[int, Any] = {1: np.uint8(0), 2: np.uint16(0), 4: np.uint32(0)}
_PLANES = ("scales", "minima", "steps", "minimum_steps", "zeros")
_LOW = np.uint32(0x0F0F0F0F)
_TOP = np.uint32(0x03030303)
_HALF, _BFLOAT, _FLOAT = 1, 2, 3
_SCALES = {"float16": _HALF, "bfloat16": _BFLOAT, "float32": _FLOAT}
_BELOW = {"middle": 0, "zeros": 1, "minima": 2, "table": 3}


def empty_panels(
    form: PanelForm, outputs: int, inputs: int, empty: Callable[..., torch.Tensor] = torch.empty
) -> torch.Tensor:
    """Memory for a matrix [outputs, inputs], to be filled by `pack_rows`: uint8 [panels, chunks, bytes of one]."""
    return empty((-(-outputs // PANEL), form.chunks(inputs), form.chunk_bytes), dtype=torch.uint8)


def pack_rows(
    form: PanelForm, panels: torch.Tensor, first: int, numbers: NDArray[np.uint8], **planes: NDArray[Any] | torch.Tensor
) -> None:
    """Pack rows `first` to `first + n` of a matrix: numbers uint8 [n, inputs], and the planes of its groups by the
    names of `PanelForm.planes` and `layers.stored.GroupedRows`, each [n, groups] or [n, blocks].

    `first` is a multiple of `PANEL`; so is n, or these are the last rows. Raises `ValueError` for planes that are
    missing or of other sizes.
    """
    rows, inputs = numbers.shape
    chunks, panel = panels.shape[1], panels[first // PANEL :]
    if form.chunks(inputs) != chunks or first % PANEL or -(-rows // PANEL) > len(panel):
        raise ValueError(f"numbers {numbers.shape} do not fit into panels of {tuple(panels.shape)}")
    if sorted(planes) != sorted(form.planes):
        raise ValueError(f"{', '.join(planes) or 'nothing'} is given, {', '.join(form.planes) or 'nothing'} is needed")
    team, sizes = use_team(), (form.chunk, form.chunk_bytes)
    numbers = np.ascontiguousarray(numbers)
    _pack_numbers(numbers.ctypes.data, panel.data_ptr(), rows, inputs, chunks, *sizes, form.head, form.bits, team)
    for name, (offset, size, count) in form.planes.items():
        values = torch.as_tensor(planes[name]).reshape(rows, -1)
        plane = values.contiguous() if size == 1 else values.to(_DTYPES[form.scale]).contiguous()
        needed = -(-inputs * count // form.chunk)
        if plane.shape[1] != needed:
            raise ValueError(f"{name} {tuple(plane.shape)}: {needed} are needed for each row")
        _pack_plane(
            plane.data_ptr(), panel.data_ptr(), rows, needed, chunks, count, form.chunk_bytes, offset, _TAGS[size]
        )


def read_rows(
    form: PanelForm, panels: torch.Tensor, row_scales: torch.Tensor | None, ids: torch.Tensor, out: torch.Tensor
) -> None:
    """out [n, inputs] = rows `ids` (int64 [n], contiguous, in range): exact, and rounded once to `out`'s type."""
    settings, table = _settings_of(form)
    few = out.numel() <= _AT_ONCE
    read, team = (_read_few_rows, 0) if few else (_read_rows, use_team())
    read(
        ids.data_ptr(), panels.data_ptr(), 0 if row_scales is None else row_scales.data_ptr(), out.data_ptr(),
        ids.shape[0], out.shape[-1], panels.shape[1], settings.ctypes.data, table.ctypes.data, jit.tag_of(out.dtype),
        team,
    )  # fmt: skip


@functools.cache
def _settings_of(form: PanelForm) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Arguments of `_read_rows`, which are never written to: their addresses go to kernels."""
    offsets = [form.planes[name][0] if name in form.planes else -1 for name in _PLANES]
    settings = np.array(
        [form.chunk, form.chunk_bytes, form.head, form.bits, form.group, form.block, _SCALES[form.scale],
         _BELOW[form.below], form.offset, *offsets],
        dtype=np.int64,
    )  # fmt: skip
    return settings, np.array(form.table or [0], dtype=np.int32)


@team_kernel(lambda rows, inputs: (-(-rows // PANEL), rows * inputs * _WORK))
@serial
@allocates
def _pack_numbers(
    first: int, last: int, numbers: int, panels: int, rows: int, inputs: int, chunks: int, chunk: int,
    chunk_bytes: int, head: int, bits: int,
) -> None:  # fmt: skip
    wide = chunks * chunk
    buffer = np.empty(PANEL * wide if inputs != wide or rows % PANEL != 0 else 1, np.uint8)
    for panel in range(first, last):
        present = min(PANEL, rows - panel * PANEL)
        source: Any = numbers + panel * PANEL * inputs
        if inputs != wide or present < PANEL:
            present_rows = array(pointer(source, np.uint8(0)), (present, inputs))
            padded = buffer.reshape((PANEL, wide))
            padded[:, :] = 0
            for row in range(present):
                padded[row, :inputs] = present_rows[row]
            source = np.int64(buffer.ctypes.data)
        words = array(pointer(source, np.uint32(0)), (PANEL, wide // 4))
        for chunk_index in range(chunks):
            target = panels + (panel * chunks + chunk_index) * chunk_bytes + head
            pack_units(words, target, chunk_index * chunk, chunk, bits)
    keep(buffer)


@inline
def pack_units(words: Any, target: int, begin: int, count: int, bits: int) -> None:
    """`count` numbers of each output from number `begin` on, both multiples of `UNIT`. Four numbers are a word."""
    for lane in range(PANEL):
        row = words[lane]
        for unit in range(count // UNIT):
            word = (begin + unit * UNIT) // 4
            one, two, three, four = row[word], row[word + 1], row[word + 2], row[word + 3]
            if bits == 8:
                lines = array(pointer(target + unit * 256, np.uint32(0)), (4, PANEL))
                lines[0, lane], lines[1, lane], lines[2, lane], lines[3, lane] = one, two, three, four
            else:
                lines = array(pointer(target + unit * (192 if bits == 6 else 128), np.uint32(0)), (3, PANEL))
                lines[0, lane] = (one & _LOW) | ((two & _LOW) << np.uint32(4))
                lines[1, lane] = (three & _LOW) | ((four & _LOW) << np.uint32(4))
                if bits == 6:
                    low = ((one >> np.uint32(4)) & _TOP) | (((two >> np.uint32(4)) & _TOP) << np.uint32(2))
                    high = ((three >> np.uint32(4)) & _TOP) | (((four >> np.uint32(4)) & _TOP) << np.uint32(2))
                    lines[2, lane] = low | (high << np.uint32(4))


@serial
def _pack_plane(
    source: int, panels: int, rows: int, items: int, chunks: int, count: int, chunk_bytes: int, offset: int,
    dtype: np.generic,
) -> None:  # fmt: skip
    """`items` of each row, `count` in a chunk. What a last chunk has beyond them is 0."""
    values = array(pointer(source, dtype), (rows, items))
    for panel in range(-(-rows // PANEL)):
        for chunk in range(chunks):
            target = array(pointer(panels + (panel * chunks + chunk) * chunk_bytes + offset, dtype), (count, PANEL))
            for item in range(count):
                column = chunk * count + item
                for lane in range(PANEL):
                    row = panel * PANEL + lane
                    target[item, lane] = values[row, column] if row < rows and column < items else 0


@team_kernel(lambda count, inputs: (count, count * inputs * _WORK))
@serial_in_order
def _read_rows(
    first: int, last: int, ids: int, panels: int, row_scales: int, out: int, count: int, inputs: int, chunks: int,
    settings: int, table: int, dtype: np.generic,
) -> None:  # fmt: skip
    row_ids = array(pointer(ids, np.int64(0)), (last,))
    results = array(pointer(out, dtype), (last, inputs))
    fields = array(pointer(settings, np.int64(0)), (14,))
    chunk, chunk_bytes, head, bits, group, block, scale, below, offset = fields[:9]
    entries = array(pointer(table, np.int32(0)), (16,))
    for index in range(first, last):
        row = row_ids[index]
        panel, lane = panels + row // PANEL * chunks * chunk_bytes, row % PANEL
        by_row = np.float32(1)
        if row_scales != 0:
            by_row = array(pointer(row_scales + row * 4, np.float32(0)), (1,))[0]
        factor, lowest, zero = np.float32(1), np.float32(0), np.float32(0)
        for begin in range(0, inputs, chunk):
            chunk_start = panel + begin // chunk * chunk_bytes
            for inside in range(min(chunk, inputs - begin)):
                if group > 0 and inside % group == 0:
                    of_group, of_block = inside // group, 0 if block > 0 else inside // group
                    factor = _wide(chunk_start + fields[9], of_block * PANEL + lane, scale)
                    if block > 0:
                        factor *= _step(chunk_start + fields[11], of_group * PANEL + lane)
                    if below == 1:
                        zeros = array(pointer(chunk_start + fields[13], np.uint8(0)), (chunk,))
                        zero = np.float32(zeros[of_group * PANEL + lane])
                    elif below == 2:
                        lowest = _wide(chunk_start + fields[10], of_block * PANEL + lane, scale)
                        if block > 0:
                            lowest *= _step(chunk_start + fields[12], of_group * PANEL + lane)
                number = _number(chunk_start + head, inside, lane, bits)
                value = np.float32(entries[number]) if below == 3 else np.float32(number - offset) - zero
                results[index, begin + inside] = jit.narrow((value * factor - lowest) * by_row, dtype)


_read_few_rows = with_gil(_read_rows)


@inline
def _number(numbers: int, index: int, lane: int, bits: int) -> int:
    """Number `index` of a chunk's, as it is stored."""
    unit, inside = index // UNIT, index % UNIT
    quad = inside // 4
    position = lane * 4 + inside % 4
    if bits == 8:
        line = array(pointer(numbers + (unit * 4 + quad) * 64, np.uint8(0)), (64,))
        return int(line[position])
    start = numbers + unit * (192 if bits == 6 else 128)
    line = array(pointer(start + quad // 2 * 64, np.uint8(0)), (64,))
    number = (int(line[position]) >> (4 * (quad % 2))) & 15
    if bits == 6:
        tops = array(pointer(start + 128, np.uint8(0)), (64,))
        number |= ((int(tops[position]) >> (2 * quad)) & 3) << 4
    return number


@inline
def _step(address: int, index: int) -> np.float32:
    step: np.float32 = np.float32(array(pointer(address + index, np.int8(0)), (1,))[0])
    return step


@inline
def _wide(address: int, index: int, scale: int) -> np.float32:
    """A scale of that type as float32."""
    if scale == _FLOAT:
        number: np.float32 = array(pointer(address + index * 4, np.float32(0)), (1,))[0]
        return number
    half = np.int32(array(pointer(address + index * 2, np.uint16(0)), (1,))[0])
    if scale == _BFLOAT:
        number = number_of(np.int32(half << 16))
    else:
        whole = number_of(np.int32((half & 0x7FFF) << 13)) * np.float32(2.0**112)
        number = number_of(np.int32(bits_of(whole) | ((half & 0x8000) << 16)))
    return number
