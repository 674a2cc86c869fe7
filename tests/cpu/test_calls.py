"""Calls by address: every part is run once, with what was given, and errors are the caller's."""

import numpy as np
import pytest
import torch

from asyncengine.cpu import compiler_missing

if compiler_missing(torch.float32, torch.device("cpu")) is not None:
    pytest.skip("no compiler", allow_module_level=True)

from asyncengine.cpu.calls import call, spread
from asyncengine.cpu.jit import array, pointer, serial_in_order


@serial_in_order
def _fill(part: int, parts: int, out: int, count: int, step: np.float32) -> None:
    results = array(pointer(out, np.float32(0)), (count,))
    for index in range(count * part // parts, count * (part + 1) // parts):
        results[index] += index * step


@serial_in_order
def _fill_in_parts(out: int, count: int, step: np.float32, parts: int) -> None:
    spread(_fill, parts, (out, count, step))


@serial_in_order
def _fill_alone(out: int, count: int, step: np.float32) -> None:
    call(_fill, (0, 1, out, count, step))


@pytest.mark.parametrize("parts", [1, 2, 7])
def test_every_part_once(parts: int) -> None:
    out = np.zeros(100, np.float32)
    _fill_in_parts(out.ctypes.data, 100, np.float32(0.5), parts)
    assert np.array_equal(out, np.arange(100, dtype=np.float32) * np.float32(0.5))


def test_one_call() -> None:
    out = np.zeros(9, np.float32)
    _fill_alone(out.ctypes.data, 9, np.float32(2))
    assert np.array_equal(out, np.arange(9, dtype=np.float32) * 2)
