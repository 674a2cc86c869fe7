"""Slowdown of eight streams of a chat by documents that are embedded beside them: python -m benchmarks.group

    [--streams 8 --documents 10000 --seconds 30 --rounds 3 --shape bge-base]

A model of Qwen3-0.6B's shape in bfloat16 and an embedder, both with random weights, in one `EngineGroup`. Turns are
taken: the streams alone, then with an `embed` call of all documents beside them. The time between two tokens of a
stream, its median and 99th percentile, and both as multiples of those alone; and how many documents were embedded.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import tempfile
import time
from pathlib import Path

from asyncengine import AsyncEngine, EngineGroup, SamplingParams

CHAT = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 1024,
    "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8,
    "head_dim": 128, "max_position_embeddings": 4096, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
}  # fmt: skip
SHAPES = {"minilm": (384, 6, 1536, 12), "bge-base": (768, 12, 3072, 12)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--documents", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--shape", choices=SHAPES, default="minilm")
    options = parser.parse_args()
    asyncio.run(compare(options))


async def compare(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        models = {
            "chat": {"model": folder_of(Path(folder) / "chat", CHAT), "dtype": "bfloat16"},
            "embed": {"model": folder_of(Path(folder) / "embed", encoder(options.shape)), "dtype": "float32"},
        }
        settings = {"load_format": "dummy", "max_model_len": 4096, "kv_cache_memory": "1GiB", "show_progress": False}
        settings["max_num_seqs"] = 64
        models["embed"]["max_model_len"] = 512
        async with await EngineGroup.from_pretrained(models, **settings) as group:
            await streams(group["chat"], options.streams, 2.0)
            for _ in range(options.rounds):
                alone = await streams(group["chat"], options.streams, options.seconds)
                embedding = asyncio.create_task(group.embed(documents(options.documents)))
                await asyncio.sleep(0.5)
                before = group["embed"].stats()
                beside = await streams(group["chat"], options.streams, options.seconds)
                after = group["embed"].stats()
                embedding.cancel()
                await asyncio.wait([embedding])
                print(json.dumps(row(alone, beside, after.computed_tokens - before.computed_tokens)), flush=True)


def folder_of(path: Path, config: dict[str, object]) -> str:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    return str(path)


def encoder(shape: str) -> dict[str, object]:
    width, layers, inner, heads = SHAPES[shape]
    return {
        "architectures": ["BertModel"], "model_type": "bert", "vocab_size": 30522, "hidden_size": width,
        "num_hidden_layers": layers, "intermediate_size": inner, "num_attention_heads": heads,
        "max_position_embeddings": 512, "type_vocab_size": 2, "hidden_act": "gelu", "torch_dtype": "float32",
    }  # fmt: skip


def documents(count: int) -> list[list[int]]:
    rng = random.Random(1)
    return [[rng.randrange(1000, 30000) for _ in range(rng.randrange(8, 510))] for _ in range(count)]


async def streams(engine: AsyncEngine, count: int, seconds: float) -> list[float]:
    """Milliseconds between two tokens, of all streams."""
    until, gaps = time.perf_counter() + seconds, []

    async def one(seed: int) -> None:
        rng = random.Random(seed)
        while time.perf_counter() < until:
            prompt = [rng.randrange(1000, 100_000) for _ in range(64)]
            last = None
            params = SamplingParams(max_tokens=256, ignore_eos=True, temperature=1.0, seed=seed)
            async with engine.stream(prompt, params, speculation=False) as stream:
                async for _ in stream:
                    now = time.perf_counter()
                    if last is not None:
                        gaps.append(1e3 * (now - last))
                    last = now
                    if now > until:
                        break

    await asyncio.gather(*(one(seed) for seed in range(count)))
    return gaps


def row(alone: list[float], beside: list[float], tokens: int) -> dict[str, float]:
    (median, tail), (median_beside, tail_beside) = quantiles(alone), quantiles(beside)
    return {
        "alone_median_ms": round(median, 1), "alone_p99_ms": round(tail, 1),
        "median_times": round(median_beside / median, 2), "p99_times": round(tail_beside / tail, 2),
        "embedded_tokens": tokens,
    }  # fmt: skip


def quantiles(values: list[float]) -> tuple[float, float]:
    return statistics.median(values), statistics.quantiles(values, n=100)[98]


if __name__ == "__main__":
    main()
