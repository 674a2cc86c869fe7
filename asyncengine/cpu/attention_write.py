"""What happens to queries, keys and values before attention: norms per head, rotation, and their places in the pool."""

from __future__ import annotations

from typing import Any

import numpy as np

from asyncengine.cpu.attention_fields import (
    HEADS,
    KEY_DIM,
    KV_HEADS,
    LANES,
    LAYER_FIELDS,
    PAGE_SIZE,
    PAGES,
    POOL_KEYS,
    POOL_VALUES,
    SCRATCH,
    SCRATCH_SIZE,
    SLOTS,
    STEP_FIELDS,
    TOKENS,
    VALUE_DIM,
)  # fmt: skip
from asyncengine.cpu.jit import array, narrow, parallel, pointer, prange, serial, widen
from asyncengine.cpu.vectors import size_of

_WHOLE, _WORD, _HALF = np.int64(0), np.uint32(0), np.uint16(0)


@parallel
def write(
    key: int, key_token: int, key_head: int, value: int, value_token: int, value_head: int, layer: int, step: int,
    kind: Any, threads: int,
) -> None:  # fmt: skip
    """Put key [tokens, kv heads, key dim] and value alike where they belong; their steps are given in bytes."""
    for thread in prange(threads):
        _write_units(thread, threads, key, key_token, key_head, value, value_token, value_head, layer, step, kind)


@serial
def _write_units(
    thread: int, threads: int, key: int, key_token: int, key_head: int, value: int, value_token: int, value_head: int,
    layer: int, step: int, kind: Any,
) -> None:  # fmt: skip
    tokens = array(pointer(step, _WHOLE), (STEP_FIELDS,))[TOKENS]
    for unit in range(first_unit(thread, threads, layer, step), first_unit(thread + 1, threads, layer, step)):
        head, token = unit // tokens, unit % tokens
        own, other = key + token * key_token + head * key_head, value + token * value_token + head * value_head
        store(own, other, token, head, layer, step, kind)


@serial
def first_unit(thread: int, threads: int, layer: int, step: int) -> int:
    """Where a thread's share of the new keys begins, head by head and token by token in each.

    Never between two keys whose values share words: writing the first of them clears its neighbour.
    """
    steps = array(pointer(step, _WHOLE), (STEP_FIELDS,))
    tokens = steps[TOKENS]
    units = tokens * array(pointer(layer, _WHOLE), (LAYER_FIELDS,))[KV_HEADS]
    unit = units * thread // threads
    if unit < units and unit % tokens > 0:
        unit += array(pointer(steps[SLOTS], _WHOLE), (tokens,))[unit % tokens] % 2
    return int(unit)


