"""Attention on the CPU, the compiled backend against the torch one: one layer of the Qwen3-0.6B shape, bfloat16.

    python -m benchmarks.attention_kernels [--threads 2 --rounds 9 --layers 8 --rows 1x192 16x208 ...]

A case is rows x context: decode steps of that many rows, or, with a third number, prompt chunks of that many tokens
that end there. `--layers` pools take turns, so that keys come from memory as they do in a model. The backends take
turns too; milliseconds are medians over rounds of one layer's `attend`, GB/s the keys and values of the rows, GFLOP/s
the products of queries with the keys they see and back. Other work on the machine shows in all of these.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import numpy as np
import torch

from asyncengine.execution.attention.base import LayerSpec, StepView
from asyncengine.execution.attention.cpu import CompiledBackend
from asyncengine.execution.attention.torch_paged import TorchPagedBackend

HEADS, KV_HEADS, DIM, PAGE = 16, 8, 128, 16
CASES = ("1x192", "16x208", "16x1024", "64x208", "1x2048x2048", "1x2048x512", "4x256x256")


def step_of(rows: int, length: int, count: int) -> StepView:
    """Equal rows whose pages lie anywhere."""
    pages = -(-length // PAGE)
    tables = (np.random.default_rng(0).permutation(rows * pages) + 1).reshape(rows, pages).astype(np.int32)
    positions = np.arange(length - count, length)
    slots = tables[:, positions // PAGE].astype(np.int64) * PAGE + positions % PAGE
    starts, counts = np.full(rows, length - count), np.full(rows, count)
    return StepView(starts, counts, np.arange(rows + 1) * count, tables, torch.from_numpy(slots.reshape(-1)))


def filled(backend: Any, layers: int, rows: int, length: int) -> Any:
    """The backend with every page written once, so that no page of memory is touched first while the clock runs."""
    step = step_of(rows, length, length)
    backend.plan(step)
    part = torch.randn(rows * length, KV_HEADS, DIM).bfloat16()
    for layer in range(layers):
        backend.write(layer, part, part)
    return backend


def measure(case: str, layers: int, rounds: int) -> str:
    rows, length, count = (*map(int, case.split("x")), 1)[:3]
    specs = [LayerSpec(layer, HEADS, KV_HEADS, DIM, DIM, DIM**-0.5) for layer in range(layers)]
    pages = rows * -(-length // PAGE) + 1
    backends = {
        "torch": TorchPagedBackend(specs, pages, PAGE, torch.bfloat16, torch.device("cpu")),
        "compiled": CompiledBackend(specs, pages, PAGE, torch.bfloat16),
    }
    step = step_of(rows, length, count)
    query = torch.randn(rows * count, HEADS, DIM).bfloat16()
    times: dict[str, list[float]] = {name: [] for name in backends}
    plans: dict[str, list[float]] = {name: [] for name in backends}
    for backend in backends.values():
        filled(backend, layers, rows, length).plan(step)
        backend.attend(0, query)
    for _ in range(rounds):
        for name, backend in backends.items():
            begin = time.perf_counter()
            backend.plan(step)
            middle = time.perf_counter()
            for layer in range(layers):
                backend.attend(layer, query)
            plans[name].append(middle - begin)
            times[name].append((time.perf_counter() - middle) / layers)
    size = rows * length * KV_HEADS * DIM * 2 * 2
    products = rows * (length * count - count * (count - 1) / 2) * HEADS * DIM * 4
    cells = []
    for name in backends:
        seconds = statistics.median(times[name])
        rate = f"{size / seconds / 1e9:.0f} GB/s" if count == 1 else f"{products / seconds / 1e9:.0f} GFLOP/s"
        cells.append(f"{seconds * 1e3:.3f} ms, {rate} | {statistics.median(plans[name]) * 1e3:.2f} ms")
    return f"| {case} | {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rows", nargs="+", default=CASES)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print("| rows x context | torch | its plan | compiled | its plan |\n|---|---|---|---|---|")
    for case in options.rows:
        print(measure(case, options.layers, options.rounds), flush=True)


if __name__ == "__main__":
    main()
