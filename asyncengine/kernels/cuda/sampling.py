"""Sampling on a GPU: the largest logit, or a draw from what top-k, top-p and min-p keep, many programs to a row.

The choice is that of `sampling.sampler`, number for number of noise: Gumbel-max over blocks of tokens, then over the
tokens of the winning block. `scan` reads all logits once and is the end for greedy rows and for those that are drawn
from whole. For the others, thresholds are found by comparing with several pivots at a time, without sorting: `narrow`
brackets a top-p set among all logits, `gather` collects what the bracket holds, `settle` finds the exact value there,
and `total` draws. Rows that need nothing are skipped, and chunks without a logit in the bracket: of a peaked row, most.
Whichever program of a row is the last to arrive goes on for the row (NVIDIA's sample threadFenceReduction).

Sums that decide are of float32 in an order that only the vocabulary decides, or of whole numbers: the same row gives
the same bits in any batch.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Triton compiles no parameter that is annotated with anything but constexpr

from __future__ import annotations

import triton
import triton.language as tl

BLOCK = tl.constexpr(512)
"""Tokens that are drawn among at once."""
PIVOTS = tl.constexpr(16)
SETTINGS = tl.constexpr(8)
"""Numbers of a slot, int32: bits of temperature, top-p and min-p, then top-k, both halves of the seed."""
STATE = tl.constexpr(16)
"""Numbers of a row, float32, at the places below."""
_FINER, _TILE = tl.constexpr(8), tl.constexpr(1024)
_ONE = tl.constexpr(2.0**40)
"""The weight of the likeliest token in fixed point."""
_TOTAL, _GATHER, _NARROW = tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
"""Needs of a row: this kernel and those before it in this list. 0: it has its token."""
_LOW, _HIGH, _BASE, _TARGET, _LEAST, _TOP, _SCALE, _TOP_K, _TOP_P = (tl.constexpr(index) for index in range(9))
"""The threshold is in [LOW, HIGH): logits of HIGH and more weigh BASE together, and what is kept weighs TARGET. LEAST
is what min-p keeps, then all of it. A logit weighs e^((logit - TOP) * SCALE), TOP being the largest; 1 if TOP_K > 0."""
_ROWS = ["slots", "positions", "tokens", "best", "rows"]
"""Arguments that are no reason to compile a kernel again: as steps have more rows and fewer, they lie anywhere."""


@triton.jit
def _mix(value):
    value = value ^ (value >> 16)
    value = value * 0x85EBCA6B
    value = value ^ (value >> 13)
    value = value * 0xC2B2AE35
    return value ^ (value >> 16)


@triton.jit
def _gumbel(ids, low, high, position):
    """The noise of `sampling.sampler` for uint32 ids: a function of seed, position and id alone.

    -log(-log(u)) of u = (bits + 0.5) / 2**32 to an error of some 5e-7, which is float32's: above a half, log(u) is the
    series of 1 - u, which is known exactly. Logarithms in float64 would take half of a lone row's time.
    """
    inner = _mix(_mix(_mix(low ^ 0x9E3779B9) ^ high) ^ position)
    outer = _mix(_mix(_mix(high ^ 0x7F4A7C15) ^ position) ^ low)
    bits = _mix(_mix(ids ^ inner) + outer)
    upper = bits >= 0x80000000
    fraction = (tl.where(upper, bits ^ 0xFFFFFFFF, bits).to(tl.float32) + 0.5) * 2.3283064365386963e-10
    ratio = fraction / (2.0 - fraction)
    square = ratio * ratio
    series = 1.0 + square * (1 / 3 + square * (1 / 5 + square * (1 / 7 + square * (1 / 9 + square * (
        1 / 11 + square * (1 / 13 + square * (1 / 15)))))))  # fmt: skip
    return -tl.log(tl.where(upper, 2.0 * ratio * series, -tl.log(fraction)))


@triton.jit
def _items(needs, rows, chunks, need):
    """Number of chunks to look at: none if no row needs this kernel, else those of all rows."""
    offsets = tl.arange(0, BLOCK)
    most = tl.zeros([BLOCK], tl.int32)
    for first in range(0, rows, BLOCK):
        most = tl.maximum(most, tl.load(needs + first + offsets, mask=first + offsets < rows, other=0))
    return tl.where(tl.max(most, 0) >= need, rows * chunks, 0)


@triton.jit
def _is_last(arrivals, programs):
    """Whether this program is the last of `programs` to come here; it sees what all others have stored."""
    # all threads must have stored before one of them counts the program's arrival
    tl.debug_barrier()
    last = tl.atomic_add(arrivals, 1, sem="acq_rel", scope="gpu") == programs - 1
    if last:
        tl.store(arrivals, 0)
    return last


@triton.jit
def _pivot(low, high, index, count: tl.constexpr):
    """Number `index`, from 1 to `count`, of ascending numbers in (low, high], the last of which is `high`; none is
    infinite. Wherever it is computed it is the same to the bit."""
    between = tl.fma(tl.minimum(high - low, 3.0e38), index.to(tl.float32) / count, low)
    return tl.where(index == count, high, tl.minimum(between, high))


@triton.jit
def _weigh(x, weight, low, high, count: tl.constexpr):
    """[count]: the total weight of the elements of `x` that are not below each pivot."""
    lanes = tl.arange(0, count)
    sums = tl.zeros([count], weight.dtype)
    for index in tl.static_range(1, count + 1):
        pivot = _pivot(low, high, tl.full([], index, tl.int32), count)
        sums = tl.where(lanes == index - 1, tl.sum(tl.where(x >= pivot, weight, 0)), sums)
    return sums


@triton.jit
def _bracket(reached, low, high, count: tl.constexpr):
    """[low, high) between the pivots of which `reached` are reached, fewer than `count`."""
    new_low = tl.where(reached > 0, _pivot(low, high, reached, count), low)
    return new_low, _pivot(low, high, reached + 1, count)


@triton.jit
def _read(values, first, count, size: tl.constexpr):
    """float32 [size] of `values` from `first` on; -inf from `count` on."""
    index = first + tl.arange(0, size)
    return tl.load(values + index, mask=index < count, other=float("-inf")).to(tl.float32)


@triton.jit
def _read_chunk(values, chunk, vocab, per_chunk: tl.constexpr):
    """float32 [per_chunk, BLOCK]; -inf behind the vocabulary."""
    ids = (chunk * per_chunk + tl.arange(0, per_chunk)[:, None]) * BLOCK + tl.arange(0, BLOCK)[None, :]
    return tl.load(values + ids, mask=ids < vocab, other=float("-inf")).to(tl.float32)


@triton.jit
def _largest(maxima, chunk, blocks, per_chunk: tl.constexpr):
    """The largest logit of a chunk, or of each of several."""
    largest = tl.load(maxima + chunk * per_chunk, mask=chunk * per_chunk < blocks, other=float("-inf"))
    for within_chunk in tl.static_range(1, per_chunk):
        block = chunk * per_chunk + within_chunk
        largest = tl.maximum(largest, tl.load(maxima + block, mask=block < blocks, other=float("-inf")))
    return largest


@triton.jit
def _go_on(need, low, needs, awaited, maxima, blocks, per_chunk: tl.constexpr, most: tl.constexpr):
    """Store the kernel that the row needs next, and how many chunks that reads: those with a logit of `low` or more."""
    tl.store(needs, need)
    if need > 0:
        largest = _largest(maxima, tl.arange(0, most), blocks, per_chunk)
        tl.store(awaited, tl.sum((largest >= low).to(tl.int32), 0))


@triton.jit
def _search(values, count, low, high, base, target, by_count, top, scale):
    """The largest of `count` values in [low, high) that weighs, with all above it and `base` for those not below
    `high`, at least `target`. Weights are whole numbers: 1, or in fixed point what a logit weighs."""
    threshold = low
    # pivots lie between values that exist, so that equal ones end the search in one round
    while low < high:
        smallest, largest = high, low
        for first in range(0, count, _TILE):
            x = _read(values, first, count, _TILE)
            inside = (x >= low) & (x < high)
            smallest = tl.minimum(smallest, tl.min(tl.where(inside, x, high), 0))
            largest = tl.maximum(largest, tl.max(tl.where(inside, x, low), 0))
        threshold = tl.where(smallest < high, smallest, low)
        if smallest < largest:
            sums = tl.zeros([_FINER], tl.int64) + base
            for first in range(0, count, _TILE):
                x = _read(values, first, count, _TILE)
                weight = tl.where(by_count, 1, (tl.exp((x - top) * scale) * _ONE).to(tl.int64))
                weight = tl.where((x >= low) & (x < high), weight, 0)
                sums += _weigh(x, weight, smallest, largest, _FINER)
            reached = tl.sum((sums >= target).to(tl.int32), 0)
            if reached == _FINER:
                threshold, high = largest, low
            else:
                base = tl.sum(tl.where(tl.arange(0, _FINER) == reached, sums, 0), 0)
                low, high = _bracket(reached, smallest, largest, _FINER)
                threshold = low
        else:
            high = low
    return threshold


@triton.jit
def _choose(values, scores, least, top, scale, settings, position, vocab, most: tl.constexpr):
    """The row's token, from the scores [most] of its blocks without noise. `scale` 0: that of the largest logit."""
    low = tl.load(settings + 4).to(tl.uint32, bitcast=True)
    high = tl.load(settings + 5).to(tl.uint32, bitcast=True)
    where = position.to(tl.uint32)
    if scale > 0:
        scores += _gumbel(tl.arange(0, most).to(tl.uint32) | 0x80000000, low, high, where)
    first = tl.argmax(scores, 0) * BLOCK
    x = _read(values, first, vocab, BLOCK)
    inside = tl.where(x >= least, x - top, float("-inf"))
    if scale > 0:
        inside = inside * scale + _gumbel((first + tl.arange(0, BLOCK)).to(tl.uint32), low, high, where)
    return (first + tl.argmax(inside, 0)).to(tl.int64)


