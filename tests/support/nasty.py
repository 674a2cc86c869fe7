"""Values that somebody will pass some day, for every parameter alike."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import torch


class Mute:
    """Cannot even be shown."""

    def __repr__(self) -> str:
        raise RuntimeError("no name")


def _deep() -> list[Any]:
    nest: list[Any] = []
    for _ in range(5000):
        nest = [nest]
    return nest


NUMBERS: list[Any] = [
    0, -0.0, 1, -1, 2, 3, 0.5, 7, 1e-8, 1e-45, 5e-324, 1e-300, 1e-3, 1e3, 1e6, 3e38, 1e39, 1e300, float("inf"),
    float("-inf"), float("nan"), 10**400, -(10**400), 10**5000, 2**31 - 1, 2**31, 2**53 + 1, 2**63 - 1, -(2**63), 2**63,
    2**64 - 1, 2**64, 1j, Decimal("0.5"), Fraction(1, 3), np.int64(5), np.int8(-1), np.uint64(2**64 - 1),
    np.float32(0.5), np.float16(1), np.float64("nan"), np.float64(1e-300), np.bool_(True), np.array(5), np.array([1]),
    np.array([0.5, 0.5]), torch.tensor(1), torch.tensor([0.5]),
]  # fmt: skip
OTHERS: list[Any] = [
    None, True, False, "", "0", "hot", "²", "\ud800", "nul\0", "x" * 1_000_000, b"bytes", [], [1], ["x"], [[1]], [None],
    [2**70], [-1], ["\ud800"], [""], (), {}, {"²": 1}, {"1": "x"}, {"1": 1}, {1: 1e39}, {1: float("nan")}, {2**70: 1},
    {"9" * 5000: 1}, {None: 1}, {np.int64(3): np.float32(1)}, {(): 1}, {1, 2}, range(3), object(), object, len, Mute(),
    [Mute()], _deep(),
]  # fmt: skip
NASTY: list[Any] = NUMBERS + OTHERS
