"""Functions of finished vectors, row by row: activations of scores, and shortening."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
_MIN_NORM = np.float32(1e-12)


def activate(name: str, x: Floats) -> Floats:
    """An activation of x [rows, numbers], as torch's module of that name with its defaults."""
    result: Floats = x
    with np.errstate(over="ignore"):
        match name:
            case "sigmoid":
                result = _sigmoid(x)
            case "tanh":
                result = np.tanh(x)
            case "softmax":
                raised = np.exp(x - x.max(axis=1, keepdims=True))
                result = raised / raised.sum(axis=1, keepdims=True)
            case "relu":
                result = np.maximum(x, np.float32(0))
            case "silu":
                result = x * _sigmoid(x)
            case "gelu":
                erf = np.vectorize(math.erf, otypes=[np.float32])
                result = np.float32(0.5) * x * (1 + erf(x / math.sqrt(2.0)))
    return result


def _sigmoid(x: Floats) -> Floats:
    return np.float32(1) / (np.float32(1) + np.exp(-x))


def shortened(vectors: Floats, dimensions: int | None, normalize: bool) -> Floats:
    """The first `dimensions` of vectors [rows, width] (Matryoshka, Kusupati et al. 2022), then of length one."""
    if dimensions is not None and dimensions < vectors.shape[1]:
        vectors = np.ascontiguousarray(vectors[:, :dimensions])
    if normalize and len(vectors):
        norms: Floats = np.sqrt(np.add.reduce(vectors * vectors, axis=1, keepdims=True))
        lengths: Floats = np.maximum(norms, _MIN_NORM)
        return vectors / lengths
    return vectors
