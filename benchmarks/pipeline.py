"""Throughput of a model whose layers are in two processes, against one process of one thread and of two.

    python -m benchmarks.pipeline [--streams 16] [--prompt 256] [--tokens 64] [--rounds 5] [--layers 8]
        [--dtype bfloat16] [--quantization int8] [--budget 512]

Random weights in a Llama of width 1,024. The three engines answer the same requests in turns, so that whatever else
runs on the machine meets all of them. Medians of the rounds: wall time, CPU seconds of all processes, and of the
busiest one, which is what a round takes at best where each process has a core for itself.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from asyncengine import AsyncEngine, SamplingParams
from asyncengine.demo import MODEL_PATH

FORMS: dict[str, dict[str, int]] = {
    "one thread": {"num_threads": 1},
    "two threads": {"num_threads": 2},
    "two stages": {"num_threads": 2, "pipeline_parallel": 2},
}


def make_model(folder: Path, layers: int) -> None:
    """The demo model's tokenizer, and the configuration of a larger model."""
    shutil.copytree(MODEL_PATH, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": layers, "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 64,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))


def cpu_seconds() -> list[float]:
    """CPU seconds of this process and of each that it has started."""
    own = psutil.Process()
    return [sum(each.cpu_times()[:2]) for each in (own, *own.children())]


async def answer(engine: AsyncEngine, given: argparse.Namespace, number: int) -> tuple[list[float], list[Any]]:
    """([wall seconds, CPU seconds, those of the busiest process], tokens) of one round; prompts differ from round to
    round."""
    params = SamplingParams(max_tokens=given.tokens, temperature=0, ignore_eos=True)
    prompts = [
        [(7 * place + 131 * stream + 977 * number) % 2000 + 10 for place in range(given.prompt)]
        for stream in range(given.streams)
    ]
    began, before = time.perf_counter(), cpu_seconds()
    made = await asyncio.gather(*(engine.generate(prompt, params) for prompt in prompts))
    took = time.perf_counter() - began
    busy = [after - earlier for after, earlier in zip(cpu_seconds(), before, strict=True)]
    return [took, sum(busy), max(busy)], [each.token_ids for each in made]


async def measure(given: argparse.Namespace, folder: Path) -> None:
    settings = {
        "load_format": "dummy", "dtype": given.dtype, "quantization": given.quantization, "kv_cache_memory": 2**28,
        "speculation": "off", "show_progress": False, "max_num_batched_tokens": given.budget, "prefix_caching": False,
    }  # fmt: skip
    found: dict[str, list[list[float]]] = {name: [] for name in FORMS}
    engines = {name: await AsyncEngine.from_pretrained(str(folder), **settings, **form) for name, form in FORMS.items()}
    for number in range(given.rounds + 1):
        tokens = []
        for name, engine in engines.items():
            took, made = await answer(engine, given, number)
            tokens.append(made)
            if number:  # the first records steps, and compiles
                found[name].append(took)
        assert tokens[0] == tokens[1] == tokens[2]
    count = given.streams * given.tokens
    for name, rounds in found.items():
        wall, busy, most = (statistics.median(each) for each in zip(*rounds, strict=True))
        share = statistics.median(a[0] / b[0] for a, b in zip(found["one thread"], rounds, strict=True))
        told = f"{count / wall:7.1f} tokens/s, {share:.2f} of one thread; CPU s: {busy:.2f}, of the busiest {most:.2f}"
        print(f"{name:12} {told}", flush=True)
    for engine in engines.values():
        await engine.aclose()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    counts = {"streams": 16, "prompt": 256, "tokens": 64, "rounds": 5, "layers": 8, "budget": 512}
    for name, default in counts.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--quantization", choices=("int8", "int4"))
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder), given.layers)
        asyncio.run(measure(given, Path(folder)))


if __name__ == "__main__":
    main()
