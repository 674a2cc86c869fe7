"""Sampling written out slowly in plain Python: what each parameter is supposed to mean."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

_MASK = 0xFFFFFFFF
BLOCK = 512


def penalized(
    logits: Sequence[float],
    prompt: Sequence[int],
    output: Sequence[int],
    repetition: float = 1.0,
    presence: float = 0.0,
    frequency: float = 0.0,
    bias: Mapping[int, float] | None = None,
    forbidden: Sequence[int] = (),
) -> list[float]:
    """Logits after penalties, bias and masks."""
    result = list(map(float, logits))
    for token in range(len(result)):
        if token in prompt or token in output:
            result[token] = result[token] / repetition if result[token] > 0 else result[token] * repetition
        count = output.count(token) if isinstance(output, list) else list(output).count(token)
        result[token] -= frequency * count + presence * (count > 0)
        result[token] += (bias or {}).get(token, 0.0)
        if token in forbidden:
            result[token] = -math.inf
    return result


def distribution(
    logits: Sequence[float], temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> list[float]:
    """Probability of each token; ties at a boundary are kept together."""
    scaled = [value / temperature for value in logits]
    order = sorted(scaled, reverse=True)
    if top_k:
        scaled = [value if value >= order[top_k - 1] else -math.inf for value in scaled]
        order = order[:top_k]
    weights = [math.exp(value - order[0]) for value in order]
    total = running = 0.0
    total = math.fsum(weights)
    least = order[0]
    for value, weight in zip(order, weights, strict=True):
        if running / total >= top_p:
            break
        least = value
        running += weight
    kept = [value if value >= least else -math.inf for value in scaled]
    powers = [math.exp(value - order[0]) if value > -math.inf else 0.0 for value in kept]
    powers = [power if power >= min_p else 0.0 for power in powers]
    norm = math.fsum(powers)
    return [power / norm for power in powers]


def mix(value: int) -> int:
    """MurmurHash3's 32-bit finalizer."""
    value ^= value >> 16
    value = value * 0x85EBCA6B & _MASK
    value ^= value >> 13
    value = value * 0xC2B2AE35 & _MASK
    return value ^ value >> 16


def noise(seed: int, position: int, token: int) -> float:
    """Gumbel noise of one token."""
    low, high = seed & _MASK, seed >> 32
    inner = mix(mix(mix(low ^ 0x9E3779B9) ^ high) ^ position)
    outer = mix(mix(mix(high ^ 0x7F4A7C15) ^ position) ^ low)
    bits = mix((mix(token ^ inner) + outer) & _MASK)
    return -math.log(-math.log((bits + 0.5) * 2.0**-32))


def choose(probabilities: Sequence[float], seed: int, position: int) -> int:
    """The draw itself: a block of tokens, then a token of it."""
    blocks = [probabilities[first : first + BLOCK] for first in range(0, len(probabilities), BLOCK)]

    def score(probability: float, key: int) -> float:
        return math.log(probability) + noise(seed, position, key) if probability > 0 else -math.inf

    winner = max(range(len(blocks)), key=lambda block: score(math.fsum(blocks[block]), block | 1 << 31))
    inside = range(len(blocks[winner]))
    return max(inside, key=lambda place: score(blocks[winner][place], winner * BLOCK + place)) + winner * BLOCK
