"""Penalties and grammars' masks on a GPU: one kernel for all rows that have any."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Triton compiles no parameter that is annotated with anything but constexpr

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 2048


def penalize_and_mask(
    logits: torch.Tensor, penalties: torch.Tensor, sources: torch.Tensor, masks: torch.Tensor
) -> None:
    """Change float32 logits [rows, vocab] in place.

    penalties float32 [3, rows]: repetition, frequency, presence. sources int64 [3, rows]: the addresses of what the
    prompt has, bool [vocab], and of how often the output has it, int32 [vocab], both 0 for a row without penalties;
    which of `masks`, int32 [masks, words], lowest bit first, is the row's, or -1.
    """
    rows, vocab = logits.shape
    grid = (triton.cdiv(vocab, _BLOCK), rows)
    _penalize_and_mask[grid](logits, penalties, sources, masks, masks.shape[1], vocab, block=_BLOCK)


@triton.jit(do_not_specialize_on_alignment=["penalties", "sources", "masks"])
def _penalize_and_mask(logits, penalties, sources, masks, words, vocab, block: tl.constexpr):
    row, rows = tl.program_id(1), tl.num_programs(1)
    ids = tl.program_id(0) * block + tl.arange(0, block)
    inside = ids < vocab
    place = logits + row.to(tl.int64) * vocab + ids
    x = tl.load(place, mask=inside, other=0.0)
    counts, mask = tl.load(sources + rows + row), tl.load(sources + 2 * rows + row)
    if counts != 0:
        prompt = tl.load(sources + row).to(tl.pointer_type(tl.int8))
        said = tl.load(counts.to(tl.pointer_type(tl.int32)) + ids, mask=inside, other=0)
        seen = (tl.load(prompt + ids, mask=inside, other=0) != 0) | (said > 0)
        repetition = tl.load(penalties + row)
        x = tl.where(seen, tl.where(x > 0, x / repetition, x * repetition), x)
        x -= said.to(tl.float32) * tl.load(penalties + rows + row)
        x -= tl.where(said > 0, tl.load(penalties + 2 * rows + row), 0.0)
    if mask >= 0:
        word = tl.load(masks + mask * words + ids // 32, mask=inside, other=0)
        x = tl.where(((word >> (ids % 32)) & 1) != 0, x, float("-inf"))
    tl.store(place, x, mask=inside)
