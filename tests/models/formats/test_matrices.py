"""Each format's matrices are what their documentation says, to the bit where nothing is rounded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support.quantized_checkpoints import KINDS, Written

from asyncengine.layers.stored import dense
from asyncengine.models.checkpoint import read_header
from asyncengine.models.formats.mapped_matrix import MappedMatrix
from asyncengine.models.formats.methods import find_matrices
from asyncengine.models.formats.stored_tensors import StoredTensors
from asyncengine.models.mapped import OpenFiles


def matrix_of(written: Written, config: Any, folder: Path, path: str = "layer.") -> MappedMatrix:
    """The one matrix of a file."""
    file = folder / "model.safetensors"
    save_file({path + name: tensor for name, tensor in written.tensors.items()}, str(file))
    opened, headers = OpenFiles(), read_header(file)
    (found,) = find_matrices(config, StoredTensors(folder, headers, lambda name: opened.read(file, name))).values()
    return MappedMatrix(found, {part: opened.read(file, name) for part, name in found.parts.items()}, opened.release)


def random_weight(outputs: int = 96, inputs: int = 128) -> torch.Tensor:
    return torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(outputs))


EXACT = [name for name in KINDS if not name.startswith("fp8")]


@pytest.mark.parametrize("name", EXACT)
def test_the_matrix_is_what_was_written(name: str, tmp_path: Path) -> None:
    """In any slices of rows."""
    written = KINDS[name].write(random_weight())
    matrix = matrix_of(written, KINDS[name].config, tmp_path)
    assert matrix.shape == (96, 128)
    whole = dense(matrix)
    torch.testing.assert_close(whole, written.dense, rtol=1e-6, atol=0.0)
    parts = [dense(matrix, first, last) for first, last in ((0, 1), (1, 64), (64, 93), (93, 96))]
    assert torch.equal(torch.cat(parts), whole)
    numbers = matrix.rows(0, 96).numbers
    assert numbers.max() < 2**matrix.form.bits
