"""One decoding step in several forms, taking turns: python -m benchmarks.decode_forms --rows 1 4 16

    [--forms panels layer-by-layer torch int8 int4 --steps 30 --threads 2]

Random weights of the Qwen3-0.6B shape, bfloat16, a model runner for each form in one process, 64 tokens of context at
first. "panels" is what an engine runs, "layer-by-layer" the same with a call for each kernel, "torch" with torch's
products as well; "Q4_K_M", "Q8_0" and others of `quantized_products.STORED` as files have them. Medians in
milliseconds; in brackets the median of the first form's time over this one's, turn by turn. With them the memory's
bandwidth, read between the turns, and the share of it that the first form reaches with its weights.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from unittest.mock import patch

import torch

from asyncengine.config import EngineConfig
from asyncengine.execution.layers.slots import TensorSlot
from asyncengine.execution.layers.stored import StoredForm
from asyncengine.execution.models import loading
from asyncengine.execution.models.decoder import Decoder
from asyncengine.execution.models.loading import load_model
from asyncengine.execution.runner.building import build_runner
from asyncengine.execution.runner.model_runner import ModelRunner
from asyncengine.kernels.cpu import packed
from asyncengine.request_spec import RequestSpec
from asyncengine.step import Batch, Row
from benchmarks.execution_vs_transformers import GREEDY, SHAPES
from benchmarks.quantized_products import STORED, RandomMatrix
from benchmarks.reading import Buffer

FORMS = ("panels", "layer-by-layer", "torch", "int8", "int4", "Q4_K_M", *STORED)
CONTEXT, PAGE = 64, 16


class StoredForms(Mapping[str, StoredForm]):
    """Form of each matrix of a model. "Q4_K_M": half of the values and down projections in Q6_K, as llama.cpp."""

    def __init__(self, name: str, layers: int = 28) -> None:
        self._name, self._layers = name, layers

    def __getitem__(self, path: str) -> StoredForm:
        name = self._name
        if name == "Q4_K_M":
            layer = int(path.split(".")[2]) if "layers" in path else 0
            more = layer < self._layers // 8 or layer >= 7 * self._layers // 8 or layer % 3 == 2
            name = "Q6_K" if "embed" in path or (more and ("v_proj" in path or "down" in path)) else "Q4_K"
        return StoredForm(name, STORED[name])

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 1

    def fill(self, slots: Mapping[str, TensorSlot], dtype: torch.dtype, device: torch.device) -> None:
        """In the place of `models.weights.fill_randomly`."""
        for name, slot in slots.items():
            if len(slot.shape) == 2:
                slot.load(RandomMatrix(self[name.removesuffix(".weight")].name, *slot.shape))
            else:
                slot.load(torch.ones(slot.shape, dtype=dtype, device=device))


def make_runner(form: str, folder: str, options: argparse.Namespace) -> ModelRunner:
    config = EngineConfig(
        dtype="bfloat16", device="cpu", num_threads=options.threads, max_num_seqs=max(options.rows), page_size=PAGE,
        max_model_len=CONTEXT + 4 * options.steps, load_format="dummy", show_progress=False,
        kv_cache_memory=f"{2 * max(options.rows) * (CONTEXT + 4 * options.steps) // 8}MiB",
        quantization=form if form.startswith("int") else None,
    )  # fmt: skip
    with ExitStack() as changed:
        if form == "Q4_K_M" or form in STORED:
            stored = StoredForms(form)
            changed.enter_context(patch.object(loading, "LayerOptions", partial(loading.LayerOptions, forms=stored)))
            changed.enter_context(patch.object(loading, "fill_randomly", stored.fill))
        if form == "torch":
            changed.enter_context(patch.object(packed, "packing_pays", lambda *_: False))
        loaded = load_model(folder, config)
        if form in ("layer-by-layer", "torch") and isinstance(loaded.model, Decoder):
            loaded.model.recorded = None
        return build_runner(loaded, config)


class Requests:
    """So many rows over one runner, a token further with each step."""

    def __init__(self, runner: ModelRunner, rows: int, length: int) -> None:
        self._runner = runner
        self._specs = [RequestSpec(row, (5,) * length, GREEDY, length + 1, seed=row) for row in range(rows)]
        pages = -(-length // PAGE)
        self._pages = [list(range(1 + pages * row, 1 + pages * (row + 1))) for row in range(rows)]
        self._tokens = [5] * length
        self._step = self._at = 0
        for row in range(rows):
            self._run([self._row(row, 0, CONTEXT)])
        self._at = CONTEXT

    def _row(self, row: int, start: int, count: int) -> Row:
        return Row(self._specs[row], row, start, count, self._tokens, False, self._pages[row], True)

    def _run(self, rows: list[Row]) -> None:
        self._step += 1
        self._runner.launch(Batch(self._step, tuple(rows))).wait()

    def advance(self) -> float:
        """Milliseconds of the second of two steps: the first finds its caches full of another runner's memory."""
        for _ in range(2):
            began = time.perf_counter()
            self._run([self._row(row, self._at, 1) for row in range(len(self._specs))])
            self._at += 1
        return 1e3 * (time.perf_counter() - began)


def compare(runners: dict[str, ModelRunner], rows: int, options: argparse.Namespace, buffer: Buffer) -> None:
    requests = {form: Requests(runner, rows, CONTEXT + 4 * options.steps) for form, runner in runners.items()}
    times: dict[str, list[float]] = {form: [] for form in runners}
    reads: list[float] = []
    for _ in range(options.steps):
        reads.append(buffer.read())
        for form, asked in requests.items():
            times[form].append(asked.advance())
    first, *others = times
    cells = [f"{first} {statistics.median(times[first]):.2f}"]
    for form in others:
        ratio = statistics.median(left / right for left, right in zip(times[first], times[form], strict=True))
        cells.append(f"{form} {statistics.median(times[form]):.2f} ({ratio:.2f})")
    least = [read * runners[first].weights_bytes / buffer.nbytes for read in reads]
    share = statistics.median(need / took for need, took in zip(least, times[first], strict=True))
    bandwidth = buffer.nbytes / statistics.median(reads) / 1e6
    print(f"{rows} rows: {', '.join(cells)}; read {bandwidth:.1f} GB/s, {first} reaches {share:.0%}", flush=True)


def main() -> None:
    from transformers import Qwen3Config

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--forms", choices=FORMS, nargs="+", default=list(FORMS[:5]))
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    buffer = Buffer()
    with tempfile.TemporaryDirectory() as folder:
        Qwen3Config(**SHAPES["qwen3-0.6b"]).save_pretrained(folder)
        runners = {form: make_runner(form, folder, options) for form in options.forms}
    for rows in options.rows:
        compare(runners, rows, options, buffer)


if __name__ == "__main__":
    main()
