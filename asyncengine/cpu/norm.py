"""RMS normalisation, alone or with the residual sum before it."""

from __future__ import annotations

import numpy as np
import torch

from asyncengine.cpu.jit import array, kind_of, narrow, parallel, pointer, prange, serial, use_threads, widen


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """x / rms(x) * weight over the last dimension, in float32 inside. x [..., width] contiguous, weight [width]."""
    x = x.contiguous()
    out = torch.empty_like(x)
    width = weight.shape[0]
    rows = x.numel() // width
    kind = kind_of(x.dtype)
    _norm(x.data_ptr(), weight.data_ptr(), out.data_ptr(), rows, width, epsilon, kind, use_threads())
    return out


@parallel
def _norm(x: int, weight: int, out: int, rows: int, width: int, epsilon: float, kind: np.generic, threads: int) -> None:
    for thread in prange(threads):
        first, last = rows * thread // threads, rows * (thread + 1) // threads
        _norm_rows(x, weight, out, first, last, width, np.float32(epsilon), kind)


@serial
def _norm_rows(
    x: int, weight: int, out: int, first: int, last: int, width: int, epsilon: np.float32, kind: np.generic
) -> None:
    values = array(pointer(x, kind), (last, width))
    weights = array(pointer(weight, kind), (width,))
    results = array(pointer(out, kind), (last, width))
    for row in range(first, last):
        total = np.float32(0)
        for index in range(width):
            value = widen(values[row, index])
            total += value * value
        scale = np.float32(1) / np.sqrt(total / np.float32(width) + epsilon)
        for index in range(width):
            results[row, index] = narrow(widen(values[row, index]) * scale * widen(weights[index]), kind)
