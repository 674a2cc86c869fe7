"""The memory's rate in this minute: reading a buffer that lies as weights do, in huge pages (`kernels.arena`).

In pages of 4 KiB a sum over it takes up to half as long again as over weights, and a step seems to read faster than the
memory allows.
"""

from __future__ import annotations

import time

import torch

from asyncengine.kernels.arena import Arena

_BYTES = 2**29


class Buffer:
    """512 MiB, far above any cache."""

    nbytes = _BYTES

    def __init__(self) -> None:
        self._numbers = Arena().empty((_BYTES // 8,), torch.int64).fill_(1)  # unwritten it may be one page many times

    def read(self) -> float:
        """Milliseconds of reading all of it, by torch's threads."""
        began = time.perf_counter()
        self._numbers.sum()
        return 1e3 * (time.perf_counter() - began)
