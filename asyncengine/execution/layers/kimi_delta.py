"""Kimi Delta Attention (Kimi team 2025): the gated delta rule whose state forgets each dimension apart."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn import functional

from asyncengine.execution.layers.basic import Linear, Matrix, Norm, NormConfig
from asyncengine.execution.layers.causal_conv import CausalConv
from asyncengine.execution.layers.gated_delta import Columns, delta_rule, learn, unit
from asyncengine.execution.layers.options import LayerOptions
from asyncengine.execution.layers.sharded import even_cuts, local_slice, share_of
from asyncengine.execution.layers.states import StateLayer, StateSpec, StateStep, by_kernel, each_token, recur
from asyncengine.execution.layers.step import StepContext
from asyncengine.execution.layers.stored import TensorSlot


@dataclass(frozen=True, slots=True)
class KimiDeltaConfig:
    """One such layer, with the checkpoint's names for its tensors. A `StateConfig`."""

    heads: int
    head_dim: int
    taps: int
    """Inputs that the convolutions see."""
    epsilon: float
    """Epsilon of the output norm."""
    prefix: str = "self_attn."

    @property
    def size(self) -> int:
        """Numbers of all heads' queries."""
        return self.heads * self.head_dim

    @property
    def projections(self) -> dict[str, int]:
        """Name -> outputs of the projections of the input; "f_a" and "g_a" are the inputs of "f_b" and "g_b"."""
        return {"q": self.size, "k": self.size, "v": self.size, "b": self.heads, "f_a": self.head_dim,
                "g_a": self.head_dim}  # fmt: skip

    @property
    def columns(self) -> dict[str, Columns]:
        """Columns of "q", "k", "v", "z", "b", "a" in all projections side by side; "z" comes from "g_b", "a" from
        "f_b"."""
        dim, behind = self.head_dim, sum(self.projections.values())
        firsts = {"q": 0, "k": self.size, "v": 2 * self.size, "z": behind, "b": 3 * self.size, "a": behind + self.size}
        return {name: Columns(first, 1 if name == "b" else dim) for name, first in firsts.items()}

    def build(self, options: LayerOptions, norm: Any, prefix: str, width: int, index: int) -> KimiDelta:
        return KimiDelta(options, self, prefix + self.prefix, width, index)


