"""Memory of states while many requests run: python -m benchmarks.state_memory [--budgets 2MiB 8MiB --requests 64]

    [--shared 1500 --own 700 --answer 32 --threads 2 --dtype float32]

A narrow model of the shape of Qwen3.5 (four layers, of which the last attends) with random weights, prefix cache on.
So many requests at once, twice: half of them begin alike, the others with nothing in common. Meanwhile, every twentieth
of a second: slots in use (running, snapshots) times the bytes of one; what the system really keeps in memory of the
pools of states (mincore); the process's resident memory beyond what it had when the engine was ready, less those pools.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import gc
import mmap
import random
import tempfile
import time
from dataclasses import dataclass, field

import torch

from asyncengine import AsyncEngine, SamplingParams
from asyncengine.checks import parse_bytes
from asyncengine.execution.layers.states import StatePools

SHAPE = {
    "vocab_size": 4096, "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 1, "head_dim": 64, "linear_num_key_heads": 2, "linear_num_value_heads": 2,
    "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "tie_word_embeddings": True,
    "max_position_embeddings": 8192,
}  # fmt: skip
_MIB = 2**20
_EVERY = 0.05


def resident() -> int:
    """Bytes of this process."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * mmap.PAGESIZE


def in_memory(pools: StatePools) -> int:
    """Bytes of the pools for which the system has found memory."""
    total, system = 0, ctypes.CDLL(None, use_errno=True)
    for pool in (*pools.recurrent, *pools.windows):
        if pool is None:
            continue
        first = pool.data_ptr() // mmap.PAGESIZE
        pages = -(-(pool.data_ptr() + pool.nbytes) // mmap.PAGESIZE) - first
        there = (ctypes.c_ubyte * pages)()
        if system.mincore(ctypes.c_void_p(first * mmap.PAGESIZE), ctypes.c_size_t(pages * mmap.PAGESIZE), there):
            raise OSError(ctypes.get_errno(), "mincore")
        total += sum(page & 1 for page in there) * mmap.PAGESIZE
    return total


@dataclass
class Peaks:
    """Peaks of what was seen."""

    used: int = 0
    running: int = 0
    pools: int = 0
    beside: int = 0
    samples: list[tuple[float, int]] = field(default_factory=list)

    async def watch(self, engine: AsyncEngine, pools: StatePools, before: int) -> None:
        began, slot = time.perf_counter(), engine.info.state_bytes
        while True:
            counts, kept, now = engine.stats().states, in_memory(pools), resident()
            self.used = max(self.used, (counts.total - counts.free + 1) * slot)
            self.running = max(self.running, counts.working)
            self.pools, self.beside = max(self.pools, kept), max(self.beside, now - before - kept)
            self.samples.append((time.perf_counter() - began, kept))
            await asyncio.sleep(_EVERY)


async def measure(folder: str, budget: str, options: argparse.Namespace) -> None:
    draw = random.Random(7)
    shared = [draw.randrange(SHAPE["vocab_size"]) for _ in range(options.shared)]
    own = [[draw.randrange(SHAPE["vocab_size"]) for _ in range(options.own)] for _ in range(options.requests)]
    others = [[draw.randrange(SHAPE["vocab_size"]) for _ in range(options.shared)] for _ in range(options.requests)]
    prompts = [(shared if number % 2 else others[number]) + own[number] for number in range(options.requests)]
    params = SamplingParams(max_tokens=options.answer, ignore_eos=True)
    async with await AsyncEngine.from_pretrained(
        folder, dtype=options.dtype, device="cpu", num_threads=options.threads, load_format="dummy",
        show_progress=False, max_num_seqs=options.requests, state_memory=budget, kv_cache_memory=options.pages,
    ) as engine:  # fmt: skip
        [pools] = [each for each in gc.get_objects() if type(each) is StatePools]  # proxies are not asked
        await engine.generate([5] * 64, params)
        peaks, before = Peaks(), resident() - in_memory(pools)
        watcher = asyncio.create_task(peaks.watch(engine, pools, before))
        began = time.perf_counter()
        for _ in range(2):
            await asyncio.gather(*(engine.generate(prompt, params) for prompt in prompts))
        took = time.perf_counter() - began
        watcher.cancel()
        counts, allowed = engine.stats().states, int(parse_bytes("state_memory", budget))
        print(
            f"budget {allowed / _MIB:7.1f} MiB ({counts.total} slots of {engine.info.state_bytes / _MIB:.2f} and the "
            f"empty one: {pools.nbytes / _MIB:.1f}): at most {peaks.used / _MIB:.1f} in use, {peaks.running} of them "
            f"running; {peaks.pools / _MIB:.1f} in memory; beside them {peaks.beside / _MIB:.1f}; hits {counts.hits}, "
            f"evictions {counts.evictions}, {engine.stats().hit_rate:.0%} of prompt tokens; {took:.0f} s, "
            f"{len(peaks.samples)} samples"
        )
        assert max(peaks.used, peaks.pools, pools.nbytes) <= allowed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--budgets", nargs="+", default=["2MiB", "8MiB", "32MiB"])
    for name, default in (("requests", 64), ("shared", 1500), ("own", 700), ("answer", 32), ("threads", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--pages", default="256MiB", help="bytes of the KV cache")
    parser.add_argument("--dtype", default="float32")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    from transformers import Qwen3_5TextConfig

    with tempfile.TemporaryDirectory() as folder:
        Qwen3_5TextConfig(**SHAPE).save_pretrained(folder)
        for budget in options.budgets:
            asyncio.run(measure(folder, budget, options))


if __name__ == "__main__":
    main()
