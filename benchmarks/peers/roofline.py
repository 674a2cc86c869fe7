"""The machine's best rates, and the least time that a piece of work takes at that.

    python -m benchmarks.peers.roofline [--threads 2 --dtype bfloat16]

Bandwidth: three reductions over 512 MiB (far above any cache), which do next to nothing with what they read. On the
machine this was written on all three agree within 5 %, so it is the memory that limits them, not their arithmetic; the
best counts. Rate: oneDNN's product of matrices of the sizes that models have, the best of four; without AVX-512 that of
float32, for there bfloat16 is widened by whoever multiplies it fast, and oneDNN has nothing for it. Both are measured
between the systems' turns in the same run, because a shared machine has another bandwidth in another minute.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from benchmarks.peers.mixed_shapes import MixedShape
from benchmarks.peers.shapes import Shape
from benchmarks.peers.workloads import Request

_BUFFER = 512 * 2**20
_SIZES = ((2048, 2048, 2048), (2048, 1024, 3072), (2048, 3072, 1024), (1024, 1024, 6144))
"""Rows, width and columns of the products."""
_TURNS = 4


class Machine:
    """Keeps its buffers, so that measuring again is quick. Units: bytes and operations per second."""

    def __init__(self, threads: int, dtype: str) -> None:
        import torch

        from asyncengine.execution.device.arena import Arena
        from asyncengine.kernels.cpu.vectors import cpu_has

        torch.set_num_threads(threads)
        self._torch = torch
        # in huge pages, as weights lie: in small ones all three may read a third slower than products do; and written,
        # or it would be one page mapped many times
        buffer = Arena().empty((_BUFFER,), torch.int8).fill_(0)
        self._reads: tuple[Callable[[], Any], ...] = (
            buffer.amax, buffer.view(torch.int64).sum, buffer.view(torch.float64).sum,
        )  # fmt: skip
        kind = getattr(torch, dtype) if cpu_has("avx512f") else torch.float32
        self._products = [
            (2 * rows * width * columns, torch.randn(rows, width).to(kind), torch.randn(columns, width).to(kind))
            for rows, width, columns in _SIZES
        ]

    def bandwidth(self) -> float:
        return max(_BUFFER / _least(read) for read in self._reads)

    def rate(self) -> float:
        linear = self._torch.nn.functional.linear
        return max(operations / _least(partial(linear, left, right)) for operations, left, right in self._products)


def _least(work: Callable[[], Any]) -> float:
    """Seconds of the fastest of some turns."""
    spent = []
    for _ in range(_TURNS):
        began = time.perf_counter()
        work()
        spent.append(time.perf_counter() - began)
    return min(spent)


def least_decode(shape: Shape | MixedShape, dtype: str, weights: float, context: float, bandwidth: float) -> float:
    """Seconds that one step of one stream takes at least: weights that it needs, states, and the keys and values before
    it are read once."""
    return (shape.read_bytes(weights, 1, dtype) + context * shape.kv_bytes(dtype)) / bandwidth


def least_prefill(shape: Shape | MixedShape, prompts: Sequence[int], rate: float) -> float:
    """Seconds that these prompts take at least: each token passes the layers, attends to those before it, and the last
    of each needs logits.
    """
    attended = sum(length * (length + 1) // 2 for length in prompts)
    return shape.operations(sum(prompts), attended, len(prompts)) / rate


def least_alike(
    shape: Shape | MixedShape, dtype: str, weights: float, requests: Sequence[Request], bandwidth: float, rate: float
) -> float:
    """Seconds for requests of equal lengths that come at once: their prompts, then a step for each further token, which
    takes as long as its reading or its arithmetic, whichever is longer.
    """
    prompt, output, count = len(requests[0].prompt), requests[0].output, len(requests)
    context = prompt + output / 2
    reading = (shape.read_bytes(weights, count, dtype) + count * context * shape.kv_bytes(dtype)) / bandwidth
    arithmetic = shape.operations(count, int(count * context), count) / rate
    return least_prefill(shape, [prompt] * count, rate) + (output - 1) * max(reading, arithmetic)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    options = parser.parse_args()
    machine = Machine(options.threads, options.dtype)
    for _ in range(3):
        print(f"read {machine.bandwidth() / 1e9:.1f} GB/s, {options.dtype} products {machine.rate() / 1e9:.0f} GFLOP/s")


if __name__ == "__main__":
    main()
