"""A file with one quantized matrix."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from asyncengine.execution.models.checkpoint import find_matrices, read_header
from asyncengine.execution.models.formats.stored_tensors import MappedMatrix, StoredTensors
from asyncengine.execution.models.mapped import OpenFiles


def matrix_of(
    tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any], folder: Path, path: str = "layer."
) -> MappedMatrix:
    """The one matrix of a file with these tensors of one module, read as `config` says."""
    file = folder / "model.safetensors"
    save_file({path + name: tensor.contiguous() for name, tensor in tensors.items()}, str(file))
    opened, headers = OpenFiles(), read_header(file)
    (found,) = find_matrices(config, StoredTensors(folder, headers, lambda name: opened.read(file, name))).values()
    return MappedMatrix(found, {role: opened.read(file, name) for role, name in found.names.items()}, opened.release)


def random_weight(outputs: int = 96, inputs: int = 128) -> torch.Tensor:
    """A matrix of normally distributed numbers."""
    return torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(outputs))
