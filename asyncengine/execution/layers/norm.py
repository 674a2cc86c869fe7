"""Normalisation, alone or with the residual sum before it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch.nn import functional

from asyncengine.execution.layers.options import LayerOptions
from asyncengine.execution.layers.stored import TensorSlot


@dataclass(frozen=True, slots=True)
class NormConfig:
    """A family's norm."""

    kind: Literal["rms", "layer"] = "rms"
    epsilon: float = 1e-6
    offset: float = 0.0
    """A number added to the checkpoint's weight: 1 in Gemma's, in float32."""
    weight: bool = True
    """False: normalisation only (OLMo 1)."""
    bias: bool = False


class Norm:
    """x / rms(x) * weight, or layer normalisation, over the last dimension; rounded once, to x's dtype.

    `heads`: the weight is [heads, width], one row for each head of x [T, heads, width] (Cohere); with "{}" in the path,
    the checkpoint has a tensor [width] for each (StableLM). `kept`: x has these heads of them only.
    """

    def __init__(
        self, options: LayerOptions, config: NormConfig, path: str, width: int, heads: int = 0,
        kept: slice | None = None,
    ) -> None:  # fmt: skip
        self.config = config
        self.path = path
        self.width = width
        self._kernels = options.kernels
        shape = (heads, width) if heads else (width,)
        by_kernel = config.kind == "rms" and not heads
        self._weight = options.zeros(*shape, dtype=options.norm_dtype if by_kernel else torch.float32).fill_(1.0)
        self._bias = options.zeros(*shape, dtype=torch.float32) if config.bias else None
        self.weight, self.bias = self._weight, self._bias
        if kept is not None:
            self.weight, self.bias = self._weight[kept], None if self._bias is None else self._bias[kept]
        self._by_kernel = by_kernel
        self._plain = config.kind == "layer" and not heads
        """A layer norm with one weight for all."""
        self._shift = torch.zeros_like(self.weight) if self._plain and self.bias is None else self.bias
        self._folded = 0.0 if by_kernel and options.norm_dtype != torch.float32 else config.offset
        """The part of the offset that is added to the stored weight: in a narrower type it would be rounded."""
        self._offset = config.offset - self._folded

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        config = self.config
        if self._by_kernel:
            return self._kernels.rms_norm(x, self.weight, config.epsilon, self._offset)
        if self._plain:
            assert self._shift is not None
            return self._kernels.layer_norm(x, self.weight, self._shift, config.epsilon)
        return self._normed(x.float()).to(x.dtype)

    def _normed(self, wide: torch.Tensor) -> torch.Tensor:
        """In float32, without a kernel of ours."""
        config = self.config
        if config.kind == "layer":
            wide = functional.layer_norm(wide, (self.width,), None, None, config.epsilon)
        else:
            wide = functional.rms_norm(wide, (self.width,), None, config.epsilon)
        wide = wide * self.weight
        return wide if self.bias is None else wide + self.bias

    def add(
        self, residual: torch.Tensor, branch: torch.Tensor, scale: float, kept: bool = True
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(residual + branch * scale, its norm). Not `kept`: anything may stand in the sum's place."""
        if self._by_kernel:
            return self._kernels.add_rms_norm(residual, branch, scale, self.weight, self.config.epsilon, self._offset)
        if self._plain:
            assert self._shift is not None
            epsilon = self.config.epsilon
            return self._kernels.add_layer_norm(residual, branch, scale, self.weight, self._shift, epsilon, kept)
        total = torch.add(residual.float(), branch, alpha=scale)
        return total.to(residual.dtype), self._normed(total).to(residual.dtype)

    def slots(self) -> Iterator[tuple[str, TensorSlot]]:
        """Tensors of the checkpoint that it takes, by name."""
        if "{}" in self.path:
            for head, row in enumerate(self._weight):
                yield f"{self.path.format(head)}.weight", TensorSlot.into(row, self._folded, 1.0 - self.config.offset)
        elif self.config.weight:
            yield f"{self.path}.weight", TensorSlot.into(self._weight, self._folded, 1.0 - self.config.offset)
        if self._bias is not None:
            yield f"{self.path}.bias", TensorSlot.into(self._bias, initial=0.0)

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes + (0 if self._shift is None else self._shift.nbytes)
