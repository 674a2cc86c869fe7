"""Steps over long contexts, with keys and values in the model's type and in 8 bits.

    python -m benchmarks.long_contexts [--shape smollm2-135m --kept auto int8 --rows 1 --depths 0 2000 8000 16000 32000]

Random weights, a model runner driven by hand. For each depth: a decode step of `--rows` rows that have so many tokens
before them, and a step that computes `--chunk` tokens of one row's prompt there; forms take turns, medians of
`--turns`. Keys and values before the step are written to the pages by the backend itself, random ones. "GB/s" are the
bytes of weights, keys and values that a decode step reads, by its seconds. Seconds are of the wall clock; with --cpu
those of the processor, all threads together, for machines that others use.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable

import numpy as np
import torch
from transformers import AutoConfig

from asyncengine.config import EngineConfig
from asyncengine.execution.attention.base import StepView, page_bytes
from asyncengine.execution.attention.factory import kv_dtype
from asyncengine.execution.models.loading import load_model
from asyncengine.execution.runner.building import build_runner
from asyncengine.execution.runner.model_runner import ModelRunner
from asyncengine.request_spec import RequestSpec
from asyncengine.step import Batch, Row
from benchmarks.random_model import GREEDY, SHAPES

PAGE = 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(SHAPES), default="smollm2-135m")
    parser.add_argument("--kept", nargs="+", default=["auto", "int8"], help="kv_cache_dtype of each form")
    parser.add_argument("--rows", type=int, default=1, help="rows of the decode steps")
    parser.add_argument("--depths", type=int, nargs="+", default=[0, 2000, 8000, 16000, 32000])
    parser.add_argument("--chunk", type=int, default=512, help="tokens of a prompt that a step computes; 0: none")
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cpu", action="store_true", help="seconds of the processor")
    options = parser.parse_args()
    clock = time.process_time if options.cpu else time.perf_counter
    forms = {kept: Form(options, kept) for kept in options.kept}
    print(f"{options.shape}, {options.rows} rows, {options.threads} threads")
    print("depth   " + "".join(f"{kept + ': decode tok/s':>22}{'GB/s':>8}{'prompt tok/s':>14}" for kept in forms))
    for depth in options.depths:
        columns = []
        for kind in ("decode", "prompt") if options.chunk else ("decode",):
            steps = {kept: form.step(kind, depth) for kept, form in forms.items()}
            found = in_turns(steps, options.turns, clock)
            columns.append({kept: statistics.median(found[kept]) for kept in forms})
        line = f"{depth:<8}"
        for kept, form in forms.items():
            read = form.runner.weights_bytes + form.bytes_of_token * (depth + 1) * options.rows
            decode, *prompt = (column[kept] for column in columns)
            line += f"{options.rows / decode:>22.2f}{read / decode / 1e9:>8.1f}"
            line += "".join(f"{options.chunk / each:>14.1f}" for each in prompt)
        print(line, flush=True)


def in_turns(steps: dict[str, Callable[[], None]], turns: int, clock: Callable[[], float]) -> dict[str, list[float]]:
    """Seconds of each step, by form; the first turn is not counted."""
    found: dict[str, list[float]] = {kept: [] for kept in steps}
    for turn in range(turns + 1):
        for kept, step in steps.items():
            began = clock()
            step()
            if turn:
                found[kept].append(clock() - began)
    return found


class Form:
    """A runner with keys and values of one type."""

    def __init__(self, options: argparse.Namespace, kept: str) -> None:
        self._rows, self._chunk = options.rows, options.chunk
        length = max(options.depths) + options.chunk + PAGE
        self._pages = -(-length // PAGE)
        config = EngineConfig(
            dtype="bfloat16", device="cpu", num_threads=options.threads, max_num_seqs=options.rows, page_size=PAGE,
            max_model_len=length, load_format="dummy", show_progress=False, kv_cache_dtype=kept, speculation="off",
            max_num_batched_tokens=max(options.chunk, options.rows),
        )  # fmt: skip
        with tempfile.TemporaryDirectory() as folder:
            AutoConfig.for_model(**{"model_type": "qwen3", **SHAPES[options.shape]}).save_pretrained(folder)
            model = load_model(folder, config)
        memory = (options.rows * self._pages + 1) * page_bytes(
            model.layers, PAGE, kv_dtype(config.kv_cache_dtype, model.dtype)
        )
        self.runner: ModelRunner = build_runner(model, config.replace(kv_cache_memory=memory)).runner
        self.bytes_of_token = self.runner.kv_bytes / self.runner.num_pages / PAGE
        self._layers = model.layers
        self._fill(max(options.depths))

    def _fill(self, depth: int) -> None:
        """Random keys and values for `depth` tokens of each row."""
        backend, draw = self.runner.backend, torch.Generator().manual_seed(1)
        for row in range(self._rows if depth else 0):
            table = np.arange(1 + row * self._pages, 1 + (row + 1) * self._pages, dtype=np.int32)[None]
            slots = torch.arange(depth) + int(table[0, 0]) * PAGE
            begin, count = np.zeros(1, dtype=np.int64), np.array([depth])
            backend.plan(StepView(begin, count, np.array([0, depth]), table, slots))
            for spec in self._layers:
                key, value = (
                    torch.randn(depth, spec.num_kv_heads, dim, generator=draw).bfloat16()
                    for dim in (spec.key_dim, spec.value_dim)
                )
                backend.write(spec.index, key, value)

    def step(self, kind: str, depth: int) -> Callable[[], None]:
        """A step at this depth: one token of each row, or a chunk of the first one's prompt."""
        count = 1 if kind == "decode" else self._chunk
        spec = RequestSpec(1, (0,) * (depth + count), GREEDY, depth + count + 1)
        rows = []
        for place in range(self._rows if kind == "decode" else 1):
            pages = list(range(1 + place * self._pages, 1 + (place + 1) * self._pages))
            rows.append(Row(spec, place, depth, count, [5] * (depth + count), False, pages, True))

        def run() -> None:
            result = self.runner.launch(Batch(0, tuple(rows))).wait()
            if result.errors:
                raise RuntimeError(str(result.errors))

        return run


if __name__ == "__main__":
    main()
