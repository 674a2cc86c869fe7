"""Calls by address: every part is run once, with what was given, and errors are the caller's."""

import numpy as np
import pytest
import torch

from asyncengine.kernels.cpu import compiler_missing

if compiler_missing(torch.float32, torch.device("cpu")) is not None:
    pytest.skip("no compiler", allow_module_level=True)

from asyncengine.kernels.cpu.calls import call, parallel_for
from asyncengine.kernels.cpu.jit import array, pointer, serial_in_order


@serial_in_order
def _fill(piece: int, pieces: int, worker: int, out: int, count: int, step: np.float32) -> None:
    results = array(pointer(out, np.float32(0)), (count,))
    for index in range(count * piece // pieces, count * (piece + 1) // pieces):
        results[index] += index * step


@serial_in_order
def _fill_in_pieces(out: int, count: int, step: np.float32, pieces: int) -> None:
    parallel_for(_fill, 0, pieces, (out, count, step))


@serial_in_order
def _fill_alone(out: int, count: int, step: np.float32) -> None:
    call(_fill, (0, 1, 0, out, count, step))


@pytest.mark.parametrize("pieces", [1, 2, 7])
def test_every_piece_once(pieces: int) -> None:
    out = np.zeros(100, np.float32)
    _fill_in_pieces(out.ctypes.data, 100, np.float32(0.5), pieces)
    assert np.array_equal(out, np.arange(100, dtype=np.float32) * np.float32(0.5))


def test_one_call() -> None:
    out = np.zeros(9, np.float32)
    _fill_alone(out.ctypes.data, 9, np.float32(2))
    assert np.array_equal(out, np.arange(9, dtype=np.float32) * 2)