@triton.jit
def _plan(state, maxima, lowest, masses, top, scale, settings, vocab, blocks, most: tl.constexpr):
    """Write the state of a row that may not keep all its logits; all blocks' numbers are [most]. Returns what it needs,
    and the smallest logit that matters for that."""
    top_p = tl.load(settings + 1).to(tl.float32, bitcast=True)
    min_p = tl.load(settings + 2).to(tl.float32, bitcast=True)
    top_k = tl.load(settings + 3)
    need, low, high, target = 0, lowest, top, 0.0
    if top_k > 0:
        need, target = _NARROW, top_k.to(tl.float32)
        if top_k <= blocks:  # as many blocks reach this as tokens are wanted, so the threshold is no smaller
            for _ in range(3):
                counts = _weigh(maxima, (maxima >= low).to(tl.int32), low, high, PIVOTS)
                reached = tl.sum((counts >= top_k).to(tl.int32), 0)
                if reached == PIVOTS:
                    low = high
                else:
                    low, high = _bracket(reached, low, high, PIVOTS)
            need = _GATHER
    elif top_p < 1:
        # were all tokens as unlikely as this, they would together be what top-p leaves out
        negligible = top + tl.log((1 - top_p) / vocab) / scale
        need, low, target = _NARROW, tl.maximum(low, negligible), top_p * tl.sum(tl.exp(masses - top * scale), 0)
    elif min_p > 0:
        need = _TOTAL
    tl.store(state + _LOW, low)
    tl.store(state + _HIGH, tl.where(top_k > 0, float("inf"), high))
    tl.store(state + _BASE, 0.0)
    tl.store(state + _TARGET, target)
    least = tl.where(min_p > 0, top + tl.log(tl.maximum(min_p, 1e-37)) / scale, float("-inf"))
    tl.store(state + _LEAST, least)
    tl.store(state + _TOP, top)
    tl.store(state + _SCALE, scale)
    tl.store(state + _TOP_K, top_k.to(tl.float32))
    tl.store(state + _TOP_P, top_p)
    return need, tl.where(need == _TOTAL, least, low)


