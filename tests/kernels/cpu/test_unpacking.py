"""Compiled unpacking of GGUF blocks refuses what is not there; what it gives is held against ggml's in tests/models."""

from __future__ import annotations

import numpy as np
import pytest

from asyncengine.kernels.cpu.unpacking import unpack_blocks

STORED = np.zeros((4, 2 * 34), dtype=np.uint8)


def test_rows_that_are_not_there() -> None:
    for places in ([4], [-1], [0, 2**62]):
        with pytest.raises(IndexError, match="of 4"):
            unpack_blocks("Q8_0", STORED, np.array(places))
    assert unpack_blocks("Q8_0", STORED, np.array([], dtype=np.int64)).numbers.shape == (0, 64)


def test_rows_that_are_no_blocks() -> None:
    with pytest.raises(ValueError, match="are no blocks of 34"):
        unpack_blocks("Q8_0", STORED[:, :40].copy(), np.arange(4))
    with pytest.raises(ValueError, match="are no blocks"):
        unpack_blocks("Q8_0", np.zeros((4, 68), dtype=np.uint8)[:, ::2], np.arange(4))
    with pytest.raises(KeyError):
        unpack_blocks("IQ1_S", STORED, np.arange(4))


def test_a_row_twice() -> None:
    """A row's numbers do not depend on those beside it."""
    stored = np.random.default_rng(0).integers(0, 256, STORED.shape, dtype=np.uint8)
    found = unpack_blocks("Q8_0", stored, np.array([3, 1, 3]))
    assert np.array_equal(found.numbers[0], found.numbers[2])
    assert np.array_equal(found.numbers[1], unpack_blocks("Q8_0", stored, np.arange(4)).numbers[1])
