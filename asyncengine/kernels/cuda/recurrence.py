"""Recurrent states moved over tokens, one after another, with a part of each head's state in registers.

The gated delta rule, by head or by channel, and Mamba-2 in one kernel: the arithmetic of `layers.gated_delta` and
`layers.mamba2` without a launch for each operation. A program has some columns of one head's state, which no other
column needs, and moves them over the tokens of one sequence (the idea of flash-linear-attention's fused recurrent
kernels, Yang and Zhang 2024). States are read and written where they lie, by slot, so that a CUDA graph can hold steps
whose states lie elsewhere at each replay.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

_COLUMNS = 16
"""Columns of a state in one program."""
_TINY = 1e-6
"""Addend to the square of a key's length before it is divided by that, as in `layers.gated_delta`."""


@dataclass(frozen=True, slots=True, eq=False)
class Recurrence:
    """Sizes and gates of a layer's heads: S = decay S + key change^T, read S^T query, for each token.

    decay = exp(-rate softplus(gate + bias)). The delta rule's change is a learned part of what of the value S does not
    know yet, and its keys and queries have length one; Mamba-2's change is the softplus times the value.
    """

    heads: int
    group: int
    """Heads with the same keys and queries."""
    key_dim: int
    value_dim: int
    firsts: tuple[int, int, int]
    """First places of a token's queries, keys and values in its row."""
    rate: torch.Tensor
    """float32 [heads]; its sign is not looked at."""
    bias: torch.Tensor
    """float32 [heads], or [heads * key dim]: each dimension of a key forgets by itself."""
    limits: tuple[float, float] = (0.0, float("inf"))
    """Limits of the softplus."""
    skip: torch.Tensor | None = None
    """float32 [heads], of Mamba-2: what times the value is added to what is read. None: it is the delta rule."""

    def move(
        self, rows: torch.Tensor, learn: torch.Tensor, gates: torch.Tensor, states: torch.Tensor,
        slots: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """(what is read, float32 [tokens, heads, value dim]; the states after).

        `rows` [tokens, all], `learn` [tokens, heads] of the delta rule and `gates` [tokens, as `bias`] may be part of
        longer rows. `states` float32 [sequences, heads, key dim, value dim]: each sequence has equally many tokens, and
        one's stand behind the other's. With `slots`, (sources, targets) int64 [sequences], they lie there in a pool.
        """
        tokens = len(rows)
        out = torch.empty((tokens, self.heads, self.value_dim), dtype=torch.float32, device=rows.device)
        sequences, moved = (len(states), torch.empty_like(states)) if slots is None else (len(slots[0]), states)
        sources, targets = (states, states) if slots is None else slots
        skip = self.rate if self.skip is None else self.skip
        _move[(self.heads * triton.cdiv(self.value_dim, _COLUMNS), sequences)](
            rows, learn, gates, self.rate, self.bias, skip, states, moved, sources, targets, out,
            rows.stride(0), learn.stride(0), gates.stride(0), tokens // sequences, self.key_dim**-0.5, _TINY,
            *self.limits, *self.firsts, self.heads, self.group, self.key_dim, self.value_dim,
            triton.next_power_of_2(self.key_dim), _COLUMNS, slots is not None, len(self.bias) > self.heads,
            self.skip is None, num_warps=1,
        )  # fmt: skip
        return out, moved


@triton.jit(do_not_specialize=["count"])
def _move(
    rows, learn, gates, rates, biases, skips, states, moved, sources, targets, out, row_stride, learn_stride,
    gate_stride, count, scale, tiny, least, most, query_at: tl.constexpr, key_at: tl.constexpr, value_at: tl.constexpr,
    heads: tl.constexpr, group: tl.constexpr, key_dim: tl.constexpr, value_dim: tl.constexpr, height: tl.constexpr,
    columns: tl.constexpr, by_slot: tl.constexpr, by_channel: tl.constexpr, delta: tl.constexpr,
):  # fmt: skip
    """One program for some columns of one head's state and one sequence."""
    head = tl.program_id(0) % heads
    sequence = tl.program_id(1).to(tl.int64)
    line = tl.arange(0, height)
    column = tl.program_id(0) // heads * columns + tl.arange(0, columns)
    real, inside = line < key_dim, column < value_dim
    both = real[:, None] & inside[None, :]
    source, target = sequence, sequence
    if by_slot:
        source, target = tl.load(sources + sequence), tl.load(targets + sequence)
    size = heads * key_dim * value_dim
    place = head * key_dim * value_dim + line[:, None] * value_dim + column[None, :]
    state = tl.load(states + source * size + place, mask=both, other=0.0)
    rate, skip = tl.abs(tl.load(rates + head)), tl.load(skips + head)
    bias = tl.load(biases + head * key_dim + line, mask=real, other=0.0) if by_channel else tl.load(biases + head)
    for step in range(count):
        token = sequence * count + step
        own = rows + token * row_stride + head // group * key_dim + line
        query = tl.load(own + query_at, mask=real, other=0.0).to(tl.float32)
        key = tl.load(own + key_at, mask=real, other=0.0).to(tl.float32)
        value = rows + token * row_stride + value_at + head * value_dim + column
        value = tl.load(value, mask=inside, other=0.0).to(tl.float32)
        if by_channel:
            gate = tl.load(gates + token * gate_stride + head * key_dim + line, mask=real, other=0.0).to(tl.float32)
        else:
            gate = tl.load(gates + token * gate_stride + head).to(tl.float32)
        gate += bias
        soft = tl.where(gate > 20.0, gate, tl.log(1.0 + tl.exp(tl.minimum(gate, 20.0))))
        soft = tl.minimum(tl.maximum(soft, least), most)
        kept = tl.exp(-rate * soft)
        state = state * kept[:, None] if by_channel else state * kept
        if delta:
            query = query * (scale / tl.sqrt(tl.sum(query * query, 0) + tiny))
            key = key / tl.sqrt(tl.sum(key * key, 0) + tiny)
            speed = 1.0 / (1.0 + tl.exp(-tl.load(learn + token * learn_stride + head).to(tl.float32)))
            change = (value - tl.sum(state * key[:, None], 0)) * speed
        else:
            change = value * soft
        state += key[:, None] * change[None, :]
        read = tl.sum(state * query[:, None], 0)
        if not delta:
            read += skip * value
        tl.store(out + (token * heads + head) * value_dim + column, read, mask=inside)
    tl.store(moved + target * size + place, state, mask=both)