@triton.jit(do_not_specialize=_ROWS, do_not_specialize_on_alignment=_ROWS)
def scan(logits, stride, table, slots, positions, tokens, best, stats, states, needs, arrivals, awaited, counts, rows,
         vocab, blocks, chunks, per_chunk: tl.constexpr, most: tl.constexpr, later: tl.constexpr):  # fmt: skip
    """Largest, smallest and mass of every block; then the token of rows that keep every logit, else what they need.

    Grid (chunks of per_chunk blocks, rows). stats float32 [rows, 3, blocks]; needs, arrivals (zeros at first), awaited
    and counts int32 [rows]. most is a power of two of at least `blocks`; later: the other kernels'.
    """
    chunk, row = tl.program_id(0), tl.program_id(1)
    values = logits + row.to(tl.int64) * stride
    block = chunk * per_chunk + tl.arange(0, per_chunk)
    x = _read_chunk(values, chunk, vocab, per_chunk)
    settings = table + tl.load(slots + row) * SETTINGS
    temperature = tl.load(settings).to(tl.float32, bitcast=True)
    scale = tl.where(temperature > 0, 1.0 / tl.where(temperature > 0, temperature, 1.0), 0.0)
    stats += row * 3 * blocks
    x = tl.where(x == x, x, float("inf"))  # noqa: PLR0124  # NaN as inf: with either the row has no token
    maxima = tl.max(x, axis=1)
    tl.store(stats + block, maxima, mask=block < blocks)
    if scale > 0:
        minima = tl.min(tl.where(x > float("-inf"), x, float("inf")), axis=1)
        finite_blocks = (maxima > float("-inf")) & (maxima < float("inf"))
        mass = tl.sum(tl.exp((x - tl.where(finite_blocks, maxima, 0.0)[:, None]) * scale), axis=1)
        mass = tl.where(finite_blocks, tl.log(tl.where(finite_blocks, mass, 1.0)) + maxima * scale, float("-inf"))
        tl.store(stats + blocks + block, minima, mask=block < blocks)
        tl.store(stats + 2 * blocks + block, mass, mask=block < blocks)
    if _is_last(arrivals + row, chunks):
        tl.store(counts + row, 0)  # not in `settle`, which reads it: its threads may read it at different times
        largest = _read(stats, 0, blocks, most)
        top = tl.max(largest, 0)
        has_token = (top > float("-inf")) & (top < float("inf"))
        need, low, chosen = 0, top, tl.zeros([], tl.int64)
        if has_token:
            scores = largest
            if scale > 0:
                block_ids = tl.arange(0, most)
                lowest = tl.min(tl.load(stats + blocks + block_ids, mask=block_ids < blocks, other=float("inf")), 0)
                scores = _read(stats + 2 * blocks, 0, blocks, most)
                state = states + row * STATE
                need, low = _plan(state, largest, lowest, scores, top, scale, settings, vocab, blocks, most)
            if need == 0:
                position = tl.load(positions + row)
                chosen = _choose(values, scores, float("-inf"), top, scale, settings, position, vocab, most)
        tl.store(best + row, top)
        tl.store(tokens + row, chosen)
        _go_on(need, low, needs + row, awaited + row, stats, blocks, later, most)


