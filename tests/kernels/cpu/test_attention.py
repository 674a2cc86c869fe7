"""The softmax inside the attention kernels: how exact it is, and what infinities and NaN do to it."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from asyncengine.kernels.cpu.attention_softmax import FEW, softcap, softmax
from asyncengine.kernels.cpu.attention_tiles import BLOCK, FLOOR
from asyncengine.kernels.cpu.jit import serial_in_order

Floats = npt.NDArray[np.float32]


@serial_in_order
def softmax_block(there: int, scores: int, out: int, low: int, high: int, scale: Any, state: int, operand: Any) -> None:
    softmax(there, scores, out, low, high, scale, state, state + 4, state + 8, operand)


@serial_in_order
def softcap_block(scores: int, scale: Any, cap: Any) -> None:
    softcap(scores, scale, cap)


def weights(
    scores: Floats, low: int = 0, high: int = BLOCK, state: Floats | None = None, there: int = BLOCK
) -> tuple[Floats, Floats]:
    """The weights of a block, and maximum, sum and factor after it."""
    state = np.array([FLOOR, 0, 0], dtype=np.float32) if state is None else state
    out = np.empty(BLOCK, dtype=np.float32)
    one, zero = np.float32(1), np.float32(0)
    softmax_block(there, scores.ctypes.data, out.ctypes.data, low, high, one, state.ctypes.data, zero)
    return out, state


def test_powers_are_exact_to_the_last_bits() -> None:
    for seed in range(20):
        scores = (np.random.default_rng(seed).random(BLOCK) * -40).astype(np.float32)
        scores[seed] = 0
        found, state = weights(scores)
        expected = np.exp2(scores.astype(np.float64))
        assert np.abs(found / expected - 1).max() < 3e-7
        assert abs(state[1] / expected.sum() - 1) < 1e-6
        assert state[0] == 0


@pytest.mark.parametrize("bounds", [(0, 1), (0, FEW), (3, 20), (16, FEW), (7, 7)])
def test_a_block_of_few_keys_has_the_bits_of_a_whole_one(bounds: tuple[int, int]) -> None:
    scores = np.random.default_rng(1).normal(size=BLOCK).astype(np.float32) * 5
    before = np.array([0.5, 2, 0], dtype=np.float32)
    found, state = weights(scores, *bounds, before.copy(), there=FEW)
    expected, after = weights(scores, *bounds, before.copy())
    assert np.array_equal(found[:FEW], expected[:FEW])
    assert np.array_equal(state, after)


@pytest.mark.parametrize("bits", [0x7FC00000, 0x7FC00001, 0x7F800123, 0xFFFFFFFF])
def test_nan_stays_nan(bits: int) -> None:
    scores = np.zeros(BLOCK, dtype=np.float32)
    scores.view(np.uint32)[17] = bits
    found, state = weights(scores)
    assert np.isnan(found[17])
    assert np.isnan(state[1])
    assert np.isfinite(np.delete(found, 17)).all()


@pytest.mark.parametrize("cap", [0.7, 30.0, 50.0])
def test_soft_cap(cap: float) -> None:
    scores = np.linspace(-400, 400, BLOCK, dtype=np.float32)
    scores[:8] = [0, 1e-6, -1e-3, 0.1, 0.24 * cap, 0.26 * cap, -3 * cap, 1e30]
    found = scores.copy()
    softcap_block(found.ctypes.data, np.float32(0.5), np.float32(cap))
    expected = cap * np.tanh(scores.astype(np.float64) * 0.5 / cap) * np.log2(np.e)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
