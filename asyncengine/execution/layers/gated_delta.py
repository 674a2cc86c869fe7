"""The gated delta rule (Yang et al. 2024, "Gated Delta Networks"): a layer that keeps a matrix for each head.

A head's state S [key dim, value dim] forgets by a gate, then learns value v under key k as far as S does not know it:

    S = exp(g) S;  S = S + k (beta (v - S^T k))^T;  o = S^T q

with k and q of length one, g = -exp(A_log) softplus(a + dt_bias) and beta = sigmoid(b). Queries, keys and values have
gone through a short causal convolution; o is normalised and multiplied by silu(z). All of it is float32, one token
after the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from asyncengine.execution.layers import states
from asyncengine.execution.layers.basic import Linear, Matrix, Norm, NormConfig
from asyncengine.execution.layers.causal_conv import CausalConv
from asyncengine.execution.layers.options import LayerOptions
from asyncengine.execution.layers.sharded import even_cuts, local_slice, share_of
from asyncengine.execution.layers.stored import TensorSlot

_TINY = 1e-6
"""A term that keeps the division by a key's length finite: it is added to the square of the length."""


class Columns(NamedTuple):
    """The columns of one projection in all of them side by side: those of key head h begin at first + h * step."""

    first: int
    step: int


@dataclass(frozen=True, slots=True)
class GatedDeltaConfig:
    """One such layer, with the checkpoint's names for its tensors. A `StateConfig`."""

    key_heads: int
    value_heads: int
    """A multiple; each key head serves neighbouring ones."""
    key_dim: int
    value_dim: int
    taps: int
    """Inputs that the convolution sees."""
    epsilon: float
    """Epsilon of the output norm."""
    interleaved: bool = False
    """The projections' outputs are ordered by key head (Qwen3-Next), not by projection (Qwen3.5)."""
    apart: bool = False
    """Each projection has a matrix, and a convolution, of its own (OLMo Hybrid)."""
    most_rate: int = 1
    """The largest learning rate (beta). 2 allows negative eigenvalues of the state's transition (OLMo Hybrid)."""
    prefix: str = "linear_attn."

    @property
    def projections(self) -> list[tuple[str, int]]:
        """(name, outputs) of those of the input."""
        keys, values = self.key_heads * self.key_dim, self.value_heads * self.value_dim
        if self.apart:
            own = {"q": keys, "k": keys, "v": values, "g": values, "b": self.value_heads, "a": self.value_heads}
            return [(f"{name}_proj", size) for name, size in own.items()]
        if self.interleaved:
            return [("in_proj_qkvz", 2 * keys + 2 * values), ("in_proj_ba", 2 * self.value_heads)]
        sizes = {"qkv": 2 * keys + values, "z": values, "b": self.value_heads, "a": self.value_heads}
        return [(f"in_proj_{name}", size) for name, size in sizes.items()]

    @property
    def rows(self) -> list[int]:
        """Outputs of a key head in each block of the projections side by side."""
        group = self.value_heads // self.key_heads
        values = group * self.value_dim
        return [2 * (self.key_dim + values), 2 * group] if self.interleaved else [*self.mixed, values, group, group]

    @property
    def mixed(self) -> list[int]:
        """Channels of a key head in each block of the convolution: its queries, keys and values."""
        return [self.key_dim, self.key_dim, self.value_heads // self.key_heads * self.value_dim]

    @property
    def columns(self) -> dict[str, Columns]:
        """Columns of "q", "k", "v", "z", "b", "a" in the projections side by side."""
        group = self.value_heads // self.key_heads
        widths = {"q": self.key_dim, "k": self.key_dim, "v": group * self.value_dim, "z": group * self.value_dim}
        columns, first = {}, 0
        for widths_of_block in (widths, dict.fromkeys("ba", group)):
            step = sum(widths_of_block.values())
            for name, width in widths_of_block.items():
                columns[name] = Columns(first, step if self.interleaved else width)
                first += width if self.interleaved else width * self.key_heads
            first += (self.key_heads - 1) * step if self.interleaved else 0
        return columns

    def build(self, options: LayerOptions, norm: Any, prefix: str, width: int, index: int) -> GatedDelta:
        return GatedDelta(options, self, prefix + self.prefix, width, index)


class GatedDelta(states.StateLayer):
    """Many heads of the rule, of one projection of the input."""

    def __init__(self, options: LayerOptions, config: GatedDeltaConfig, prefix: str, width: int, index: int) -> None:
        self.index, units, rows, mixed = index, config.key_heads, config.rows, config.mixed
        self.share = share_of(options.ranks, even_cuts(options.ranks, units), rows, mixed[2])
        matrices = [Matrix(prefix + name, size) for name, size in config.projections]
        names = ("o_norm", "o_proj") if config.apart else ("norm", "out_proj")
        self.inputs = Linear(options, matrices, width, share=self.share)
        self.conv = CausalConv(
            options, f"{prefix}conv1d", units * sum(mixed), config.taps, activation="silu",
            spans=None if self.share is None else self.share.rows(mixed),
        )  # fmt: skip
        self.norm = Norm(options, NormConfig(epsilon=config.epsilon), prefix + names[0], config.value_dim)
        self.out = Linear(options, [Matrix(prefix + names[1], width)], units * mixed[2])
        self._heads = local_slice(self.share, config.value_heads)
        if self.share is not None:
            size = self.share.ranks.size
            config = replace(config, key_heads=units // size, value_heads=config.value_heads // size)
        self.config = config
        """The configuration with this rank's heads."""
        self.rate = options.zeros(config.value_heads, dtype=torch.float32)
        """exp(A_log)."""
        self.dt_bias = options.zeros(config.value_heads, dtype=torch.float32)
        self._prefix = prefix
        self.spec = states.StateSpec(
            (config.value_heads, config.key_dim, config.value_dim), self.conv.window,
            tuple(config.key_heads * channels for channels in mixed), units, self.share is not None,
        )  # fmt: skip
        heads = (config.key_heads, config.value_heads, config.key_dim, config.value_dim)
        self.rule = delta_rule(self.conv.on_device, heads, self.rate, self.dt_bias, config.most_rate)
        if options.compiled:
            from asyncengine.kernels.api import GatedDeltaKernel

            columns = [number for names in config.columns.values() for number in names]
            sizes = [config.key_heads, config.value_heads // config.key_heads, config.key_dim, config.value_dim]
            vectors = (self.conv.weight, self.rate, self.dt_bias, self.norm.weight)
            self.kernel = GatedDeltaKernel(
                columns, [*sizes, config.taps, config.key_heads * sum(rows)], *vectors, config.epsilon,
                most_rate=config.most_rate,
            )  # fmt: skip

    def mix(self, projected: torch.Tensor, step: states.StateStep) -> torch.Tensor:
        if self.kernel is not None:
            return states.by_kernel(self.kernel, projected, step, self.index)
        if self.config.interleaved:
            q, k, v, z, b, a = self._by_head(projected)
            inputs = torch.cat((q, k, v), dim=1)
        else:
            heads = self.config.value_heads
            sizes = [self.conv.channels, heads * self.config.value_dim]
            inputs, z, b, a = torch.split(projected[:, : sum(sizes) + 2 * heads], [*sizes, heads, heads], dim=1)
        read = states.recur(step, self.index, self.conv.advance, inputs, (b, a), self._token, self.rule)
        if self.conv.on_device is not None:
            epsilon, weight = self.config.epsilon, self.norm.weight
            made: torch.Tensor = self.conv.on_device.gated_norm(read.flatten(1), z, weight, epsilon, len(weight))
            return made
        return self._gated_norm(read, torch.unflatten(z, 1, (-1, self.config.value_dim))).flatten(1)

    def _by_head(self, projected: torch.Tensor) -> list[torch.Tensor]:
        """Queries, keys, values, z, b and a of all heads, of a projection that goes key head by key head."""
        heads, (first, second), mixed = self.config.key_heads, self.config.rows, self.config.mixed
        blocks = torch.split(projected[:, : heads * (first + second)], [heads * first, heads * second], dim=1)
        split = zip(blocks, ([*mixed, mixed[2]], [second // 2, second // 2]), strict=True)
        by_block = [torch.split(torch.unflatten(block, 1, (heads, -1)), widths, dim=2) for block, widths in split]
        return [projection.flatten(1) for block in by_block for projection in block]

    def _token(
        self, qkv: torch.Tensor, b: torch.Tensor, a: torch.Tensor, state: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(outputs [sequences, value heads, value dim], states after) of one token of each sequence, float32."""
        config = self.config
        keys = config.key_heads * config.key_dim
        query, key, value = torch.split(qkv.float(), [keys, keys, qkv.shape[1] - 2 * keys], dim=1)
        query, key = (unit(torch.unflatten(vectors, 1, (config.key_heads, config.key_dim))) for vectors in (query, key))
        group = config.value_heads // config.key_heads
        query, key = (vectors.repeat_interleave(group, 1) for vectors in (query * config.key_dim**-0.5, key))
        decay = torch.exp(-self.rate * functional.softplus(a.float() + self.dt_bias))
        value = torch.unflatten(value, 1, (-1, config.value_dim))
        return learn(state * decay[:, :, None, None], query, key, value, config.most_rate * b.float().sigmoid())

    def _gated_norm(self, read: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        wide = functional.rms_norm(read, (read.shape[-1],), None, self.config.epsilon)
        return (wide * self.norm.weight.float() * states.each_token(functional.silu, z.float())).to(z.dtype)

    def norms(self) -> list[Norm]:
        return [self.norm]

    def slots(self) -> Iterator[tuple[str, TensorSlot]]:
        """Tensors of the checkpoint that it takes, by name."""

        def load(tensor: Any) -> None:
            self.rate.copy_(tensor.float().exp()[self._heads])

        for layer in (self.inputs, self.norm, self.out):
            yield from layer.slots()
        yield from self._conv_slots() if self.config.apart else self.conv.slots()
        count = self.out.inputs // self.config.value_dim
        yield f"{self._prefix}A_log", TensorSlot((count,), load, 0.0)
        yield f"{self._prefix}dt_bias", TensorSlot.some(self.dt_bias, count, [(self._heads, slice(None))], 1.0)

    def _conv_slots(self) -> Iterator[tuple[str, TensorSlot]]:
        """Slots of three tensors, with the channels of queries, keys and values, or, as transformers saves them, with
        thirds of all channels."""
        sizes = [matrix.outputs for matrix in self.inputs.matrices[:3]]
        third = -(-sum(sizes) // 3)
        for index, name in enumerate("qkv"):
            separate = self.conv.weight_slot(sum(sizes[:index]), sizes[index])
            other = self.conv.weight_slot(index * third, min(third, sum(sizes) - index * third))

            def load(tensor: Any, separate: TensorSlot = separate, other: TensorSlot = other) -> None:
                (separate if tuple(tensor.shape) == separate.shape else other).load(tensor)

            yield f"{self._prefix}{name}_conv1d.weight", replace(separate, load=load, other_shape=other.shape)


def delta_rule(
    kernels: Any, heads: tuple[int, int, int, int], rate: torch.Tensor, bias: torch.Tensor, most_rate: int = 1
) -> Any:
    """The rule's Triton kernels for `heads` (key heads, value heads, key dim, value dim); None: there are none here."""
    if kernels is None:
        return None
    keys, count, key_dim, value_dim = heads
    firsts = (0, keys * key_dim, 2 * keys * key_dim)
    return kernels.Recurrence(count, count // keys, key_dim, value_dim, firsts, rate, bias, most_rate=most_rate)


def learn(
    state: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rate: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The delta rule for a token, after the gate: (output [..., heads, value dim], state after).

    `state` [..., heads, key dim, value dim] moves its value for `key` [..., heads, key dim] towards `value`
    [..., heads, value dim] by the learning rate `rate` [..., heads], and is read at `query` [..., heads, key dim].
    """
    known = (state * key[..., None]).sum(-2)
    delta = (value - known) * rate[..., None]
    state = state + key[..., None] * delta[..., None, :]
    return (state * query[..., None]).sum(-2), state


def unit(x: torch.Tensor) -> torch.Tensor:
    """Vectors [..., dim] of length one."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + _TINY)
