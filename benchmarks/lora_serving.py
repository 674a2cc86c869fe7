"""Adapters that come and go while streams run: what a hot load takes, what it does to the streams, and memory.

    python -m benchmarks.lora_serving [--shape small --streams 16 --rank 16 --seconds 20 --rounds 3 --churn 200 --json]

Makes a random bfloat16 checkpoint (as `execution_vs_transformers.py` does) and random PEFT adapters on all linears of
its layers in a temporary folder, and drives the public API. Two things are measured:

* hot loads: `--streams` endless streams of the base model run. Stretches in which one adapter after the other is
  loaded, answers one request, and is unloaded take turns with stretches of the same requests to the base model, so
  that the difference is what adapters do. Reported: `load_adapter` until it returns,
  submit of the first request with the adapter until its first token, the same for a request of the base model, and
  the streams' inter-token times in both kinds of stretch.
* churn: the same name is loaded from two folders in turn, unloaded every other time, `--churn` times, while the
  streams run and each content answers. Reported: the process's resident set along the way, which should not grow once
  caches of bounded size are full.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from asyncengine import AsyncEngine
from benchmarks.execution_vs_transformers import GREEDY, SHAPES, make_checkpoint
from benchmarks.soak import resident_mib

LINEARS = {
    "self_attn.q_proj": ("hidden", "queries"), "self_attn.k_proj": ("hidden", "keys"),
    "self_attn.v_proj": ("hidden", "keys"), "self_attn.o_proj": ("queries", "hidden"),
    "mlp.gate_proj": ("hidden", "inner"), "mlp.up_proj": ("hidden", "inner"), "mlp.down_proj": ("inner", "hidden"),
}  # fmt: skip
PAUSE = 0.2
"""Seconds between two hot loads."""
BREATH = 0.02
"""Seconds between two turns of the churn."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-0.6b")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each stretch")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--churn", type=int, default=200)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        make_checkpoint(SHAPES[options.shape], options.dtype, folder)
        adapters = [make_adapter(options, Path(folder) / f"adapter-{seed}", seed) for seed in range(4)]
        report = asyncio.run(measure(options, folder, adapters))
    report["options"] = vars(options)
    print(json.dumps(report) if options.json else table(report))


def make_adapter(options: argparse.Namespace, folder: Path, seed: int) -> Path:
    """A random adapter as peft would save it."""
    shape = SHAPES[options.shape]
    sizes = {
        "hidden": shape["hidden_size"], "inner": shape["intermediate_size"],
        "queries": shape["num_attention_heads"] * shape["head_dim"],
        "keys": shape["num_key_value_heads"] * shape["head_dim"],
    }  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(int(shape["num_hidden_layers"])):
        for name, (inputs, outputs) in LINEARS.items():
            path = f"base_model.model.model.layers.{layer}.{name}"
            a = torch.randn(options.rank, sizes[inputs], generator=generator) * sizes[inputs] ** -0.5
            b = torch.randn(sizes[outputs], options.rank, generator=generator) * 0.02
            tensors[f"{path}.lora_A.weight"] = a.to(torch.bfloat16)
            tensors[f"{path}.lora_B.weight"] = b.to(torch.bfloat16)
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA", "r": options.rank, "lora_alpha": 2 * options.rank, "base_model_name_or_path": "random",
        "target_modules": sorted(name.rpartition(".")[2] for name in LINEARS),
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


class Streams:
    """Endless streams of the base model; `gaps` are the seconds between their tokens."""

    def __init__(self, engine: AsyncEngine, count: int) -> None:
        self.gaps: list[float] = []
        self._engine = engine
        self._tasks = [asyncio.create_task(self._run(index)) for index in range(count)]

    async def _run(self, index: int) -> None:
        length = self._engine.info.max_model_len
        while True:
            prompt = [10 + index] * 16
            last: float | None = None
            async for _ in self._engine.stream(prompt, GREEDY.replace(max_tokens=min(512, length - 16))):
                now = time.perf_counter()
                if last is not None:
                    self.gaps.append(now - last)
                last = now

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


