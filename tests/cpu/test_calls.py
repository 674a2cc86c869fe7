"""Calls by address: every part is run once, with what was given, and errors are the caller's."""

from pathlib import Path

import numpy as np
import pytest
import torch

from asyncengine.cpu import compiler_missing

if compiler_missing(torch.float32, torch.device("cpu")) is not None:
    pytest.skip("no compiler", allow_module_level=True)

from asyncengine.cpu import jit
from asyncengine.cpu.calls import call, spread
from asyncengine.cpu.jit import array, pointer, serial_in_order, stamp_of


@serial_in_order
def _fill(piece: int, pieces: int, worker: int, out: int, count: int, step: np.float32) -> None:
    results = array(pointer(out, np.float32(0)), (count,))
    for index in range(count * piece // pieces, count * (piece + 1) // pieces):
        results[index] += index * step


@serial_in_order
def _fill_in_pieces(out: int, count: int, step: np.float32, pieces: int) -> None:
    spread(_fill, 0, pieces, (out, count, step))


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


def test_what_is_compiled_is_kept_by_the_source_of_all(tmp_path: Path) -> None:
    """A kernel holds the code of what it calls: an edit there must not find the old one on the disk."""
    for name in ("one.py", "two.py"):
        (tmp_path / name).write_text("same")
    before = stamp_of(tmp_path)
    assert stamp_of(tmp_path) == before
    (tmp_path / "two.py").write_text("other")
    assert stamp_of(tmp_path) != before
    assert _fill.py_func.__qualname__.endswith(stamp_of(Path(jit.__file__).parent))  # type: ignore[attr-defined]
