"""xIELU (Huang and Schlag 2024): an activation whose two slopes are learned in each layer (Apertus)."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.nn import functional

from asyncengine.layers.options import LayerOptions
from asyncengine.layers.slots import TensorSlot


class XIELU:
    """a x^2 + beta x above 0, b (exp(min(x, eps)) - 1 - x) + beta x below; computed in float32, rounded once.

    a = softplus(alpha_p) and b = beta + softplus(alpha_n) are of the checkpoint, as are beta and eps.
    """

    def __init__(self, options: LayerOptions, path: str) -> None:
        self._path = path
        self._slopes = options.zeros(2, dtype=torch.float32)
        self._constants = options.zeros(2, dtype=torch.float32)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[..., width] -> [..., width]."""
        (up, down), (beta, epsilon) = functional.softplus(self._slopes), self._constants
        wide = x.float()
        below = (torch.expm1(torch.minimum(wide, epsilon)) - wide) * (down + beta)
        out: torch.Tensor = torch.where(wide > 0, up * wide * wide, below) + beta * wide
        return out.to(x.dtype)

    def slots(self) -> Iterator[tuple[str, TensorSlot]]:
        """Tensors of the checkpoint that it takes, by name."""
        yield f"{self._path}.alpha_p", TensorSlot.into(self._slopes[:1], initial=0.2)
        yield f"{self._path}.alpha_n", TensorSlot.into(self._slopes[1:], initial=-1.0)
        yield f"{self._path}.beta", TensorSlot.into(self._constants[0], initial=0.5)
        yield f"{self._path}.eps", TensorSlot.into(self._constants[1], initial=-1e-6)
