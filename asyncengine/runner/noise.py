"""Random numbers as a stateless function of (seed, position, token id).

Nothing is drawn from a generator, so a token does not depend on batch neighbours, slots, chunking, preemption or
padding, and replaying a step gives the same token (the idea of vLLM's model runner V2). The mixing function is the
finalizer of MurmurHash3 (Austin Appleby, public domain); arithmetic is in int64, masked to 32 bits.
"""

from __future__ import annotations

import torch

_MASK = 0xFFFFFFFF
BLOCK_FLAG = 1 << 31
"""Set in an id to name a block of tokens rather than a token; the two draw independent numbers."""


def _mix(value: torch.Tensor) -> torch.Tensor:
    """A bijection of [0, 2**32) in which each input bit flips each output bit half of the time."""
    value = value ^ (value >> 16)
    value = (value * 0x85EBCA6B) & _MASK
    value = value ^ (value >> 13)
    value = (value * 0xC2B2AE35) & _MASK
    return value ^ (value >> 16)


def uniform_bits(
    seed_low: torch.Tensor, seed_high: torch.Tensor, positions: torch.Tensor, ids: torch.Tensor
) -> torch.Tensor:
    """int64 values in [0, 2**32) of the shape of `ids` [rows, n].

    seed_low, seed_high, positions: int64 [rows]; the halves of the seed and the ids in [0, 2**32).
    """
    inner = _mix(_mix(_mix(seed_low ^ 0x9E3779B9) ^ seed_high) ^ (positions & _MASK))
    outer = _mix(_mix(_mix(seed_high ^ 0x7F4A7C15) ^ (positions & _MASK)) ^ seed_low)
    return _mix((_mix(ids ^ inner[:, None]) + outer[:, None]) & _MASK)


def gumbel(seed_low: torch.Tensor, seed_high: torch.Tensor, positions: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise, float32, of the shape of `ids`; always finite.

    argmax(logits + noise) over ids is a draw from softmax(logits) (Gumbel 1954).
    """
    bits = uniform_bits(seed_low, seed_high, positions, ids)
    uniform = (bits.double() + 0.5) * 2.0**-32
    return -torch.log(-torch.log(uniform)).float()
