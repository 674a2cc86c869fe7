"""Gated short convolution (LFM2, Liquid AI 2025): what mixes tokens is a causal convolution of a few taps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from asyncengine.layers.causal_conv import CausalConv
from asyncengine.layers.linear import Linear, Part
from asyncengine.layers.norm import Norm, NormConfig
from asyncengine.layers.options import LayerOptions
from asyncengine.layers.slots import TensorSlot
from asyncengine.layers.states import StateSpec
from asyncengine.layers.step import StepContext


@dataclass(frozen=True, slots=True)
class ShortConvConfig:
    """Such a layer, with the checkpoint's names."""

    taps: int
    bias: bool = False
    """Whether the convolution and both projections have biases."""
    projection: str = "conv.in_proj"
    conv: str = "conv.conv"
    out: str = "conv.out_proj"

    def build(self, options: LayerOptions, norm: NormConfig, prefix: str, width: int, index: int) -> ShortConv:
        return ShortConv(options, self, prefix, width, index)


class ShortConv:
    """out(C * conv(B * x)) of the projection's three parts B, C and x. It remembers the last inputs of the convolution.

    `index` is the place of its windows among the state pools.
    """

    def __init__(self, options: LayerOptions, config: ShortConvConfig, prefix: str, width: int, index: int) -> None:
        self.index = index
        self.projection = Linear(options, [Part(prefix + config.projection, 3 * width)], width, bias=config.bias)
        self.conv = CausalConv(options, prefix + config.conv, width, config.taps, bias=config.bias)
        self.out = Linear(options, [Part(prefix + config.out, width)], width, bias=config.bias)
        self.kernel = _kernel(options, self.conv)
        self.spec = StateSpec(window=self.conv.window)

    def __call__(self, x: torch.Tensor, step: StepContext) -> torch.Tensor:
        """[T, width] -> [T, width]."""
        assert step.states is not None
        projected = self.projection(x, step.adapters)
        if self.kernel is not None:
            made = self.kernel(projected, step.states.pools.windows[self.index], step.states.segments)
            return self.out(made, step.adapters)
        before, after, inputs = projected.chunk(3, dim=-1)
        made = self.conv(before * inputs, step.states, self.index)
        return self.out(made.mul_(after), step.adapters)

    def linears(self) -> list[Linear]:
        return [self.projection, self.out]

    def norms(self) -> list[Norm]:
        return []

    def slots(self) -> Iterator[tuple[str, TensorSlot]]:
        """Tensors of the checkpoint that it takes, by name."""
        for part in (self.projection, self.conv, self.out):
            yield from part.slots()

    @property
    def nbytes(self) -> int:
        """Bytes of everything outside its linears."""
        return self.conv.nbytes


def _kernel(options: LayerOptions, conv: CausalConv) -> Any:
    """The compiled call for everything between the projections; None: there is none here."""
    if not options.compiled or options.kernels.name != "compiled":
        return None
    from asyncengine.kernels.cpu.short_conv import ShortConvKernel

    return ShortConvKernel(conv.weight, conv.bias)
