"""The Muon optimizer (Jordan et al. 2024) for matrices, and AdamW (Loshchilov & Hutter 2019) for everything else."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def orthogonalize(matrices: Tensor, steps: int = 5) -> Tensor:
    """Approximately replace every singular value of a stack of matrices by one (Newton-Schulz iteration)."""
    a, b, c = _COEFFICIENTS
    x = matrices.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    result: Tensor = (x.mT if tall else x).float()
    return result


class Muon:
    """Momentum whose update is orthogonalized; matrices of one shape are treated as one stack."""

    def __init__(self, parameters: Sequence[Tensor], momentum: float = 0.95, decay: float = 0.05) -> None:
        self.momentum = momentum
        self.decay = decay
        self.groups: dict[tuple[int, ...], list[Tensor]] = {}
        for parameter in parameters:
            self.groups.setdefault(tuple(parameter.shape), []).append(parameter)
        self.buffers = {shape: torch.zeros(len(group), *shape) for shape, group in self.groups.items()}

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """Update with Nesterov momentum; the step is scaled so that its size does not depend on the shape."""
        for shape, group in self.groups.items():
            gradients = torch.stack([parameter.grad for parameter in group if parameter.grad is not None])
            buffer = self.buffers[shape].lerp_(gradients, 1 - self.momentum)
            update = orthogonalize(gradients.lerp(buffer, self.momentum))
            scale = rate * max(1.0, shape[0] / shape[1]) ** 0.5
            for parameter, change in zip(group, update, strict=True):
                parameter.mul_(1 - rate * self.decay).add_(change, alpha=-scale)

    def state(self) -> dict[tuple[int, ...], Tensor]:
        return self.buffers

    def load(self, state: dict[tuple[int, ...], Tensor]) -> None:
        for shape, buffer in state.items():
            self.buffers[shape].copy_(buffer)
