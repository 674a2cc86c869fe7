"""Speed that an engine keeps on a busy machine: python -m benchmarks.company

    [--shape qwen3-0.6b --beside 1 2 4 --python 1 --rows 1 16 --rounds 5 --tokens 24 --threads 2 --json]

One engine in one process. In each round the idle machine and each kind of company take turns: processes that only
count, then threads of this very program that do. For each: tokens a second, the share of the idle rate of the same
round, and processor seconds per token over those of the idle machine, of the engine's process (not for the program's
own threads, which it contains). Last, torch is used on the main thread once, and the idle rate measured again, in
rounds with the same before it. Medians.

`--shape demo` runs the bundled model; others have random weights in bfloat16.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from typing import Any

import torch

from asyncengine import AsyncEngine, SamplingParams
from benchmarks.neighbours import Neighbours
from benchmarks.random_model import SHAPES

PROMPT = 32


async def open_engine(options: argparse.Namespace, folder: str) -> AsyncEngine:
    if options.shape == "demo":
        return await AsyncEngine.from_pretrained("demo", hosted=True, show_progress=False, num_threads=options.threads)
    from transformers import Qwen3Config

    Qwen3Config(**SHAPES[options.shape]).save_pretrained(folder)
    return await AsyncEngine.from_pretrained(
        folder, hosted=True, show_progress=False, num_threads=options.threads, dtype="bfloat16", load_format="dummy",
        kv_cache_memory="1GiB", max_model_len=1024,
    )  # fmt: skip


class Meter:
    """Tokens a second, and processor seconds a token, of one engine."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._made = 0

    async def measure(self, rows: int, tokens: int) -> tuple[float, float]:
        """Rates of `rows` requests at once, from when all have a token to when the first has all."""
        first, last = [0.0] * rows, [0.0] * rows
        params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)

        async def one(place: int) -> None:
            self._made += 1
            prompt = [(self._made * 37 + index * 11) % 900 + 50 for index in range(PROMPT)]
            async for chunk in self._engine.stream(prompt, params):
                if chunk.token_ids:
                    first[place] = first[place] or time.perf_counter()
                    last[place] = time.perf_counter()

        cpu = time.process_time()
        await asyncio.gather(*(one(place) for place in range(rows)))
        cpu = time.process_time() - cpu
        return rows * (tokens - 1) / (min(last) - max(first)), cpu / (rows * tokens)


async def compare(meter: Meter, options: argparse.Namespace) -> dict[str, dict[str, list[float]]]:
    kinds = {"idle": Neighbours(0)}
    kinds |= {f"beside {count}": Neighbours(count) for count in options.beside}
    kinds |= {f"own threads {count}": Neighbours(0, count) for count in options.python}
    found: dict[str, dict[str, list[float]]] = {}
    for _ in range(options.rounds):
        for rows in options.rows:
            idle = (0.0, 0.0)
            for name, neighbours in kinds.items():
                with neighbours:
                    rate, cpu = await meter.measure(rows, options.tokens)
                idle = (rate, cpu) if name == "idle" else idle
                cells = found.setdefault(f"{name}, {rows} at once", {"rate": [], "share": [], "cpu": []})
                for key, value in (("rate", rate), ("share", rate / idle[0]), ("cpu", cpu / idle[1])):
                    cells[key].append(value)
    return found


async def after_torch(meter: Meter, options: argparse.Namespace) -> dict[str, dict[str, list[float]]]:
    """Rounds before and after torch's operators have made a team of threads of their own on this thread."""
    found: dict[str, dict[str, list[float]]] = {}
    for when in ("before torch is used here", "after"):
        if when == "after":
            torch.set_num_threads(max(2, torch.get_num_threads()))
            for _ in range(3):
                torch.randn(512, 512) @ torch.randn(512, 512)
        for rows in options.rows:
            rates = [(await meter.measure(rows, options.tokens))[0] for _ in range(options.rounds)]
            found[f"{when}, {rows} at once"] = {"rate": rates}
    return found


async def run(options: argparse.Namespace) -> dict[str, dict[str, list[float]]]:
    with tempfile.TemporaryDirectory() as folder:
        async with await open_engine(options, folder) as engine:
            meter = Meter(engine)
            for rows in options.rows:
                await meter.measure(rows, 4)
            return await compare(meter, options) | await after_torch(meter, options)


def show(found: dict[str, dict[str, list[float]]]) -> None:
    for name, cells in found.items():
        middle: dict[str, Any] = {key: statistics.median(values) for key, values in cells.items()}
        kept = f", {middle['share']:.2f} of idle, {middle['cpu']:.2f} times its CPU time" if "share" in middle else ""
        least, most = min(cells["rate"]), max(cells["rate"])
        print(f"{name:40} {middle['rate']:7.1f} tokens/s ({least:.1f} to {most:.1f}){kept}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=("demo", *SHAPES), default="qwen3-0.6b")
    parser.add_argument("--beside", type=int, nargs="*", default=[1, 2, 4])
    parser.add_argument("--python", type=int, nargs="*", default=[1], help="busy threads of this program")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found = asyncio.run(run(options))
    if options.json:
        print(json.dumps(found))
    else:
        show(found)


if __name__ == "__main__":
    main()
