"""Recurrent states moved over tokens, with a part of each head's state in registers.

The gated delta rule, by head or by channel, and Mamba-2: the arithmetic of `layers.gated_delta` and `layers.mamba2`
without a launch for each operation. A program has some columns of one head's state, which no other column needs. Two
ways over the tokens of a sequence, both of flash-linear-attention (Yang and Zhang 2024):

One after another, a token waiting for the state that the one before it leaves. States are read and written where they
lie, by slot, so that a CUDA graph can hold steps whose states lie elsewhere at each replay.

In chunks, for prompts: what the tokens of a chunk do to each other is matrix products that need no state, so all chunks
are prepared at once, and a state then goes through four products a chunk. With b the sum of log decays from the chunk's
begin on and A[i, j] = rate[i] (k[i] . k[j]) exp(b[i] - b[j]) for j < i, the changes that the tokens make are

    (I + A)^-1 (rate v) - (I + A)^-1 (rate exp(b) k) S

where S is the state before the chunk (the WY form of Yang et al. 2024, "Parallelizing Linear Transformers with the
Delta Rule over Sequence Length"); Mamba-2 has no A (Dao and Gu 2024). Sums are float32, in another order. Gates by
channel keep to the first way, since exp(b[i] - b[j]) is another number for each channel there.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

_COLUMNS = 16
"""Columns of a state in one program."""
_CHUNK = 32
"""Tokens of a chunk; a sequence with fewer goes token by token."""
_PREPARED_BYTES = 64 << 20
"""Bytes of prepared chunks at a time."""
_TINY = 1e-6
"""Addend to the square of a key's length before it is divided by that, as in `layers.gated_delta`."""


