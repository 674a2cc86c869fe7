"""Each format's matrices are what their documentation says, to the bit where nothing is rounded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.one_matrix import matrix_of, random_weight
from support.quantized_checkpoints import KINDS

from asyncengine.layers.stored import dense

EXACT = [name for name in KINDS if not name.startswith("fp8")]


@pytest.mark.parametrize("name", EXACT)
def test_the_matrix_is_what_was_written(name: str, tmp_path: Path) -> None:
    """In any slices of rows."""
    written = KINDS[name].write(random_weight())
    matrix = matrix_of(written.tensors, KINDS[name].config, tmp_path)
    assert matrix.shape == (96, 128)
    whole = dense(matrix)
    torch.testing.assert_close(whole, written.dense, rtol=1e-6, atol=0.0)
    parts = [dense(matrix, first, last) for first, last in ((0, 1), (1, 64), (64, 93), (93, 96))]
    assert torch.equal(torch.cat(parts), whole)
    numbers = matrix.rows(0, 96).numbers
    assert numbers.max() < 2**matrix.form.bits
