"""The short causal convolution of `layers.causal_conv` in one kernel, the inputs that it remembers included."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Triton compiles no parameter that is annotated with anything but constexpr

from __future__ import annotations

import torch
import triton
import triton.language as tl

_CHANNELS, _TOKENS = 256, 16
"""Channels and tokens of one program."""


def convolve(
    x: torch.Tensor, windows: torch.Tensor, slots: tuple[torch.Tensor, torch.Tensor] | None, weight: torch.Tensor,
    bias: torch.Tensor | None, silu: bool,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """(results [tokens, channels], windows after them) of the next inputs x alike of some sequences.

    Rows of x may be part of longer ones; each sequence has equally many, and one's stand behind the other's. `weight`
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
    own, window = x + sequence * count * x_stride + channel, windows + source * before * channels + channel
    token = tl.program_id(1) * tile + tl.arange(0, tile)
    total = tl.zeros([tile, width], tl.float32)
    if bias is not None:
        total += tl.load(bias + channel, mask=inside, other=0.0)[None, :]
    for tap in tl.static_range(taps):
        place = token - before + tap
        given = (place >= 0) & (place < count)
        value = tl.load(own + place.to(tl.int64)[:, None] * x_stride, mask=given[:, None] & inside[None, :], other=0.0)
        old = tl.load(
            window + (place + before)[:, None] * channels, mask=(place < 0)[:, None] & inside[None, :], other=0.0
        )
        factor = tl.load(weight + tap * channels + channel, mask=inside, other=0.0)[None, :]
        total += (value.to(tl.float32) + old.to(tl.float32)) * factor
    if silu:
        total = total / (1.0 + tl.exp(-total))
    at = out + (sequence * count + token)[:, None] * channels + channel[None, :]
    tl.store(at, total.to(out.dtype.element_ty), mask=(token < count)[:, None] & inside[None, :])
    if tl.program_id(1) == tl.num_programs(1) - 1:
        # Where a window lies in the place of its source, what is read here is in front of what has been written.
        for step in tl.static_range(before):
            last = tl.full([width], 0, tl.int32) + (count - before + step)
            kept = tl.load(own + last.to(tl.int64) * x_stride, mask=inside & (last >= 0), other=0.0)
            kept += tl.load(window + (last + before) * channels, mask=inside & (last < 0), other=0.0)
            tl.store(moved + (target * before + step) * channels + channel, kept, mask=inside)
