"""Options and weights that single layers are built with in tests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from asyncengine.execution.layers.kernels import LayerKernels, layer_kernels
from asyncengine.execution.layers.options import LayerOptions
from asyncengine.execution.layers.stored import TensorSlot

CPU = torch.device("cpu")


def options(dtype: torch.dtype = torch.float32, *, plain: bool = False, **fields: Any) -> LayerOptions:
    """Options on the CPU, with torch's own norms and activations if `plain`, else with the best there are."""
    return LayerOptions(dtype, CPU, LayerKernels() if plain else layer_kernels("auto", dtype, CPU), **fields)


def fill(part: Any, tensors: Mapping[str, torch.Tensor]) -> None:
    """Load what a layer takes, which is exactly these tensors."""
    slots: dict[str, TensorSlot] = dict(part.slots())
    assert {name: slot.shape for name, slot in slots.items()} == {
        name: tuple(tensor.shape) for name, tensor in tensors.items()
    }
    for name, slot in slots.items():
        slot.load(tensors[name])
