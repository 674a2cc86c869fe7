"""Does the resident set stay flat? Waves of random requests on a real model: lengths, samples, seeds, cancellations.

    python -m benchmarks.soak [--model demo] [--waves 12] [--requests 1000] [--json]
    python -m benchmarks.soak --model demo-embed --embed      the same with texts to embed, a call for each wave

Prints the process's resident set after each wave. The first waves fill caches of bounded size (prefix cache, oneDNN's
kernels); from then on it should not grow.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
from pathlib import Path

from asyncengine import AsyncEngine, SamplingParams

AT_ONCE = 96


def resident_mib() -> float:
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(status.split("VmRSS:")[1].split()[0]) / 1024


async def request(engine: AsyncEngine, rng: random.Random, seed: int) -> None:
    prompt = [rng.randrange(10, engine.info.vocab_size) for _ in range(rng.randrange(5, 200))]
    params = SamplingParams(
        max_tokens=rng.randrange(1, 40),
        ignore_eos=True,
        temperature=1.0,
        seed=seed,
        n=rng.choice((1, 1, 2)),
        logprobs=rng.random() < 0.1,
    )
    task = asyncio.create_task(engine.generate(prompt, params))
    if rng.random() < 0.2:
        await asyncio.sleep(rng.random() * 0.2)
        task.cancel()
    await asyncio.wait({task})


async def embed(engine: AsyncEngine, rng: random.Random, count: int) -> None:
    """Embed so many texts; the vectors are dropped."""
    await engine.embed(
        [" ".join(f"word{rng.randrange(5000)}" for _ in range(rng.randrange(1, 24))) for _ in range(count)]
    )


async def soak(options: argparse.Namespace) -> list[dict[str, float]]:
    rng = random.Random(0)
    places = asyncio.Semaphore(AT_ONCE)
    waves: list[dict[str, float]] = []
    settings = {} if options.embed else {"kv_cache_memory": "64MiB"}
    async with await AsyncEngine.from_pretrained(options.model, max_num_seqs=64, **settings) as engine:

        async def one(seed: int) -> None:
            async with places:
                await request(engine, rng, seed)

        for wave in range(options.waves):
            if options.embed:
                await embed(engine, rng, options.requests)
            else:
                await asyncio.gather(*(one(wave * options.requests + index) for index in range(options.requests)))
            waves.append({"resident_mib": resident_mib(), **engine.stats().finished})
            if not options.json:
                print(f"wave {wave + 1:>3}  {waves[-1]['resident_mib']:.0f} MiB  {engine.stats().finished}", flush=True)
    return waves


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--waves", type=int, default=12)
    parser.add_argument("--requests", type=int, default=1000, help="requests in each wave")
    parser.add_argument("--embed", action="store_true", help="texts to embed, in place of prompts")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    waves = asyncio.run(soak(options))
    if options.json:
        print(json.dumps(waves))


if __name__ == "__main__":
    main()