@triton.jit(do_not_specialize=_ROWS, do_not_specialize_on_alignment=_ROWS)
def narrow(logits, stride, stats, states, needs, arrivals, awaited, partial_sums, rows, vocab, blocks, chunks,
           per_chunk: tl.constexpr, most: tl.constexpr):  # fmt: skip
    """Narrow [LOW, HIGH) to a sixteenth, of rows whose threshold may be anywhere.

    Like `gather` and `total`: any number of programs for all chunks of all rows, most of which are to be skipped soon,
    of one warp, whose sums need not wait for other warps'. partial_sums float32 [rows, chunks, PIVOTS].
    """
    for item in range(tl.program_id(0), _items(needs, rows, chunks, _NARROW), tl.num_programs(0)):
        row, chunk = item // chunks, item % chunks
        state, maxima = states + row * STATE, stats + row * 3 * blocks
        low, largest = tl.load(state + _LOW), _largest(maxima, chunk, blocks, per_chunk)
        lanes = tl.arange(0, PIVOTS)
        if (tl.load(needs + row) == _NARROW) & (largest >= low):
            top, scale = tl.load(state + _TOP), tl.load(state + _SCALE)
            high = tl.minimum(tl.load(state + _HIGH), top)
            x = _read_chunk(logits + row.to(tl.int64) * stride, chunk, vocab, per_chunk)
            weight = tl.where(tl.load(state + _TOP_K) > 0, 1.0, tl.exp((x - top) * scale))
            tl.store(partial_sums + item * PIVOTS + lanes, _weigh(x, weight, low, high, PIVOTS))
            if _is_last(arrivals + row, tl.load(awaited + row)):
                sums = tl.zeros([PIVOTS], tl.float32)
                for first in range(0, chunks, PIVOTS):
                    index = first + lanes
                    counted = (index < chunks) & (_largest(maxima, index, blocks, per_chunk) >= low)
                    addresses = partial_sums + (row * chunks + index[:, None]) * PIVOTS + lanes[None, :]
                    sums += tl.sum(tl.load(addresses, mask=counted[:, None], other=0.0), axis=0)
                reached = tl.sum((sums >= tl.load(state + _TARGET)).to(tl.int32), 0)
                need = tl.where(reached == PIVOTS, _TOTAL, _NARROW)
                least = tl.load(state + _LEAST)
                if reached == PIVOTS:  # the largest logit alone
                    low = tl.maximum(least, top)
                    tl.store(state + _LEAST, low)
                else:
                    low, high = _bracket(reached, low, high, PIVOTS)
                    tl.store(state + _LOW, low)
                    tl.store(state + _HIGH, high)
                    tl.store(state + _BASE, tl.sum(tl.where(lanes == reached, sums, 0.0), 0))
                _go_on(need, low, needs + row, awaited + row, maxima, blocks, per_chunk, most)