@contextlib.asynccontextmanager
async def serving(options: argparse.Namespace, folder: str) -> AsyncIterator[tuple[AsyncEngine, Streams]]:
    engine = await AsyncEngine.from_pretrained(
        folder, dtype=options.dtype, device="cpu", num_threads=options.threads, max_num_seqs=options.streams + 2,
        max_model_len=1024, max_loras=2, show_progress=False, kv_cache_memory="4GiB", prefix_caching=False,
    )  # fmt: skip
    async with engine:
        streams = Streams(engine, options.streams)
        try:
            await asyncio.sleep(3)
            yield engine, streams
        finally:
            await streams.stop()


async def first_token(engine: AsyncEngine, adapter: str | None) -> float:
    began = time.perf_counter()
    await engine.generate([7] * 16, GREEDY.replace(max_tokens=1), adapter=adapter)
    return time.perf_counter() - began


async def hot_loads(engine: AsyncEngine, seconds: float, folders: list[Path], found: dict[str, list[float]]) -> None:
    """One load and one request after the other for `seconds`. The files stay in the operating system's cache."""
    until = time.perf_counter() + seconds
    turn = 0
    while time.perf_counter() < until:
        began = time.perf_counter()
        await engine.load_adapter("hot", folders[turn % len(folders)])
        found["load"].append(time.perf_counter() - began)
        found["first token, adapter"].append(await first_token(engine, "hot"))
        await engine.unload_adapter("hot")
        await asyncio.sleep(PAUSE)
        turn += 1


async def no_loads(engine: AsyncEngine, seconds: float, found: dict[str, list[float]]) -> None:
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        found["first token, base"].append(await first_token(engine, None))
        await asyncio.sleep(PAUSE)


async def churn(engine: AsyncEngine, options: argparse.Namespace, folders: list[Path]) -> list[float]:
    """Resident MiB along the way."""
    memory = []
    for turn in range(options.churn):
        await engine.load_adapter("churned", folders[turn % 2])
        await asyncio.gather(first_token(engine, "churned"), first_token(engine, "churned"))
        if turn % 2:
            await engine.unload_adapter("churned", wait=True)
        if turn % max(1, options.churn // 10) == 0:
            memory.append(resident_mib())
        await asyncio.sleep(BREATH)
    memory.append(resident_mib())
    return memory


async def measure(options: argparse.Namespace, folder: str, folders: list[Path]) -> dict[str, Any]:
    found: dict[str, list[float]] = {"load": [], "first token, adapter": [], "first token, base": []}
    gaps: dict[str, list[float]] = {"no adapters": [], "loading": []}
    async with serving(options, folder) as (engine, streams):
        await hot_loads(engine, 1, folders, {name: [] for name in found})  # the first one takes the slots' memory
        for turn in range(2 * options.rounds):
            kind = "loading" if turn % 2 else "no adapters"
            streams.gaps = []
            if kind == "no adapters":
                await no_loads(engine, options.seconds, found)
            else:
                await hot_loads(engine, options.seconds, folders, found)
            gaps[kind] += streams.gaps
        memory = await churn(engine, options, folders[2:]) if options.churn else []
        loaded = engine.stats().adapters
    return {
        "milliseconds": {name: summary(values) for name, values in found.items()},
        "inter_token_ms": {name: summary(values) for name, values in gaps.items()},
        "loads": len(found["load"]),
        "resident_mib": memory,
        "adapters_left": loaded,
    }


def summary(seconds: list[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    return {
        "p50": statistics.median(ordered) * 1e3,
        "p99": ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))] * 1e3,
        "max": ordered[-1] * 1e3,
    }


def table(report: dict[str, Any]) -> str:
    lines = [f"{report['loads']} hot loads; milliseconds{'':<12} {'p50':>8} {'p99':>8} {'max':>8}"]
    rows = dict(report["milliseconds"])
    rows |= {f"inter-token, {name}": values for name, values in report["inter_token_ms"].items()}
    for name, row in rows.items():
        lines.append(f"  {name:<34} {row['p50']:>8.1f} {row['p99']:>8.1f} {row['max']:>8.1f}")
    if report["resident_mib"]:
        memory = " ".join(f"{value:.0f}" for value in report["resident_mib"])
        lines.append(f"resident MiB over {report['options']['churn']} replacements: {memory}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
