"""Mamba-2 (Dao and Gu, "Transformers are SSMs", 2024): a state that decays by a factor of each head and token.

    S <- exp(A dt) S + B (dt x)^T,   y = S^T C + D x        for each head, with B and C shared by a group of heads

z, x, B, C and dt are one projection of the layer's input; x, B and C go through a short convolution first. What comes
out is gated by z and normalised. The state after a token is computed from the one before it and the token alone, in
float32: never as the product of a chunk's tokens, so that neither chunks nor company show.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch.nn import functional

from asyncengine.execution.layers.basic import Linear, Matrix, NormConfig
from asyncengine.execution.layers.causal_conv import CausalConv
from asyncengine.execution.layers.options import LayerOptions
from asyncengine.execution.layers.sharded import even_cuts, local_slice, share_of
from asyncengine.execution.layers.states import StateLayer, StateSpec, StateStep, by_kernel, each_token, recur
from asyncengine.execution.layers.step import StepContext
from asyncengine.execution.layers.stored import TensorSlot


@dataclass(frozen=True, slots=True)
class Mamba2Config:
    """A Mamba-2 layer, with the prefix of the checkpoint's names."""

    heads: int
    head_dim: int
    state_size: int
    groups: int
    """Equal parts of the heads, which share B and C."""
    taps: int
    epsilon: float
    """Epsilon of the norm."""
    norm: Literal["gated", "before gate"] | None = "gated"
    """The norm's input: y times silu(z), or y, and the result is then multiplied by silu(z). None: only the gate."""
    norm_groups: int = 1
    """Equal groups of a row's numbers that are normalised separately."""
    bias: bool = False
    """Whether the projections have biases."""
    out_bias: bool = False
    conv_bias: bool = True
    limits: tuple[float, float] = (0.0, float("inf"))
    """Bounds of every token's dt. (transformers bounds those of a prompt, and not those that it generates one by
    one.)"""
    scales: tuple[float, float, float, float, float] | None = None
    """Factors of the projection's z, x, B, C and dt (Falcon-H1)."""
    out_scale: float = 1.0
    """A factor of the result (Falcon-H1)."""
    name: str = "mamba."

    @property
    def units(self) -> int:
        """Equal groups of heads that can be computed separately, norm included."""
        return self.groups if self.norm is None else math.gcd(self.groups, self.norm_groups)

    def shard(self, size: int) -> Mamba2Config:
        """The configuration of one of `size` equal shards of the heads."""
        groups = 1 if self.norm is None else self.norm_groups // size
        return replace(self, heads=self.heads // size, groups=self.groups // size, norm_groups=groups)

    def build(self, options: LayerOptions, norm: NormConfig, prefix: str, width: int, index: int) -> Mamba2:
        return Mamba2(options, self, prefix + self.name, width, index)


class Mamba2(StateLayer):
    """A Mamba-2 layer.

    A state is [heads, state size, dimensions of a head]: sums over the state size cross no lanes.
    """

    def __init__(self, options: LayerOptions, config: Mamba2Config, path: str, width: int, index: int) -> None:
        self.index, self._path, self._kernels, self._whole = index, path, options.kernels, config
        inner, units = config.heads * config.head_dim, config.units
        sizes = [inner, inner, *[config.groups * config.state_size] * 2, config.heads]
        outputs, rows = sum(sizes), [size // units for size in sizes]
        self.share = share_of(options.ranks, even_cuts(options.ranks, units), rows, rows[0])
        matrices = [Matrix(path + "in_proj", outputs)]
        self.inputs = Linear(options, matrices, width, bias=config.bias, share=self.share)
        self.conv = CausalConv(
            options, path + "conv1d", sum(sizes[1:4]), config.taps, bias=config.conv_bias, activation="silu",
            spans=None if self.share is None else self.share.rows(rows[1:4]),
        )  # fmt: skip
        self.out = Linear(options, [Matrix(path + "out_proj", width)], inner, bias=config.out_bias)
        if self.share is not None:
            config = config.shard(self.share.ranks.size)
        self.config = config
        """The configuration with this rank's heads."""
        self.channels, self.shared = config.heads * config.head_dim, config.groups * config.state_size
        self._sizes = [self.channels, self.conv.channels, config.heads]
        vectors = options.zeros(3, config.heads, dtype=torch.float32)
        self.decay, self.skip, self.step_bias = vectors
        """[heads] each: A, which is negative; D; what is added to dt."""
        self.decay.fill_(-1.0)
        self.weight = options.zeros(self.channels, dtype=torch.float32).fill_(1.0)
        """The norm's weight."""
        self.scales: torch.Tensor | None = None
        if config.scales is not None:
            counts = torch.tensor([self.channels, self.channels, self.shared, self.shared, config.heads])
            made = torch.tensor(config.scales, dtype=torch.float32).repeat_interleave(counts)
            self.scales = options.zeros(len(made), dtype=torch.float32).copy_(made)
        parameters = (self.decay, self.skip, self.step_bias, self.weight)
        self.kernel = _kernel(options, config, sum(self._sizes), self.conv, parameters)
        self.spec = StateSpec(
            (config.heads, config.state_size, config.head_dim), self.conv.window,
            (self.channels, self.shared, self.shared), units, self.share is not None,
        )  # fmt: skip
        self.rule = self.conv.on_device and self.conv.on_device.Recurrence(
            config.heads, config.heads // config.groups, config.state_size, config.head_dim,
            (self.channels + self.shared, self.channels, 0), self.decay, self.step_bias, config.limits, self.skip,
        )  # fmt: skip

    def projected(self, x: torch.Tensor, step: StepContext) -> torch.Tensor:
        projected = self.inputs.local_outputs(x, step.adapters)
        return projected if self.scales is None else self._kernels.scale_each(projected, self.scales)

    def mix(self, projected: torch.Tensor, step: StateStep) -> torch.Tensor:
        if self.kernel is not None:
            return by_kernel(self.kernel, projected, step, self.index)
        gate, mixed, times = torch.split(projected, self._sizes, dim=-1)
        read = recur(step, self.index, self.conv.advance, mixed, (times, times), self._token, self.rule)
        if self.conv.on_device is not None:
            config, size = self.config, self.channels // self.config.norm_groups
            normed: torch.Tensor = self.conv.on_device.gated_norm(
                read.flatten(1), gate, self.weight, config.epsilon, size, norm=config.norm, scale=config.out_scale
            )
            return normed
        return (self._gated(read.flatten(1), gate) * self.config.out_scale).to(projected.dtype)

    def _token(
        self, convolved: torch.Tensor, times: torch.Tensor, _: torch.Tensor, state: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(outputs [sequences, heads, head dim], states after) of one token of each sequence, float32."""
        config = self.config
        x, into, out = torch.split(convolved.float(), [self.channels, self.shared, self.shared], dim=1)
        x = torch.unflatten(x, 1, (config.heads, config.head_dim))
        heads_per_group = config.heads // config.groups
        into, out = (
            torch.unflatten(vectors, 1, (config.groups, config.state_size)).repeat_interleave(heads_per_group, 1)
            for vectors in (into, out)
        )
        step = each_token(functional.softplus, times.float() + self.step_bias).clamp(*config.limits)
        kept = each_token(torch.exp, step * self.decay)
        state = state * kept[..., None, None] + into[..., None] * (step[..., None] * x)[..., None, :]
        return (state * out[..., None]).sum(-2) + self.skip[:, None] * x, state

    def _gated(self, y: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """float32 [T, heads * dim] of y alike, normalised and gated."""
        factor = each_token(functional.silu, gate.float())
        if self.config.norm is None:
            return y * factor
        if self.config.norm == "gated":
            y = y * factor
        grouped = y.view(len(y), self.config.norm_groups, -1)
        y = functional.rms_norm(grouped, grouped.shape[-1:], None, self.config.epsilon).flatten(1) * self.weight
        return y if self.config.norm == "gated" else y * factor

    def slots(self) -> Iterator[tuple[str, TensorSlot]]:
        yield from super().slots()
        count, size = self._whole.heads, self.out.inputs
        heads, inner = [(local_slice(self.share, each), slice(None)) for each in (count, size)]
        yield (f"{self._path}A_log", TensorSlot.some(self.decay, count, [heads], 0.0, lambda it: -it.float().exp()))
        yield f"{self._path}D", TensorSlot.some(self.skip, count, [heads], 1.0)
        yield f"{self._path}dt_bias", TensorSlot.some(self.step_bias, count, [heads], 0.0)
        if self.config.norm is not None:
            yield f"{self._path}norm.weight", TensorSlot.some(self.weight, size, [inner], 1.0)


def _kernel(
    options: LayerOptions, config: Mamba2Config, width: int, conv: CausalConv, parameters: tuple[torch.Tensor, ...]
) -> Any:
    """The compiled call for everything between the projections; None: there is none for this layer here.

    `width`: numbers of a row of the first projection."""
    if not options.compiled or options.kernels.name != "compiled":
        return None
    from asyncengine.kernels.api import mamba2 as kernels

    norm = {"gated": kernels.GATED, "before gate": kernels.BEFORE_GATE, None: kernels.GATE_ALONE}[config.norm]
    form = kernels.Mamba2Form(
        config.heads, config.head_dim, config.state_size, config.groups, norm, config.norm_groups, config.epsilon,
        config.limits, width, config.taps, config.out_scale,
    )  # fmt: skip
    return kernels.Mamba2Kernel(form, parameters, conv.weight, conv.bias) if form.fits else None
