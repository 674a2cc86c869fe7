"""A model with states beside pages: python -m benchmarks.hybrids --rows 1 16 --prompt 2048

    [--layers 24 --steps 30 --threads 2 --dtype bfloat16 --quantization int8 --recurrence | --first-token]

The shape of Qwen3.5-0.8B (width 1,024, 24 layers of which every fourth attends, the others keep 16 states of 128 x 128)
with random weights. Medians in milliseconds of decoding steps, and the share of the memory's
bandwidth, read between the steps, at which that time reads all weights once, and each row's states once and writes them
once; then of a prompt, and with --recurrence the share of its time that layers spend between their projections.

With --first-token something else: what the prefix cache costs prompts that share nothing, whose snapshots are taken in
vain. Two engines of one process, with it and without, take turns; the time to the first token, alone.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import tempfile
import time
from typing import Any
from unittest.mock import patch

import torch

from asyncengine import AsyncEngine, SamplingParams
from asyncengine.config import EngineConfig
from asyncengine.execution.layers.gated_delta import GatedDelta
from asyncengine.execution.models.loading import load_model
from asyncengine.execution.runner.building import build_runner
from asyncengine.execution.runner.model_runner import ModelRunner
from asyncengine.request_spec import RequestSpec
from asyncengine.step import Batch, Row, StateUse
from benchmarks.execution_vs_transformers import GREEDY
from benchmarks.reading import Buffer

SHAPE = {
    "vocab_size": 248320, "hidden_size": 1024, "intermediate_size": 3584, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 256, "linear_num_key_heads": 16, "linear_num_value_heads": 16,
    "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "tie_word_embeddings": True,
    "max_position_embeddings": 8192,
}  # fmt: skip
CONTEXT, PAGE = 64, 16


def make_runner(options: argparse.Namespace) -> tuple[ModelRunner, Any]:
    from transformers import Qwen3_5TextConfig

    config = EngineConfig(
        dtype=options.dtype, device="cpu", num_threads=options.threads, max_num_seqs=max(options.rows), page_size=PAGE,
        max_model_len=max(CONTEXT + 3 * options.steps, options.prompt) + 8, load_format="dummy", show_progress=False,
        kv_cache_memory="512MiB", quantization=options.quantization, max_num_batched_tokens=max(options.prompt, 64),
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        Qwen3_5TextConfig(**SHAPE, num_hidden_layers=options.layers).save_pretrained(folder)
        loaded = load_model(folder, config)
        return build_runner(loaded, config), loaded.model


class Requests:
    """So many rows of random tokens over one runner."""

    def __init__(self, runner: ModelRunner, rows: int, length: int) -> None:
        self._runner = runner
        generator = random.Random(rows)
        self._specs = [RequestSpec(row, (5,) * length, GREEDY, length + 1, seed=row) for row in range(rows)]
        pages = -(-length // PAGE)
        self._pages = [list(range(1 + pages * row, 1 + pages * (row + 1))) for row in range(rows)]
        self._tokens = [[generator.randrange(SHAPE["vocab_size"]) for _ in range(length)] for _ in range(rows)]
        self._step = self._at = 0

    def advance(self, count: int = 1) -> float:
        """Milliseconds of one step of so many tokens of each row."""
        self._step += 1
        rows = tuple(
            Row(
                spec, place, self._at, count, tokens, False, pages, True,
                state=StateUse(place + 1, place + 1 if self._at else 0),
            )
            for place, (spec, tokens, pages) in enumerate(zip(self._specs, self._tokens, self._pages, strict=True))
        )  # fmt: skip
        began = time.perf_counter()
        self._runner.launch(Batch(self._step, rows)).wait()
        self._at += count
        return 1e3 * (time.perf_counter() - began)


def decode(runner: ModelRunner, model: Any, rows: int, steps: int, buffer: Buffer) -> str:
    requests = Requests(runner, rows, CONTEXT + 2 * steps)
    requests.advance(CONTEXT)
    times, reads = [], []
    for _ in range(steps):
        reads.append(buffer.read())
        requests.advance()  # the first finds its caches full of the buffer
        times.append(requests.advance())
    states = sum(spec.nbytes(model.dtype) for spec in model.states)
    moved = model.nbytes + 2 * rows * states
    took = statistics.median(times)
    share = statistics.median(read * moved / buffer.nbytes / time for read, time in zip(reads, times, strict=True))
    bandwidth = buffer.nbytes / statistics.median(reads) / 1e6
    return (
        f"{rows} rows: {took:.2f} ms, {1e3 * rows / took:.0f} tokens/s; {moved / 2**20:.0f} MiB, of which states "
        f"{2 * rows * states / 2**20:.0f}; at {bandwidth:.1f} GB/s that is {share:.0%} of what memory allows"
    )


def prompt(runner: ModelRunner, model: Any, tokens: int, *, recurrence: bool) -> str:
    spent: list[float] = []
    own = GatedDelta.mix

    def timed(self: GatedDelta, *args: Any) -> torch.Tensor:
        began = time.perf_counter()
        made = own(self, *args)
        spent.append(1e3 * (time.perf_counter() - began))
        return made

    Requests(runner, 1, tokens).advance(tokens)
    with patch.object(GatedDelta, "mix", timed if recurrence else own):
        times = [Requests(runner, 1, tokens).advance(tokens) for _ in range(3)]
    took = statistics.median(times)
    line = f"prompt of {tokens}: {took:.0f} ms, {1e3 * tokens / took:.0f} tokens/s"
    return line + (f"; {sum(spent) / sum(times):.0%} of it between projections of state layers" if spent else "")


async def first_tokens(options: argparse.Namespace) -> None:
    """Print the medians of the times to the first token, and of their ratios turn by turn."""
    from transformers import Qwen3_5TextConfig

    shared: dict[str, Any] = {
        "dtype": options.dtype, "num_threads": options.threads, "load_format": "dummy", "show_progress": False,
        "kv_cache_memory": "512MiB", "quantization": options.quantization, "max_model_len": options.prompt + 64,
        "speculation": "off",
    }  # fmt: skip
    params, generator = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True), random.Random(0)
    times: dict[bool, list[float]] = {True: [], False: []}
    with tempfile.TemporaryDirectory() as folder:
        Qwen3_5TextConfig(**SHAPE, num_hidden_layers=options.layers).save_pretrained(folder)
        async with (
            await AsyncEngine.from_pretrained(folder, prefix_caching=True, **shared) as on,
            await AsyncEngine.from_pretrained(folder, prefix_caching=False, **shared) as off,
        ):
            for turn in range(options.steps + 1):
                tokens = [generator.randrange(SHAPE["vocab_size"]) for _ in range(options.prompt)]
                for cached, engine in ((True, on), (False, off)) if turn % 2 else ((False, off), (True, on)):
                    took = (await engine.generate(tokens, params)).timings.first_token
                    assert took is not None
                    if turn:  # the first touches memory that nobody has touched
                        times[cached].append(1e3 * took)
            states = on.stats().states
    ratios = [with_it / without for with_it, without in zip(times[True], times[False], strict=True)]
    print(
        f"first token of {options.prompt}: {statistics.median(times[True]):.0f} ms with the prefix cache, "
        f"{statistics.median(times[False]):.0f} without; turn by turn {statistics.median(ratios):.3f} "
        f"({min(ratios):.3f} to {max(ratios):.3f}); {states}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--prompt", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--quantization", choices=("int8", "int4"), default=None)
    parser.add_argument("--recurrence", action="store_true", help="share of a prompt between projections")
    parser.add_argument("--first-token", action="store_true", help="what the prefix cache costs who shares nothing")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.first_token:
        asyncio.run(first_tokens(options))
        return
    buffer = Buffer()
    runner, model = make_runner(options)
    print(f"{', '.join(runner.fused)}; {model.nbytes / 2**20:.0f} MiB of weights", flush=True)
    for rows in options.rows:
        print(decode(runner, model, rows, options.steps, buffer), flush=True)
    print(prompt(runner, model, options.prompt, recurrence=options.recurrence), flush=True)
    runner.close()


if __name__ == "__main__":
    main()