@triton.jit(do_not_specialize=_ROWS, do_not_specialize_on_alignment=_ROWS)
def gather(logits, stride, stats, states, needs, counts, candidates, room, rows, vocab, blocks, chunks,
           per_chunk: tl.constexpr):  # fmt: skip
    """Collect the logits in [LOW, HIGH), of rows with top-k all from LOW on, of rows whose threshold is among them.

    candidates [rows, room] of the logits' type; counts: how many there are, also if there is no room for all.
    """
    for item in range(tl.program_id(0), _items(needs, rows, chunks, _GATHER), tl.num_programs(0)):
        row, chunk = item // chunks, item % chunks
        state = states + row * STATE
        low, largest = tl.load(state + _LOW), _largest(stats + row * 3 * blocks, chunk, blocks, per_chunk)
        if (tl.load(needs + row) >= _GATHER) & (largest >= low):
            high = tl.where(tl.load(state + _TOP_K) > 0, float("inf"), tl.load(state + _HIGH))
            x = _read_chunk(logits + row.to(tl.int64) * stride, chunk, vocab, per_chunk)
            x = tl.reshape(x, [per_chunk * BLOCK])
            inside = ((x >= low) & (x < high)).to(tl.int32)
            matches = tl.sum(inside, 0)
            if matches > 0:
                index = tl.atomic_add(counts + row, matches, sem="relaxed", scope="gpu") + tl.cumsum(inside, 0) - 1
                kept = candidates + row.to(tl.int64) * room + index
                tl.store(kept, x.to(candidates.dtype.element_ty), mask=(inside > 0) & (index < room))


