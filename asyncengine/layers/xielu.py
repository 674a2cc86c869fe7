"""xIELU (Huang and Schlag 2024): an activation whose two slopes are learned in each layer (Apertus)."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch.nn import functional

from asyncengine.layers.options import LayerOptions
from asyncengine.layers.slots import TensorSlot
from asyncengine.layers.stored import StoredMatrix, dense


class XIELU:
    """The parameters of a x^2 + beta x above 0, b (exp(min(x, eps)) - 1 - x) + beta x below; computed in float32.

    a = softplus(alpha_p) and b = beta + softplus(alpha_n) are of the checkpoint, as are beta and eps.
    """

    def __init__(self, options: LayerOptions, path: str) -> None:
        self._path = path
        self.parameters = options.zeros(4, dtype=torch.float32)
        """a, b - beta, beta and eps, as `LayerKernels.activation` takes them."""

    def _load(self, place: int, tensor: torch.Tensor | StoredMatrix) -> None:
        number = (tensor if isinstance(tensor, torch.Tensor) else dense(tensor)).float().reshape(())
        self.parameters[place] = functional.softplus(number) if place < 2 else number

    def slots(self) -> Iterator[tuple[str, TensorSlot]]:
        """Tensors of the checkpoint that it takes, by name."""
        initial = {"alpha_p": 0.2, "alpha_n": -1.0, "beta": 0.5, "eps": -1e-6}
        for place, (name, value) in enumerate(initial.items()):
            yield f"{self._path}.{name}", TensorSlot((1,) if place < 2 else (), partial(self._load, place), value)
