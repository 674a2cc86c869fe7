"""Each format's matrices are what their documentation says, to the bit where nothing is rounded."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from support.quantized_checkpoints import KINDS

from asyncengine.execution.layers.stored import dense
from asyncengine.execution.models.formats.float_formats import GROUP, plain_whole_numbers, whole_numbers

from .one_matrix import matrix_of, random_weight

EXACT = [name for name in KINDS if not name.startswith("fp8")]


@pytest.mark.parametrize("name", EXACT)
def test_the_matrix_is_what_was_written(name: str, tmp_path: Path) -> None:
    """Any slices of its rows are the whole's."""
    written = KINDS[name].write(random_weight())
    matrix = matrix_of(written.tensors, KINDS[name].config, tmp_path)
    assert matrix.shape == (96, 128)
    whole = dense(matrix)
    torch.testing.assert_close(whole, written.dense, rtol=1e-6, atol=0.0)
    parts = [dense(matrix, first, last) for first, last in ((0, 1), (1, 64), (64, 93), (93, 96))]
    assert torch.equal(torch.cat(parts), whole)
    numbers = matrix.rows(0, 96).numbers
    assert numbers.max() < 2**matrix.form.bits


def test_eight_bit_floats_are_the_same_compiled() -> None:
    """Each float beside each other one that may be the largest of its group, of every exponent."""
    floats = np.zeros((256, 256, GROUP), dtype=np.uint8)
    floats[:, :, 3] = np.arange(256, dtype=np.uint8)[:, None]
    floats[:, :, 31] = np.arange(256, dtype=np.uint8)
    numbers, steps = whole_numbers(floats.reshape(256, -1))
    right, right_steps = plain_whole_numbers(floats.reshape(256, -1))
    np.testing.assert_array_equal(numbers, right)
    np.testing.assert_array_equal(steps, right_steps)
