"""Memory that an engine gives back while it sleeps, how long that and waking take, and whether cycles leak.

    python -m benchmarks.sleeping [--layers 10 --kinds bf16 float32 int8 --cycles 200 --tied]

A random checkpoint of Qwen3-0.6B's shape with fewer layers and words (0.34 GB), each kind in a process of its own.
"in use": resident memory after requests that fill the KV cache to a large part; "given back": how much of what weights
and the written part of the cache take is gone while it sleeps; "bare": resident memory of the same process with a model
of one narrow layer, asleep after the same requests, which never held weights to speak of: the program, its compiled
kernels and what requests leave behind; "left": what an engine asleep holds beyond that, as a share of weights and
cache; "answers": whether those after waking equal those before to the bit. `--cycles`: further ones, of a request,
sleep and wake; "growth" is of resident memory asleep, from the tenth to the last. `--folder`: a checkpoint that is
there already.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.execution_vs_transformers import SHAPES
from benchmarks.loading import write

KINDS: dict[str, dict[str, Any]] = {
    "bf16": {}, "float32": {"dtype": "float32"}, "int8": {"quantization": "int8"}, "int4": {"quantization": "int4"},
}  # fmt: skip
BARE = {"num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 64, "vocab_size": 16384}
"""Changes of the shape that leave next to nothing of it: 2 MB in bfloat16."""
_PROMPTS, _LENGTH = 6, 300


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=10)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=["bf16", "float32", "int8"])
    parser.add_argument("--cycles", type=int, default=0)
    parser.add_argument("--tied", action="store_true", help="output layer and embedding are one matrix")
    parser.add_argument("--folder")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one is not None:
        print(json.dumps(asyncio.run(measure(options.folder, options.one, options.cycles))))
        return
    with tempfile.TemporaryDirectory() as scratch, tempfile.TemporaryDirectory() as bare:
        folder = Path(options.folder or scratch)
        if options.folder is None:
            changed = {"num_hidden_layers": options.layers, "vocab_size": 16384, "tie_word_embeddings": options.tied}
            write(folder, SHAPES["qwen3-0.6b"] | changed)
        write(Path(bare), SHAPES["qwen3-0.6b"] | BARE | {"tie_word_embeddings": options.tied})
        for kind in options.kinds:
            none = alone(bare, kind, 0)
            found = alone(str(folder), kind, options.cycles)
            found["bare"] = none["asleep"]
            found["left"] = round((found["asleep"] - none["asleep"]) / (found["weights"] + found["cache"]), 3)
            print(kind, json.dumps(found), flush=True)


def alone(folder: str, kind: str, cycles: int) -> dict[str, Any]:
    """`measure` in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.sleeping", "--folder", folder, "--one", kind, "--cycles", str(cycles)]
    found: dict[str, Any] = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    return found


def resident() -> int:
    """Bytes of this process that are in memory."""
    with open("/proc/self/statm", encoding="ascii") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def measure(folder: str, kind: str, cycles: int) -> dict[str, Any]:
    """The figures of one kind, in MiB, seconds and shares."""
    from asyncengine import AsyncEngine, SamplingParams

    params = SamplingParams(max_tokens=8, temperature=0.7, seed=1, logprobs=True, ignore_eos=True)
    settings = {"kv_cache_memory": "200MB", "show_progress": False, **KINDS[kind]}
    async with await AsyncEngine.from_pretrained(folder, **settings) as engine:

        async def answers(count: int) -> list[Any]:
            prompts = [
                [1 + (i * 7919 + j * 31) % (engine.info.vocab_size - 1) for j in range(_LENGTH)] for i in range(count)
            ]
            done = await asyncio.gather(*(engine.generate(prompt, params) for prompt in prompts))
            return [(each.token_ids, each.logprobs) for each in done]

        before = await answers(_PROMPTS)
        pages, used = engine.stats().pages, resident()
        cache = engine.info.kv_cache_bytes * (pages.total - pages.free) // pages.total
        took, began = [], time.perf_counter()
        await engine.sleep()
        took.append(time.perf_counter() - began)
        asleep, began = resident(), time.perf_counter()
        await engine.wake()
        took.append(time.perf_counter() - began)
        equal = await answers(_PROMPTS) == before
        sizes = []
        for _ in range(cycles):
            await engine.sleep()
            sizes.append(resident())
            await engine.wake()
            await answers(1)
        found = {
            "weights": engine.info.weight_bytes >> 20, "cache": cache >> 20, "in use": used >> 20,
            "asleep": asleep >> 20, "given back": round((used - asleep) / (engine.info.weight_bytes + cache), 3),
            "sleep": round(took[0], 3), "wake": round(took[1], 3), "answers": equal,
        }  # fmt: skip
        if len(sizes) > 10:
            found["growth"] = (sizes[-1] - statistics.median(sizes[9:12])) / 2**20
        return found


if __name__ == "__main__":
    main()