@triton.jit(do_not_specialize=_ROWS, do_not_specialize_on_alignment=_ROWS)
def settle(logits, stride, stats, states, needs, awaited, counts, candidates, room, rows, vocab, blocks, chunks,
           per_chunk: tl.constexpr, most: tl.constexpr):  # fmt: skip
    """Find the threshold exactly among the candidates; if there was no room for all, among all of the row's logits."""
    row = tl.program_id(0)
    if tl.load(needs + row) >= _GATHER:
        state, values = states + row * STATE, candidates + row.to(tl.int64) * room
        count = tl.load(counts + row)
        if count > room:
            values, count = logits + row.to(tl.int64) * stride, vocab
        least = tl.maximum(tl.load(state + _LEAST), _threshold(values, count, state))
        tl.store(state + _LEAST, least)
        _go_on(_TOTAL, least, needs + row, awaited + row, stats + row * 3 * blocks, blocks, per_chunk, most)


@triton.jit
def _threshold(values, count, state):
    """The smallest logit that top-k, then top-p over what that left, keep: among `count` values in [LOW, HIGH)."""
    low, high = tl.load(state + _LOW), tl.load(state + _HIGH)
    top, scale, top_p = tl.load(state + _TOP), tl.load(state + _SCALE), tl.load(state + _TOP_P)
    base = (tl.load(state + _BASE).to(tl.float64) * _ONE).to(tl.int64)
    target = (tl.load(state + _TARGET).to(tl.float64) * _ONE).to(tl.int64)
    top_k = tl.load(state + _TOP_K).to(tl.int64)
    if top_k > 0:
        base, high = tl.zeros([], tl.int64), float("inf")
        low = _search(values, count, low, high, base, top_k, True, top, scale)
        mass, above = base, base
        for first in range(0, count, _TILE):
            x = _read(values, first, count, _TILE)
            mass += tl.sum(tl.where(x > low, (tl.exp((x - top) * scale) * _ONE).to(tl.int64), 0), 0)
            above += tl.sum((x > low).to(tl.int64), 0)
        # of those that tie with the last, as many as top-k has room for
        mass += (top_k - above) * (tl.exp((low - top) * scale) * _ONE).to(tl.int64)
        target = (mass.to(tl.float64) * top_p).to(tl.int64)
    if top_p < 1:
        low = _search(values, count, low, high, base, tl.maximum(target, 1), False, top, scale)
    return low


@triton.jit(do_not_specialize=_ROWS, do_not_specialize_on_alignment=_ROWS)
def total(logits, stride, table, slots, positions, tokens, stats, states, needs, arrivals, awaited, rows, vocab,
          blocks, chunks, per_chunk: tl.constexpr, most: tl.constexpr):  # fmt: skip
    """The mass of every block without what is below the threshold, then the token, of rows that have a threshold."""
    for item in range(tl.program_id(0), _items(needs, rows, chunks, _TOTAL), tl.num_programs(0)):
        row, chunk = item // chunks, item % chunks
        state, values, maxima = states + row * STATE, logits + row.to(tl.int64) * stride, stats + row * 3 * blocks
        least, largest = tl.load(state + _LEAST), _largest(maxima, chunk, blocks, per_chunk)
        if (tl.load(needs + row) > 0) & (largest >= least):
            top, scale = tl.load(state + _TOP), tl.load(state + _SCALE)
            x = _read_chunk(values, chunk, vocab, per_chunk)
            mass = tl.sum(tl.where(x >= least, tl.exp((x - top) * scale), 0.0), axis=1)
            block = chunk * per_chunk + tl.arange(0, per_chunk)
            tl.store(maxima + 2 * blocks + block, tl.log(tl.maximum(mass, 1e-37)), mask=block < blocks)
            if _is_last(arrivals + row, tl.load(awaited + row)):
                kept = _read(maxima, 0, blocks, most) >= least
                scores = tl.where(kept, _read(maxima + 2 * blocks, 0, blocks, most), float("-inf"))
                settings, position = table + tl.load(slots + row) * SETTINGS, tl.load(positions + row)
                tl.store(tokens + row, _choose(values, scores, least, top, scale, settings, position, vocab, most))
