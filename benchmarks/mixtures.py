"""One decoding step of a mixture of experts: python -m benchmarks.mixtures --form bfloat16 --rows 1 16

    [--form bfloat16 int8 int4 transformers --layers 2 --steps 30 --threads 2]

A model of the shape of Qwen3-30B-A3B (width 2,048, 128 experts of width 768, eight of them for each row) with few
layers and a small vocabulary, random weights, random tokens. Medians in milliseconds; how many experts of a layer a
step uses; and the share of the memory's bandwidth, read between the steps, at which that time reads these experts'
weights and everything else once. "transformers" is the same in bfloat16 through transformers' modules (`fuse=False`).
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from typing import Any
from unittest.mock import patch

import torch

from asyncengine.config import EngineConfig
from asyncengine.execution.layers.experts import Experts
from asyncengine.execution.layers.recorded import RecordedLayers
from asyncengine.execution.models import loading
from asyncengine.execution.models.decoder import Decoder
from asyncengine.execution.models.loading import load_model
from asyncengine.execution.runner.building import build_runner
from asyncengine.execution.runner.model_runner import ModelRunner
from asyncengine.request_spec import RequestSpec
from asyncengine.step import Batch, Row
from benchmarks.execution_vs_transformers import GREEDY
from benchmarks.reading import Buffer

FORMS = ("bfloat16", "int8", "int4", "transformers")
SHAPE = {
    "vocab_size": 8192, "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768,
    "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128,
    "num_experts_per_tok": 8, "norm_topk_prob": True, "max_position_embeddings": 4096,
}  # fmt: skip
CONTEXT, PAGE = 16, 16


def fill_alike(slots: Any, dtype: torch.dtype, device: torch.device) -> None:
    """Random weights, all tensors of one shape alike but for routers and embeddings: drawing them takes minutes."""
    made: dict[tuple[int, ...], torch.Tensor] = {}
    with torch.inference_mode():
        for name, slot in slots.items():
            if "gate.weight" in name or "embed" in name:
                slot.load(torch.randn(slot.shape, dtype=dtype))
            elif slot.initial is not None:
                slot.load(torch.full(slot.shape, slot.initial, dtype=dtype))
            else:
                if slot.shape not in made:
                    made[slot.shape] = torch.randn(slot.shape).mul_(0.02).to(dtype)
                slot.load(made[slot.shape])


def make_runner(form: str, options: argparse.Namespace) -> tuple[ModelRunner, Any]:
    from transformers import Qwen3MoeConfig

    length = CONTEXT + 3 * options.steps + 8
    config = EngineConfig(
        dtype="bfloat16", device="cpu", num_threads=options.threads, max_num_seqs=max(options.rows), page_size=PAGE,
        max_model_len=length, load_format="dummy", show_progress=False, kv_cache_memory="256MiB",
        quantization=form if form.startswith("int") else None, fuse=form != "transformers",
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder, patch.object(loading, "fill_randomly", fill_alike):
        Qwen3MoeConfig(**SHAPE, num_hidden_layers=options.layers).save_pretrained(folder)
        loaded = load_model(folder, config)
        return build_runner(loaded, config), loaded.model


class Requests:
    """So many rows of random tokens over one runner, a token further with each step."""

    def __init__(self, runner: ModelRunner, rows: int, length: int) -> None:
        self._runner = runner
        generator = random.Random(rows)
        self._specs = [RequestSpec(row, (5,) * length, GREEDY, length + 1, seed=row) for row in range(rows)]
        pages = -(-length // PAGE)
        self._pages = [list(range(1 + pages * row, 1 + pages * (row + 1))) for row in range(rows)]
        self._tokens = [[generator.randrange(SHAPE["vocab_size"]) for _ in range(length)] for _ in range(rows)]
        self._step = 0
        self._at = CONTEXT
        for row in range(rows):
            self._run([self._row(row, 0, CONTEXT)])

    def _row(self, row: int, start: int, count: int) -> Row:
        return Row(self._specs[row], row, start, count, self._tokens[row], False, self._pages[row], True)

    def _run(self, rows: list[Row]) -> None:
        self._step += 1
        self._runner.launch(Batch(self._step, tuple(rows))).wait()

    def advance(self) -> float:
        """Milliseconds of one step."""
        began = time.perf_counter()
        self._run([self._row(row, self._at, 1) for row in range(len(self._specs))])
        self._at += 1
        return 1e3 * (time.perf_counter() - began)


def used_experts(requests: Requests) -> float:
    """Experts of a layer that a step uses, on average."""
    counts: list[int] = []
    own = Experts.__call__

    def counted(self: Experts, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        counts.append(len(chosen.unique()))
        return own(self, x, chosen, weights)

    with patch.object(Experts, "__call__", counted), patch.object(RecordedLayers, "__call__", lambda *_: None):
        for _ in range(4):
            requests.advance()
    return statistics.mean(counts)


def measure(form: str, options: argparse.Namespace, buffer: Buffer) -> None:
    runner, model = make_runner(form, options)
    for rows in options.rows:
        requests = Requests(runner, rows, CONTEXT + 3 * options.steps + 8)
        used = used_experts(requests) if isinstance(model, Decoder) else None
        times, reads = [], []
        for _ in range(options.steps):
            reads.append(buffer.read())
            requests.advance()  # the first finds its caches full of the buffer
            times.append(requests.advance())
        took = statistics.median(times)
        line = f"{form}, {rows} rows: {took:.2f} ms, {1e3 * rows / took:.0f} tokens/s"
        if isinstance(model, Decoder) and used is not None:
            experts = sum(mixture.experts.nbytes for layer in model.layers for mixture in layer.mixtures())
            read = model.nbytes - model.embedding.nbytes - experts + experts * used / SHAPE["num_experts"]
            shares = [way * read / buffer.nbytes / time for way, time in zip(reads, times, strict=True)]
            bandwidth = buffer.nbytes / statistics.median(reads) / 1e6
            line += f"; {used:.1f} experts of a layer, {read / 2**20:.0f} MiB; at {bandwidth:.1f} GB/s "
            line += f"that is {statistics.median(shares):.0%} of what reading allows"
        print(line, flush=True)
    runner.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--form", choices=FORMS, nargs="+", default=["bfloat16", "int4"])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    buffer = Buffer()
    for form in options.form:
        measure(form, options, buffer)


if __name__ == "__main__":
    main()