class KimiDelta(StateLayer):
    """A Kimi Delta Attention layer: a merged projection, two low-rank gates, and the delta rule for each head."""

    def __init__(self, options: LayerOptions, config: KimiDeltaConfig, prefix: str, width: int, index: int) -> None:
        self._whole, self.index, self._prefix, self._kernels = config, index, prefix, options.kernels
        matrices = [Matrix(f"{prefix}{name}_proj", size) for name, size in config.projections.items()]
        dim, cuts = config.head_dim, even_cuts(options.ranks, config.heads)
        self.share = share_of(options.ranks, cuts, [dim, dim, dim, 1], dim, copied=2 * dim)
        self.inputs = Linear(options, matrices, width, share=self.share)
        gates = share_of(options.ranks, cuts, [dim], dim)
        self.gate, self.forget = (
            Linear(options, [Matrix(f"{prefix}{name}_b_proj", config.size)], dim, share=gates) for name in "gf"
        )
        self.conv = CausalConv(
            options, f"{prefix}conv1d", 3 * config.size, config.taps, activation="silu",
            spans=None if self.share is None else self.share.rows([dim, dim, dim]),
        )  # fmt: skip
        self.norm = Norm(options, NormConfig(epsilon=config.epsilon), f"{prefix}o_norm", dim)
        self.out = Linear(options, [Matrix(f"{prefix}o_proj", width)], config.size)
        if self.share is not None:
            config = replace(config, heads=config.heads // self.share.ranks.size)
        self.config = config
        """The configuration with this rank's heads."""
        self.rate = options.zeros(config.heads, dtype=torch.float32)
        """exp(A_log)."""
        self.dt_bias = options.zeros(config.size, dtype=torch.float32)
        self.spec = StateSpec(
            (config.heads, dim, dim), self.conv.window, (config.size,) * 3, self._whole.heads, self.share is not None
        )
        heads = (config.heads, config.heads, config.head_dim, config.head_dim)
        self.rule = delta_rule(self.conv.on_device, heads, self.rate, self.dt_bias)
        if options.compiled:
            from asyncengine.kernels.api import GatedDeltaKernel

            columns = [number for own in config.columns.values() for number in own]
            width = sum(config.projections.values()) + 2 * config.size
            sizes = [config.heads, 1, config.head_dim, config.head_dim, config.taps, width]
            vectors = (self.conv.weight, self.rate, self.dt_bias, self.norm.weight)
            self.kernel = GatedDeltaKernel(columns, sizes, *vectors, config.epsilon, by_channel=True)

    def projected(self, x: torch.Tensor, step: StepContext) -> torch.Tensor:
        first = self.inputs.local_outputs(x, step.adapters)
        dim, end = self.config.head_dim, sum(self.config.projections.values())
        joined = self._kernels.joined
        forget = self.forget.local_outputs(joined(first[:, end - 2 * dim : end - dim]), step.adapters)
        gate = self.gate.local_outputs(joined(first[:, end - dim : end]), step.adapters)
        return joined(first[:, :end], gate, forget)

    def mix(self, projected: torch.Tensor, step: StateStep) -> torch.Tensor:
        if self.kernel is not None:
            return by_kernel(self.kernel, projected, step, self.index)
        config, columns = self.config, self.config.columns
        inputs = projected[:, : 3 * config.size]
        rates, gates, forgets = (
            projected[:, columns[name].first :][:, : columns[name].step * config.heads] for name in ("b", "z", "a")
        )
        read = recur(step, self.index, self.conv.advance, inputs, (rates, forgets), self._token, self.rule)
        if self.conv.on_device is not None:
            normed: torch.Tensor = self.conv.on_device.gated_norm(
                read.flatten(1), gates, self.norm.weight, config.epsilon, config.head_dim, activation="sigmoid"
            )
            return normed
        normed = functional.rms_norm(read, (config.head_dim,), None, config.epsilon) * self.norm.weight.float()
        gate = each_token(torch.sigmoid, gates.float()).view_as(normed)
        return (normed * gate).flatten(1).to(inputs.dtype)

    def _token(
        self, qkv: torch.Tensor, rate: torch.Tensor, forget: torch.Tensor, state: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(what is read [sequences, heads, head dim], the states after) of a token of each sequence, all float32."""
        config = self.config
        query, key, value = torch.unflatten(qkv.float(), 1, (3, config.heads, config.head_dim)).unbind(1)
        query, key = unit(query) * config.head_dim**-0.5, unit(key)
        soft = functional.softplus(forget.float() + self.dt_bias)
        soft = torch.unflatten(soft, 1, (config.heads, config.head_dim))
        decay = torch.exp(-self.rate[:, None] * soft)
        return learn(state * decay[..., None], query, key, value, rate.float().sigmoid())

    def linears(self) -> list[Linear]:
        return [self.inputs, self.gate, self.forget, self.out]

    def norms(self) -> list[Norm]:
        return [self.norm]

    def slots(self) -> Iterator[tuple[str, TensorSlot]]:
        """Tensors of the checkpoint that it takes, by name."""
        whole = self._whole

        def load(tensor: Any) -> None:
            self.rate.copy_(tensor.float().exp().view(-1)[local_slice(self.share, whole.heads)])

        layers: list[Linear | Norm] = [*self.linears(), self.norm]
        for layer in layers:
            yield from layer.slots()
        for index, name in enumerate("qkv"):
            yield f"{self._prefix}{name}_conv1d.weight", self.conv.weight_slot(index * whole.size, whole.size)
        yield f"{self._prefix}A_log", TensorSlot((1, 1, whole.heads, 1), load, 0.0)
        numbers = [(local_slice(self.share, whole.size), slice(None))]
        yield f"{self._prefix}dt_bias", TensorSlot.some(self.dt_bias, whole.size, numbers, 1.0)
