"""Weights of a model in training while its adapter is merged into them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def merged(model: Any) -> Iterator[None]:
    """Merge the PEFT adapter into `model` meanwhile. The weights below it are put back as they were, to the bit:
    subtracting what was added would leave a rounding error behind at every step of a training."""
    kept = {
        name: tensor.detach().clone()
        for name, tensor in model.named_parameters()
        if "base_layer" in name and tensor.is_floating_point()
    }
    model.merge_adapter()
    try:
        yield
    finally:
        model.unmerge_adapter()
        with torch.no_grad():
            for name, tensor in kept.items():
                model.get_parameter(name).copy_(tensor)
