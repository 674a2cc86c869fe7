"""Mixtures of random experts for the grouped kernels, on any device, and what they should give in float64."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from asyncengine.execution.layers.experts import clamped


@dataclass
class Mixture:
    """Rows, whom they chose, and the matrices of all experts."""

    x: torch.Tensor
    chosen: torch.Tensor
    weights: torch.Tensor
    up: torch.Tensor
    """[experts, outputs, width]."""
    down: torch.Tensor
    biases: tuple[torch.Tensor, torch.Tensor] | None = None

    @property
    def experts(self) -> int:
        return len(self.up)

    def exactly(self) -> torch.Tensor:
        """Silu of gates and no biases, or the bounded activation of neighbours and biases."""
        out = torch.zeros(self.x.shape, dtype=torch.float64, device=self.x.device)
        for row in range(len(self.x)):
            for expert, weight in zip(self.chosen[row].tolist(), self.weights[row].tolist(), strict=True):
                both = self.up[expert].double() @ self.x[row].double()
                if self.biases is None:
                    gate, up = both.chunk(2)
                    made = self.down[expert].double() @ (functional.silu(gate) * up)
                else:
                    between = clamped(both + self.biases[0][expert].double(), 1.702, 7.0).double()
                    made = self.down[expert].double() @ between + self.biases[1][expert].double()
                out[row] += weight * made
        return out

    def by_kernels(self) -> torch.Tensor:
        """The same by the grouped kernels."""
        from asyncengine.kernels.cuda.grouped_experts import ExpertWeights, mix

        biases = (None, None) if self.biases is None else self.biases
        up, down = (
            ExpertWeights(whole.flatten(0, 1), bias) for whole, bias in zip((self.up, self.down), biases, strict=True)
        )
        activation = None if self.biases is None else lambda both: clamped(both, 1.702, 7.0)
        return mix(self.x, self.chosen, self.weights, up, down, activation, self.experts)


def make_mixture(
    rows: int, count: int, experts: int, width: int, inner: int, dtype: torch.dtype, device: str, *, bounded: bool
) -> Mixture:
    """A mixture drawn at random. Two experts are liked more than the others, and one by nobody."""
    generator = torch.Generator().manual_seed(rows + width)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    liked = draw(rows, experts)
    liked[:, :2] += 2
    liked[:, -1] = -torch.inf
    chosen = liked.topk(count, dim=1).indices
    weights = torch.rand(rows, count, generator=generator)
    parts = [draw(rows, width), draw(experts, 2 * inner, width) / width**0.5, draw(experts, width, inner) / inner**0.5]
    biases = (draw(experts, 2 * inner), draw(experts, width)) if bounded else None
    x, up, down = (part.to(device, dtype) for part in parts)
    both = None if biases is None else (biases[0].to(device, dtype), biases[1].to(device, dtype))
    return Mixture(x, chosen.to(device), weights.to(device), up, down, both)


ERROR = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}
"""The largest error of the sum, as a part of its size: what rounding takes."""