@serial
def store(key: int, value: int, token: int, head: int, layer: int, step: int, kind: Any) -> None:
    """One token's key and value of one head into its tiles. The layout: see `attention_tiles`."""
    known = array(pointer(layer, _WHOLE), (LAYER_FIELDS,))
    slot = array(pointer(array(pointer(step, _WHOLE), (STEP_FIELDS,))[SLOTS], _WHOLE), (token + 1,))[token]
    lanes, size = known[LANES], size_of(kind)
    place = head * (known[PAGES] * known[PAGE_SIZE] // lanes) + slot // lanes
    lane = slot % lanes
    words = (known[KEY_DIM] * size + 3) // 4
    tile = array(pointer(known[POOL_KEYS] + place * words * lanes * 4, _WORD), (words, lanes))
    if size == 2:
        halves = array(pointer(key, _HALF), (known[KEY_DIM],))
        for index in range(known[KEY_DIM] // 2):
            tile[index, lane] = np.uint32(halves[2 * index]) | np.uint32(halves[2 * index + 1]) << np.uint32(16)
        if known[KEY_DIM] % 2:
            tile[words - 1, lane] = np.uint32(halves[known[KEY_DIM] - 1])
    else:
        whole = array(pointer(key, _WORD), (words,))
        for index in range(words):
            tile[index, lane] = whole[index]
    dim = known[VALUE_DIM]
    to = known[POOL_VALUES] + place * dim * size * lanes
    numbers = array(pointer(value, kind), (dim,))
    if size == 2 and lanes > 1:
        if lane % 2 == 0:  # the neighbour is not written yet: whatever its place held must not enter a sum
            pairs = array(pointer(to + lane * dim * 2, _WORD), (dim,))
            for index in range(dim):
                pairs[index] = np.uint32(numbers[index])
        else:
            seconds = array(pointer(to + (lane - 1) * dim * 2, kind), (dim, 2))
            for index in range(dim):
                seconds[index, 1] = numbers[index]
    else:
        row = array(pointer(to + lane * dim * size, kind), (dim,))
        for index in range(dim):
            row[index] = numbers[index]


@parallel
def prepare_and_write(
    qkv: int, query: int, q_norm: int, k_norm: int, epsilon: float, cos: int, sin: int, rotary: int, layer: int,
    step: int, kind: Any, threads: int,
) -> None:  # fmt: skip
    """Norms and rotation of a merged projection; queries to `query` [tokens, heads, key dim], the rest to the pool."""
    for thread in prange(threads):
        _prepare_units(
            thread, threads, qkv, query, q_norm, k_norm, np.float32(epsilon), cos, sin, rotary, layer, step, kind
        )


@serial
def _prepare_units(
    thread: int, threads: int, qkv: int, query: int, q_norm: int, k_norm: int, epsilon: np.float32, cos: int, sin: int,
    rotary: int, layer: int, step: int, kind: Any,
) -> None:  # fmt: skip
    known = array(pointer(layer, _WHOLE), (LAYER_FIELDS,))
    steps = array(pointer(step, _WHOLE), (STEP_FIELDS,))
    tokens, heads, kv_heads = steps[TOKENS], known[HEADS], known[KV_HEADS]
    group, size = heads // kv_heads, size_of(kind)
    key_size, value_size = known[KEY_DIM] * size, known[VALUE_DIM] * size
    row = (heads + kv_heads) * key_size + kv_heads * value_size
    key = steps[SCRATCH] + thread * steps[SCRATCH_SIZE]
    for unit in range(first_unit(thread, threads, layer, step), first_unit(thread + 1, threads, layer, step)):
        head, token = unit // tokens, unit % tokens
        turn, lift = cos + token * rotary * size, sin + token * rotary * size
        for index in range(head * group, (head + 1) * group):
            own, to = qkv + token * row + index * key_size, query + (token * heads + index) * key_size
            prepare_head(own, to, known[KEY_DIM], q_norm, epsilon, turn, lift, rotary, kind)
        own = qkv + token * row + (heads + head) * key_size
        prepare_head(own, key, known[KEY_DIM], k_norm, epsilon, turn, lift, rotary, kind)
        value = qkv + token * row + (heads + kv_heads) * key_size + head * value_size
        store(key, value, token, head, layer, step, kind)


@parallel
def prepare(
    qkv: int, query: int, key: int, tokens: int, heads: int, kv_heads: int, dim: int, row: int, q_norm: int,
    k_norm: int, epsilon: float, cos: int, sin: int, rotary: int, kind: Any, threads: int,
) -> None:  # fmt: skip
    """query [tokens, heads, dim] and key [tokens, kv heads, dim] of qkv, whose rows have `row` bytes."""
    for thread in prange(threads):
        size = dim * size_of(kind)
        for token in range(tokens * thread // threads, tokens * (thread + 1) // threads):
            turn, lift = cos + token * rotary * size_of(kind), sin + token * rotary * size_of(kind)
            for head in range(heads + kv_heads):
                own = qkv + token * row + head * size
                if head < heads:
                    to, norm = query + (token * heads + head) * size, q_norm
                else:
                    to, norm = key + (token * kv_heads + head - heads) * size, k_norm
                prepare_head(own, to, dim, norm, np.float32(epsilon), turn, lift, rotary, kind)


@serial
def prepare_head(
    source: int, out: int, dim: int, norm: int, epsilon: np.float32, cos: int, sin: int, rotary: int, kind: Any
) -> None:
    """Normalise by the root of the mean square (`norm` 0: not), then rotate the first `rotary` dimensions by halves.

    Rounds to `kind` where the modules of transformers do: after each operation of theirs.
    """
    values, results = array(pointer(source, kind), (dim,)), array(pointer(out, kind), (dim,))
    if norm != 0:
        weights = array(pointer(norm, kind), (dim,))
        total = np.float32(0)
        for index in range(dim):
            total += widen(values[index]) * widen(values[index])
        scale = np.float32(1) / np.sqrt(total / np.float32(dim) + epsilon)
        for index in range(dim):
            normal = narrow(widen(values[index]) * scale, kind)
            results[index] = narrow(widen(normal) * widen(weights[index]), kind)
    else:
        for index in range(dim):
            results[index] = values[index]
    half = rotary // 2
    turns, lifts = array(pointer(cos, kind), (rotary,)), array(pointer(sin, kind), (rotary,))
    for index in range(half):
        first, second = widen(results[index]), widen(results[index + half])
        turned, lifted = narrow(first * widen(turns[index]), kind), narrow(-second * widen(lifts[index]), kind)
        results[index] = narrow(widen(turned) + widen(lifted), kind)
        turned = narrow(second * widen(turns[index + half]), kind)
        lifted = narrow(first * widen(lifts[index + half]), kind)
        results[index + half] = narrow(widen(turned) + widen(lifted), kind)
