"""Random numbers as a stateless function of (seed, position, token id).

Nothing is drawn from a generator, so a token does not depend on batch neighbours, slots, chunking, preemption or
padding, and replaying a step gives the same token (the idea of vLLM's model runner V2). The mixing function is the
finalizer of MurmurHash3 (Austin Appleby, public domain); arithmetic is in int64, masked to 32 bits.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import torch

from asyncengine.execution.device.transfer import Int64Array

Integers = TypeVar("Integers", torch.Tensor, Int64Array)

_MASK = 0xFFFFFFFF
BLOCK_FLAG = 1 << 31
"""Set in an id to name a block of tokens rather than a token; the two draw independent numbers."""


AGAIN_FLAG = 1 << 30
"""Set in the id of a token that is drawn in the place of another one at the same position."""


def _mix(value: Integers) -> Integers:
    """A bijection of [0, 2**32) in which each input bit flips each output bit half of the time."""
    value = value ^ (value >> 16)
    value = (value * 0x85EBCA6B) & _MASK
    value = value ^ (value >> 13)
    value = (value * 0xC2B2AE35) & _MASK
    return value ^ (value >> 16)


def noise_keys(seed_low: Int64Array, seed_high: Int64Array, positions: Int64Array) -> Int64Array:
    """int64 [2, rows]: the part of every random number that depends on seed and position [rows] alone.

    The halves of the seed are in [0, 2**32). On the host, which knows them all: on a device it would be a hundred
    small kernels a step.
    """
    where = positions & _MASK
    inner = _mix(_mix(_mix(seed_low ^ 0x9E3779B9) ^ seed_high) ^ where)
    outer = _mix(_mix(_mix(seed_high ^ 0x7F4A7C15) ^ where) ^ seed_low)
    return np.stack((inner, outer))


def uniform_bits(keys: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """int64 values in [0, 2**32) of the shape of `ids` [rows, n], which are in [0, 2**32). keys: `noise_keys`."""
    inner, outer = keys
    return _mix((_mix(ids ^ inner[:, None]) + outer[:, None]) & _MASK)


def gumbel(keys: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise, float32, of the shape of `ids`; always finite. keys: `noise_keys`.

    argmax(logits + noise) over ids is a draw from softmax(logits) (Gumbel 1954).
    """
    bits = uniform_bits(keys, ids)
    uniform = (bits.double() + 0.5) * 2.0**-32
    return -torch.log(-torch.log(uniform)).float()
