"""The delta rule behind a gate, token after token, with each head's state in registers.

What `layers.gated_delta` says in torch's operations, without their launches: a program has some of the columns of one
head's state, which do not meet, and moves them over the tokens of one sequence (the idea of flash-linear-attention's
fused recurrent kernels, Yang and Zhang 2024). States are read and written where they lie, by slot, so that a CUDA graph
can hold a step whose states lie elsewhere at each replay.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

_COLUMNS = 16
"""Of a state, in one program."""


@dataclass(frozen=True, slots=True, eq=False)
class DeltaRule:
    """Sizes and gates of a layer's heads. Queries, keys and values of a token stand in this order in one row."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    rate: torch.Tensor
    """float32 [value heads]: exp(A_log)."""
    bias: torch.Tensor
    """float32, of the forget gates: [value heads], or [value heads * key dim] where each dimension has its own."""
    tiny: float
    """What is added to the square of a key's length before it is divided by that."""

    def move(
        self, qkv: torch.Tensor, learn: torch.Tensor, forget: torch.Tensor, states: torch.Tensor,
        slots: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """(what is read, float32 [tokens, value heads, value dim]; the states after).

        `qkv` [tokens, all], `learn` [tokens, value heads] and `forget` [tokens, as `bias`], whose rows may lie apart.
        `states` float32 [sequences, value heads, key dim, value dim]: each sequence has equally many tokens, and one's
        stand behind the other's. With `slots`, (sources, targets) int64 [sequences], they lie there in a pool.
        """
        tokens = len(qkv)
        out = torch.empty((tokens, self.value_heads, self.value_dim), dtype=torch.float32, device=qkv.device)
        sequences, moved = (len(states), torch.empty_like(states)) if slots is None else (len(slots[0]), states)
        sources, targets = (states, states) if slots is None else slots
        blocks = triton.cdiv(self.value_dim, _COLUMNS)
        _move[(self.value_heads * blocks, sequences)](
            qkv, learn, forget, self.rate, self.bias, states, moved, sources, targets, out, qkv.stride(0),
            learn.stride(0), forget.stride(0), tokens // sequences, self.key_dim**-0.5, self.tiny, self.value_heads,
            self.value_heads // self.key_heads, self.key_dim, self.value_dim, triton.next_power_of_2(self.key_dim),
            _COLUMNS, slots is not None, len(self.bias) > self.value_heads, num_warps=1,
        )  # fmt: skip
        return out, moved


@triton.jit(do_not_specialize=["count"])
def _move(
    qkv, learn, forget, rates, biases, states, moved, sources, targets, out, qkv_stride, learn_stride, forget_stride,
    count, scale, tiny, heads: tl.constexpr, group: tl.constexpr, key_dim: tl.constexpr, value_dim: tl.constexpr,
    rows: tl.constexpr, columns: tl.constexpr, by_slot: tl.constexpr, by_channel: tl.constexpr,
):  # fmt: skip
    """One program for some columns of one head's state and one sequence."""
    head = tl.program_id(0) % heads
    sequence = tl.program_id(1).to(tl.int64)
    row = tl.arange(0, rows)
    column = tl.program_id(0) // heads * columns + tl.arange(0, columns)
    real, inside = row < key_dim, column < value_dim
    both = real[:, None] & inside[None, :]
    source, target = sequence, sequence
    if by_slot:
        source, target = tl.load(sources + sequence), tl.load(targets + sequence)
    place = row[:, None] * value_dim + column[None, :]
    size = heads * key_dim * value_dim
    state = tl.load(states + source * size + head * key_dim * value_dim + place, mask=both, other=0.0)
    rate = tl.load(rates + head)
    bias = tl.load(biases + head * key_dim + row, mask=real, other=0.0) if by_channel else tl.load(biases + head)
    keys = heads // group * key_dim
    for step in range(count):
        token = sequence * count + step
        own = qkv + token * qkv_stride + head // group * key_dim + row
        query = tl.load(own, mask=real, other=0.0).to(tl.float32)
        key = tl.load(own + keys, mask=real, other=0.0).to(tl.float32)
        value = tl.load(qkv + token * qkv_stride + 2 * keys + head * value_dim + column, mask=inside, other=0.0)
        query = query * (scale / tl.sqrt(tl.sum(query * query, 0) + tiny))
        key = key / tl.sqrt(tl.sum(key * key, 0) + tiny)
        if by_channel:
            raw = tl.load(forget + token * forget_stride + head * key_dim + row, mask=real, other=0.0).to(tl.float32)
        else:
            raw = tl.load(forget + token * forget_stride + head).to(tl.float32)
        raw += bias
        soft = tl.where(raw > 20.0, raw, tl.log(1.0 + tl.exp(tl.minimum(raw, 20.0))))
        kept = tl.exp(-rate * soft)
        state = state * kept[:, None] if by_channel else state * kept
        speed = 1.0 / (1.0 + tl.exp(-tl.load(learn + token * learn_stride + head).to(tl.float32)))
        change = (value.to(tl.float32) - tl.sum(state * key[:, None], 0)) * speed
        state += key[:, None] * change[None, :]
        read = tl.sum(state * query[:, None], 0)
        tl.store(out + (token * heads + head) * value_dim + column, read, mask=inside)
    tl.store(moved + target * size + head * key_dim * value_dim + place, state, mask=both)