@dataclass(frozen=True, slots=True, eq=False)
class Recurrence:
    """Sizes and gates of a layer's heads: S = decay S + key change^T, read S^T query, for each token.

    decay = exp(-rate softplus(gate + bias)). The delta rule's change is a learned fraction of the value minus what S
    yields for the key, and its keys and queries have length one; Mamba-2's change is the softplus times the value.
    """

    heads: int
    group: int
    """Heads with the same keys and queries."""
    key_dim: int
    value_dim: int
    firsts: tuple[int, int, int]
    """First columns of a token's queries, keys and values in its row."""
    rate: torch.Tensor
    """float32 [heads]; only its magnitude counts."""
    bias: torch.Tensor
    """float32 [heads], or [heads * key dim]: each dimension of a key forgets by itself."""
    limits: tuple[float, float] = (0.0, float("inf"))
    """Limits of the softplus."""
    skip: torch.Tensor | None = None
    """float32 [heads], of Mamba-2: the value times this is added to the output. None for the delta rule."""
    most_rate: int = 1
    """The largest rate of learning."""

    @property
    def _delta(self) -> int:
        """`most_rate` of the delta rule; 0 for Mamba-2."""
        return self.most_rate if self.skip is None else 0

    @property
    def _skip(self) -> torch.Tensor:
        """`skip`, or any vector of that length for the delta rule, whose kernels do not use it."""
        return self.rate if self.skip is None else self.skip

    def move(
        self, rows: torch.Tensor, learn: torch.Tensor, gates: torch.Tensor, states: torch.Tensor,
        slots: tuple[torch.Tensor, torch.Tensor] | None, out: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """(outputs float32 [tokens, heads, value dim], in `out` if that is given; the states after the tokens).

        `rows` [tokens, all], `learn` [tokens, heads] of the delta rule and `gates` [tokens, as `bias`] may be part of
        longer rows. `states` float32 [sequences, heads, key dim, value dim]: all have the same number of
        tokens, one behind the other. With `slots`, (sources, targets) int64 [sequences], they lie there in a pool.
        """
        tokens = len(rows)
        if out is None:
            out = torch.empty((tokens, self.heads, self.value_dim), dtype=torch.float32, device=rows.device)
        if slots is None and len(states) == 1 and tokens >= _CHUNK and len(self.bias) == self.heads:
            return out, self._move_chunks(rows, learn, gates, states, out)
        sequences, moved = (len(states), torch.empty_like(states)) if slots is None else (len(slots[0]), states)
        sources, targets = (states, states) if slots is None else slots
        _move[(self.heads * triton.cdiv(self.value_dim, _COLUMNS), sequences)](
            rows, learn, gates, self.rate, self.bias, self._skip, states, moved, sources, targets, out,
            rows.stride(0), learn.stride(0), gates.stride(0), tokens // sequences, self.key_dim**-0.5, _TINY,
            *self.limits, *self.firsts, self.heads, self.group, self.key_dim, self.value_dim,
            triton.next_power_of_2(self.key_dim), _COLUMNS, slots is not None, len(self.bias) > self.heads,
            self._delta, num_warps=1,
        )  # fmt: skip
        return out, moved

    def _move_chunks(
        self, rows: torch.Tensor, learn: torch.Tensor, gates: torch.Tensor, state: torch.Tensor, out: torch.Tensor
    ) -> torch.Tensor:
        """The `state` [1, heads, key dim, value dim] after these span of a sequence; outputs go to `out`."""
        height, columns = max(16, triton.next_power_of_2(self.key_dim)), _COLUMNS
        blocks = triton.cdiv(self.value_dim, columns)
        width = 3 * height + _CHUNK + blocks * columns
        count = triton.cdiv(len(rows), _CHUNK)
        chunks_at_once = max(1, min(count, _PREPARED_BYTES // (4 * _CHUNK * self.heads * width)))
        prepared = rows.new_empty((chunks_at_once, self.heads, _CHUNK, width), dtype=torch.float32)
        decays = rows.new_empty((chunks_at_once, self.heads), dtype=torch.float32)
        sizes = (self.heads, self.group, self.key_dim, self.value_dim, height, columns, _CHUNK, width)
        for first in range(0, len(rows), chunks_at_once * _CHUNK):
            span = slice(first, first + chunks_at_once * _CHUNK)
            own = rows[span]
            moved = torch.empty_like(state)
            _prepare[(triton.cdiv(len(own), _CHUNK), self.heads)](
                own, learn[span], gates[span], self.rate, self.bias, prepared, decays, own.stride(0), learn.stride(0),
                gates.stride(0), len(own), self.key_dim**-0.5, _TINY, *self.limits, *self.firsts, *sizes, blocks,
                self._delta, num_warps=8,
            )  # fmt: skip
            _sweep[(self.heads, blocks)](
                own, prepared, decays, self._skip, state, moved, out[span], own.stride(0), len(own), self.firsts[2],
                *sizes, self._delta, num_warps=4, num_stages=2,
            )  # fmt: skip
            state = moved
        return state


@triton.jit
def _decay(gate, bias, rate, least, most):
    """(the bounded softplus of gates, the logarithm of the state's decay)."""
    gate += bias
    soft = tl.where(gate > 20.0, gate, tl.log(1.0 + tl.exp(tl.minimum(gate, 20.0))))
    soft = tl.minimum(tl.maximum(soft, least), most)
    return soft, -rate * soft


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
    dim = tl.arange(0, height)
    column = tl.program_id(0) // heads * columns + tl.arange(0, columns)
    key_mask, value_mask = dim < key_dim, column < value_dim
    mask = key_mask[:, None] & value_mask[None, :]
    source, target = sequence, sequence
    if by_slot:
        source, target = tl.load(sources + sequence), tl.load(targets + sequence)
    size = heads * key_dim * value_dim
    offsets = head * key_dim * value_dim + dim[:, None] * value_dim + column[None, :]
    state = tl.load(states + source * size + offsets, mask=mask, other=0.0)
    rate, skip = tl.abs(tl.load(rates + head)), tl.load(skips + head)
    bias = tl.load(biases + head * key_dim + dim, mask=key_mask, other=0.0) if by_channel else tl.load(biases + head)
    for step in range(count):
        token = sequence * count + step
        row_keys = rows + token * row_stride + head // group * key_dim + dim
        query = tl.load(row_keys + query_at, mask=key_mask, other=0.0).to(tl.float32)
        key = tl.load(row_keys + key_at, mask=key_mask, other=0.0).to(tl.float32)
        value = rows + token * row_stride + value_at + head * value_dim + column
        value = tl.load(value, mask=value_mask, other=0.0).to(tl.float32)
        if by_channel:
            gate = gates + token * gate_stride + head * key_dim + dim
            gate = tl.load(gate, mask=key_mask, other=0.0).to(tl.float32)
        else:
            gate = tl.load(gates + token * gate_stride + head).to(tl.float32)
        soft, kept = _decay(gate, bias, rate, least, most)
        kept = tl.exp(kept)
        state = state * kept[:, None] if by_channel else state * kept
        if delta:
            query = query * (scale / tl.sqrt(tl.sum(query * query, 0) + tiny))
            key = key / tl.sqrt(tl.sum(key * key, 0) + tiny)
            beta = delta / (1.0 + tl.exp(-tl.load(learn + token * learn_stride + head).to(tl.float32)))
            change = (value - tl.sum(state * key[:, None], 0)) * beta
        else:
            change = value * soft
        state += key[:, None] * change[None, :]
        read = tl.sum(state * query[:, None], 0)
        if not delta:
            read += skip * value
        tl.store(out + (token * heads + head) * value_dim + column, read, mask=value_mask)
    tl.store(moved + target * size + offsets, state, mask=mask)


@triton.jit(do_not_specialize=["count"])
def _prepare(
    rows, learn, gates, rates, biases, prepared, decays, row_stride, learn_stride, gate_stride, count, scale, tiny,
    least, most, query_at: tl.constexpr, key_at: tl.constexpr, value_at: tl.constexpr, heads: tl.constexpr,
    group: tl.constexpr, key_dim: tl.constexpr, value_dim: tl.constexpr, height: tl.constexpr, columns: tl.constexpr,
    chunk: tl.constexpr, width: tl.constexpr, blocks: tl.constexpr, delta: tl.constexpr,
):  # fmt: skip
    """One program for one chunk and head. For each of its tokens, side by side: the key whose product with the state is
    subtracted from its change [height], its query on the state [height], its key at the chunk's end [height], its
    attention to each token's change [chunk], and its change from a state of zeros [blocks * columns]."""
    head = tl.program_id(1)
    token, dim = tl.program_id(0) * chunk + tl.arange(0, chunk), tl.arange(0, height)
    lane, valid = tl.arange(0, chunk), token < count
    wide, mask = token.to(tl.int64), valid[:, None] & (dim < key_dim)[None, :]
    row_keys = rows + wide[:, None] * row_stride + head // group * key_dim + dim[None, :]
    query = tl.load(row_keys + query_at, mask=mask, other=0.0).to(tl.float32)
    key = tl.load(row_keys + key_at, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(gates + wide * gate_stride + head, mask=valid, other=0.0).to(tl.float32)
    soft, kept = _decay(gate, tl.load(biases + head), tl.abs(tl.load(rates + head)), least, most)
    # Of sums in the thousands, as strong gates make them, differences of float32 would have four right digits.
    total = tl.cumsum(tl.where(valid, kept, 0.0).to(tl.float64), 0)
    causal = lane[:, None] >= lane[None, :]
    between = tl.exp(tl.where(causal, total[:, None] - total[None, :], 0.0).to(tl.float32))
    decay_from_start, end = tl.exp(total.to(tl.float32)), tl.sum(tl.where(lane == chunk - 1, total, 0.0), 0)
    beta = soft
    if delta:
        query = query * (scale / tl.sqrt(tl.sum(query * query, 1) + tiny))[:, None]
        key = key / tl.sqrt(tl.sum(key * key, 1) + tiny)[:, None]
        beta = tl.load(learn + wide * learn_stride + head, mask=valid, other=0.0).to(tl.float32)
        beta = delta / (1.0 + tl.exp(-beta))
    out_row = prepared + ((tl.program_id(0).to(tl.int64) * heads + head) * chunk + lane[:, None]) * width
    tl.store(out_row + height + dim[None, :], query * decay_from_start[:, None])
    tl.store(out_row + 2 * height + dim[None, :], key * tl.exp((end - total).to(tl.float32))[:, None])
    # Three products of TF32 have float32's digits and use tensor cores; "ieee" spills tens of kilobytes of registers.
    scores = tl.dot(query, tl.trans(key), input_precision="tf32x3")
    tl.store(out_row + 3 * height + lane[None, :], tl.where(causal, scores * between, 0.0))
    tl.store(decays + tl.program_id(0) * heads + head, tl.exp(end.to(tl.float32)))
    if delta:
        solved = tl.dot(key, tl.trans(key), input_precision="tf32x3") * between * -beta[:, None]
        solved = tl.where(lane[:, None] > lane[None, :], solved, 0.0)
        for step in range(1, chunk):  # rows in front of this one are those of (I + A)^-1 - I
            row = tl.sum(tl.where(lane[:, None] == step, solved, 0.0), 0)
            row += tl.sum(row[:, None] * solved, 0)
            solved = tl.where(lane[:, None] == step, row[None, :], solved)
        solved = tl.where(lane[:, None] == lane[None, :], 1.0, solved)
        unknown = key * (beta * decay_from_start)[:, None]
        tl.store(out_row + dim[None, :], tl.dot(solved, unknown, input_precision="tf32x3"))
    for block in range(blocks):
        column = block * columns + tl.arange(0, columns)
        value = rows + wide[:, None] * row_stride + value_at + head * value_dim + column[None, :]
        value = tl.load(value, mask=valid[:, None] & (column < value_dim)[None, :], other=0.0).to(tl.float32)
        value *= beta[:, None]
        if delta:
            value = tl.dot(solved, value, input_precision="tf32x3")
        tl.store(out_row + 3 * height + chunk + column[None, :], value)


@triton.jit(do_not_specialize=["count"])
def _sweep(
    rows, prepared, decays, skips, states, moved, out, row_stride, count, value_at: tl.constexpr, heads: tl.constexpr,
    group: tl.constexpr, key_dim: tl.constexpr, value_dim: tl.constexpr, height: tl.constexpr, columns: tl.constexpr,
    chunk: tl.constexpr, width: tl.constexpr, delta: tl.constexpr,
):  # fmt: skip
    """One program for some columns of one head's state, over prepared chunks one after another."""
    head, dim, lane = tl.program_id(0), tl.arange(0, height), tl.arange(0, chunk)
    column = tl.program_id(1) * columns + tl.arange(0, columns)
    inside = column < value_dim
    offsets = (head * key_dim + dim[:, None]) * value_dim + column[None, :]
    mask = (dim < key_dim)[:, None] & inside[None, :]
    state = tl.load(states + offsets, mask=mask, other=0.0)
    skip = tl.load(skips + head)
    for step in range(tl.cdiv(count, chunk)):
        first = prepared + (step * heads + head).to(tl.int64) * chunk * width
        chunk_rows = first + lane[:, None] * width
        change = tl.load(chunk_rows + 3 * height + chunk + column[None, :])
        if delta:
            change -= tl.dot(tl.load(chunk_rows + dim[None, :]), state, input_precision="tf32x3")
        read = tl.dot(tl.load(chunk_rows + height + dim[None, :]), state, input_precision="tf32x3")
        read = tl.dot(tl.load(chunk_rows + 3 * height + lane[None, :]), change, read, input_precision="tf32x3")
        token = step * chunk + lane
        valid = (token < count)[:, None] & inside[None, :]
        if not delta:
            value = rows + token.to(tl.int64)[:, None] * row_stride + value_at + head * value_dim + column[None, :]
            read += skip * tl.load(value, mask=valid, other=0.0).to(tl.float32)
        tl.store(out + (token.to(tl.int64)[:, None] * heads + head) * value_dim + column[None, :], read, mask=valid)
        key = tl.load(first + 2 * height + dim[:, None] + lane[None, :] * width)
        state = tl.dot(key, change, state * tl.load(decays + step * heads + head), input_precision="tf32x3")
    tl.store(moved + offsets, state, mask=mask)


# The short causal convolution of `layers.causal_conv` in one kernel, the inputs that it remembers included.

_CHANNELS, _TOKENS = 256, 16
"""Channels and tokens of one program."""


def convolve(
    x: torch.Tensor, windows: torch.Tensor, slots: tuple[torch.Tensor, torch.Tensor] | None, weight: torch.Tensor,
    bias: torch.Tensor | None, silu: bool,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """(results [tokens, channels], windows after them) of the next inputs x alike of some sequences.

    Rows of x may be part of longer ones; all sequences have the same number, one behind the other. `weight`
    float32 [taps, channels]. `windows` [sequences, taps - 1, channels]; with `slots`, (sources, targets) int64
    [sequences], of one token each, they lie there in a pool.
    """
    (tokens, channels), taps = x.shape, len(weight)
    out = torch.empty((tokens, channels), dtype=x.dtype, device=x.device)
    sequences, moved = (len(windows), torch.empty_like(windows)) if slots is None else (len(slots[0]), windows)
    sources, targets = (windows, windows) if slots is None else slots
    count = tokens // sequences
    tile = min(_TOKENS, triton.next_power_of_2(count))
    _convolve[(triton.cdiv(channels, _CHANNELS), triton.cdiv(count, tile), sequences)](
        x, windows, moved, sources, targets, weight, bias, out, x.stride(0), count, channels, taps, _CHANNELS, tile,
        slots is not None, silu, num_warps=4,
    )  # fmt: skip
    return out, moved


@triton.jit(do_not_specialize=["count"])
def _convolve(
    x, windows, moved, sources, targets, weight, bias, out, x_stride, count, channels, taps: tl.constexpr,
    width: tl.constexpr, tile: tl.constexpr, by_slot: tl.constexpr, silu: tl.constexpr,
):  # fmt: skip
    """One program for some channels of some tokens of a sequence; that of its last tokens writes the window."""
    sequence = tl.program_id(2).to(tl.int64)
    channel = tl.program_id(0) * width + tl.arange(0, width)
    inside = channel < channels
    source, target = sequence, sequence
    if by_slot:
        source, target = tl.load(sources + sequence), tl.load(targets + sequence)
    before: tl.constexpr = taps - 1
    x_rows, window = x + sequence * count * x_stride + channel, windows + source * before * channels + channel
    token = tl.program_id(1) * tile + tl.arange(0, tile)
    total = tl.zeros([tile, width], tl.float32)
    if bias is not None:
        total += tl.load(bias + channel, mask=inside, other=0.0)[None, :]
    for tap in tl.static_range(taps):
        index = token - before + tap
        given = (index >= 0) & (index < count)
        value = x_rows + index.to(tl.int64)[:, None] * x_stride
        value = tl.load(value, mask=given[:, None] & inside[None, :], other=0.0)
        earlier = window + (index + before)[:, None] * channels
        earlier = tl.load(earlier, mask=(index < 0)[:, None] & inside[None, :], other=0.0)
        factor = tl.load(weight + tap * channels + channel, mask=inside, other=0.0)[None, :]
        total += (value.to(tl.float32) + earlier.to(tl.float32)) * factor
    if silu:
        total = total / (1.0 + tl.exp(-total))
    out_rows = out + (sequence * count + token)[:, None] * channels + channel[None, :]
    tl.store(out_rows, total.to(out.dtype.element_ty), mask=(token < count)[:, None] & inside[None, :])
    if tl.program_id(1) == tl.num_programs(1) - 1:
        # A window may overwrite its own source: ascending steps read only entries that are not overwritten yet.
        for step in tl.static_range(before):
            last = tl.full([width], 0, tl.int32) + (count - before + step)
            kept = tl.load(x_rows + last.to(tl.int64) * x_stride, mask=inside & (last >= 0), other=0.0)
            kept += tl.load(window + (last + before) * channels, mask=inside & (last < 0), other=0.0)
            tl.store(moved + (target * before + step) * channels + channel, kept, mask=inside)
