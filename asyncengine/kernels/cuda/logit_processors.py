"""Penalties, bias, grammars' masks and ids that are held open on a GPU: two kernels for all rows that have any."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Triton compiles no parameter that is annotated with anything but constexpr

from __future__ import annotations

import torch
import triton
import triton.language as tl

from asyncengine.kernels.cuda import row_numbers

_BLOCK, _FEW = 2048, 64


def process_logits(
    logits: torch.Tensor, processed: torch.Tensor, numbers: torch.Tensor, masks: torch.Tensor, words: int,
    inputs: torch.Tensor,
) -> None:  # fmt: skip
    """Write float32 [rows, vocab]: the logits of each row, after all that `numbers` int64 [NUMBERS, rows] say.

    masks: int32 [masks, words], lowest bit first. inputs: int64, the token that each row of logits follows.
    """
    rows, vocab = processed.shape
    grid = (triton.cdiv(vocab, _BLOCK), rows)
    _penalize_and_mask[grid](
        logits, logits.stride(0), processed, numbers, masks, inputs, rows, words, vocab, block=_BLOCK
    )
    _bias_and_hold_open[(rows,)](processed, numbers, rows, vocab, block=4 * _BLOCK, block_few=_FEW, num_warps=16)


_ROW, _PROMPT, _COUNTS, _COUNT, _MASK, _REPETITION, _FREQUENCY, _PRESENCE, _BIASED, _BIASES, _NUM_BIASES, _STOPS, \
    _NUM_STOPS = (tl.constexpr(which) for which in (
        row_numbers.ROW, row_numbers.PROMPT, row_numbers.COUNTS, row_numbers.COUNT, row_numbers.MASK,
        row_numbers.REPETITION, row_numbers.FREQUENCY, row_numbers.PRESENCE, row_numbers.BIASED, row_numbers.BIASES,
        row_numbers.NUM_BIASES, row_numbers.STOPS, row_numbers.NUM_STOPS,
    ))  # fmt: skip


@triton.jit
def _number(numbers, field: tl.constexpr, rows, row):
    return tl.load(numbers + field * rows + row)


@triton.jit
def _penalty(numbers, field: tl.constexpr, rows, row):
    return _number(numbers, field, rows, row).to(tl.float64, bitcast=True).to(tl.float32)


_ROWS = ["numbers", "masks", "inputs", "rows"]
"""Arguments that are no reason to compile a kernel again."""


@triton.jit(do_not_specialize=_ROWS, do_not_specialize_on_alignment=_ROWS)
def _penalize_and_mask(logits, stride, processed, numbers, masks, inputs, rows, words, vocab, block: tl.constexpr):
    ids = tl.program_id(0) * block + tl.arange(0, block)
    inside, row = ids < vocab, tl.program_id(1)
    step_row = _number(numbers, _ROW, rows, row)
    x = tl.load(logits + step_row * stride + ids, mask=inside, other=0.0).to(tl.float32)
    counts, mask = _number(numbers, _COUNTS, rows, row), _number(numbers, _MASK, rows, row)
    if counts != 0:
        prompt = _number(numbers, _PROMPT, rows, row).to(tl.pointer_type(tl.int8))
        output = counts.to(tl.pointer_type(tl.int32)) + ids
        occurrences = tl.load(output, mask=inside, other=0)
        if _number(numbers, _COUNT, rows, row) != 0:  # in the one program whose block has it
            token = tl.load(inputs + step_row)
            occurrences += (ids == token).to(tl.int32)
            tl.store(output, occurrences, mask=inside & (ids == token))
        seen = (tl.load(prompt + ids, mask=inside, other=0) != 0) | (occurrences > 0)
        repetition = _penalty(numbers, _REPETITION, rows, row)
        x = tl.where(seen, tl.where(x > 0, x / repetition, x * repetition), x)
        x = x - occurrences.to(tl.float32) * _penalty(numbers, _FREQUENCY, rows, row)
        x = x - tl.where(occurrences > 0, _penalty(numbers, _PRESENCE, rows, row), 0.0)
    if mask >= 0:
        word = tl.load(masks + mask * words + ids // 32, mask=inside, other=0)
        x = tl.where(((word >> (ids % 32)) & 1) != 0, x, float("-inf"))
    tl.store(processed + row.to(tl.int64) * vocab + ids, x, mask=inside)


@triton.jit(do_not_specialize=_ROWS, do_not_specialize_on_alignment=_ROWS)
def _bias_and_hold_open(processed, numbers, rows, vocab, block: tl.constexpr, block_few: tl.constexpr):
    """Add biases; then mask the ids that are held open, unless nothing else is left. A program for each row.

    A bias added behind a mask changes nothing that is masked.
    """
    row = tl.program_id(0)
    values, lanes = processed + row.to(tl.int64) * vocab, tl.arange(0, block_few)
    num_biases = _number(numbers, _NUM_BIASES, rows, row).to(tl.int32)
    num_stops = _number(numbers, _NUM_STOPS, rows, row).to(tl.int32)
    ids = _number(numbers, _BIASED, rows, row).to(tl.pointer_type(tl.int64))
    biases = _number(numbers, _BIASES, rows, row).to(tl.pointer_type(tl.float32))
    for first in range(0, num_biases, block_few):
        inside = first + lanes < num_biases
        addresses = values + tl.load(ids + first + lanes, mask=inside, other=0)
        bias = tl.load(biases + first + lanes, mask=inside, other=0.0)
        tl.store(addresses, tl.load(addresses, mask=inside, other=0.0) + bias, mask=inside)
    if num_stops > 0:
        tl.debug_barrier()  # biases were stored by other threads than those that read them here
        stops = _number(numbers, _STOPS, rows, row).to(tl.pointer_type(tl.int64))
        largest = tl.full([block], float("-inf"), tl.float32)
        for begin in range(0, vocab, block):
            vocab_ids = begin + tl.arange(0, block)
            x = tl.load(values + vocab_ids, mask=vocab_ids < vocab, other=float("-inf"))
            for stop in range(0, num_stops):
                x = tl.where(vocab_ids == tl.load(stops + stop), float("-inf"), x)
            largest = tl.maximum(largest, tl.where(x == x, x, float("inf")))  # noqa: PLR0124
        masked = tl.where(tl.max(largest, 0) > float("-inf"), num_stops, 0)
        tl.debug_barrier()
        for begin in range(0, masked, block_few):
            chosen = begin + lanes < num_stops
            ends = values + tl.load(stops + begin + lanes, mask=chosen, other=0)
            tl.store(ends, tl.full([block_few], float("-inf"), tl.float32), mask=chosen)
