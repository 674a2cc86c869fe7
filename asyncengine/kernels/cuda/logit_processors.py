"""Penalties and grammars' masks on a GPU: one kernel for all rows that have any."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Triton compiles no parameter that is annotated with anything but constexpr

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 2048


def penalize_and_mask(logits: torch.Tensor, sources: torch.Tensor, masks: torch.Tensor) -> None:
    """Change float32 logits [rows, vocab] in place.

    sources int64 [rows, 6]: the addresses of what the prompt has, bool [vocab], and of how often the output has it,
    int32 [vocab], both 0 for a row without penalties; float64 bits of its penalties for repetition, frequency and
    presence; which of `masks`, int32 [masks, words], lowest bit first, is the row's, or -1.
    """
    rows, vocab = logits.shape
    grid = (triton.cdiv(vocab, _BLOCK), rows)
    _penalize_and_mask[grid](logits, sources, masks, masks.shape[1], vocab, block=_BLOCK)


@triton.jit(do_not_specialize_on_alignment=["sources", "masks"])
def _penalize_and_mask(logits, sources, masks, words, vocab, block: tl.constexpr):
    ids = tl.program_id(0) * block + tl.arange(0, block)
    inside, row = ids < vocab, tl.program_id(1)
    place, own = logits + row.to(tl.int64) * vocab + ids, sources + row * 6
    x = tl.load(place, mask=inside, other=0.0)
    counts, mask = tl.load(own + 1), tl.load(own + 5)
    if counts != 0:
        prompt = tl.load(own).to(tl.pointer_type(tl.int8))
        said = tl.load(counts.to(tl.pointer_type(tl.int32)) + ids, mask=inside, other=0)
        seen = (tl.load(prompt + ids, mask=inside, other=0) != 0) | (said > 0)
        repetition = tl.load(own + 2).to(tl.float64, bitcast=True).to(tl.float32)
        frequency = tl.load(own + 3).to(tl.float64, bitcast=True).to(tl.float32)
        presence = tl.load(own + 4).to(tl.float64, bitcast=True).to(tl.float32)
        x = tl.where(seen, tl.where(x > 0, x / repetition, x * repetition), x)
        x = x - said.to(tl.float32) * frequency - tl.where(said > 0, presence, 0.0)
    if mask >= 0:
        word = tl.load(masks + mask * words + ids // 32, mask=inside, other=0)
        x = tl.where(((word >> (ids % 32)) & 1) != 0, x, float("-inf"))
    tl.store(place, x, mask=inside)
