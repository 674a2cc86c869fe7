"""Gated short convolution (LFM2, Liquid AI 2025): what mixes tokens is a causal convolution of a few taps."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from asyncengine.execution.layers.basic import Linear, Matrix, NormConfig
from asyncengine.execution.layers.causal_conv import CausalConv
from asyncengine.execution.layers.options import LayerOptions
from asyncengine.execution.layers.sharded import even_cuts, share_of
from asyncengine.execution.layers.states import StateLayer, StateSpec, StateStep, by_kernel

_UNIT = 32
"""Channels that one process has together: whole vectors of any machine."""


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


class ShortConv(StateLayer):
    """out(C * conv(B * x)) of the projection's three parts B, C and x. It remembers the convolution's last inputs."""

    def __init__(self, options: LayerOptions, config: ShortConvConfig, prefix: str, width: int, index: int) -> None:
        self.index, units = index, width // _UNIT if width % _UNIT == 0 else 1
        channels = width // units
        self.share = share_of(options.ranks, even_cuts(options.ranks, units), [channels] * 3, channels)
        matrices = [Matrix(prefix + config.projection, 3 * width)]
        self.inputs = Linear(options, matrices, width, bias=config.bias, share=self.share)
        self.conv = CausalConv(
            options, prefix + config.conv, width, config.taps, bias=config.bias,
            spans=None if self.share is None else self.share.rows([channels]),
        )  # fmt: skip
        self.out = Linear(options, [Matrix(prefix + config.out, width)], width, bias=config.bias)
        self.spec = StateSpec(window=self.conv.window, units=units, divided=self.share is not None)
        if options.compiled and options.kernels.name == "compiled":
            from asyncengine.kernels.api import ShortConvKernel

            self.kernel = ShortConvKernel(self.conv.weight, self.conv.bias)

    def mix(self, projected: torch.Tensor, step: StateStep) -> torch.Tensor:
        if self.kernel is not None:
            return by_kernel(self.kernel, projected, step, self.index)
        before, after, inputs = projected.chunk(3, dim=-1)
        return self.conv(before * inputs, step, self.index).mul_(after)
