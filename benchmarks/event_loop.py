"""Lag of the caller's event loop while a hosted engine serves 64 streams, and the savings of a shared prefix.

    python -m benchmarks.event_loop [--model demo] [--streams 64] [--seconds 20] [--beside 0] [--json]

Loop lag: a task on the caller's loop sleeps 1 ms again and again; what a sleep takes beyond that is the time during
which the loop could not run. Measured idle first (the machine's own noise), then under load, in one run; `--beside`:
beside so many processes that only count.

Shared prefix: 32 requests with a common prefix of 1,024 tokens and 32 tokens of their own, with the prefix cache on
and off, interleaved; the ratio of the medians is what to read, and the number of positions computed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time
from typing import Any

from asyncengine import AsyncEngine, SamplingParams
from benchmarks.neighbours import Neighbours


class LagProbe:
    """Measures how late the running loop wakes a sleeper."""

    def __init__(self) -> None:
        self.late: list[float] = []

    async def run(self) -> None:
        while True:
            began = time.perf_counter()
            await asyncio.sleep(0.001)
            self.late.append(time.perf_counter() - began - 0.001)

    def summary(self) -> dict[str, float]:
        ordered = sorted(self.late)
        at = {f"p{q}": ordered[min(len(ordered) - 1, len(ordered) * q // 100)] * 1e3 for q in (50, 90, 99)}
        return {"samples": len(ordered), **at, "max": ordered[-1] * 1e3}


async def probe(seconds: float, work: Any = None) -> dict[str, float]:
    """Lag of this loop, in ms, while `work` runs (or for `seconds`)."""
    lag = LagProbe()
    task = asyncio.create_task(lag.run())
    await (asyncio.sleep(seconds) if work is None else work)
    task.cancel()
    return lag.summary()


async def stream_all(engine: AsyncEngine, streams: int, seconds: float) -> int:
    """Keep `streams` streams running for `seconds`; tokens received."""
    until = time.perf_counter() + seconds
    vocab = engine.info.vocab_size
    rng = random.Random(1)

    async def one(index: int) -> int:
        count = 0
        while time.perf_counter() < until:
            prompt = [rng.randrange(10, vocab) for _ in range(32 + index % 64)]
            async for chunk in engine.stream(prompt, SamplingParams(max_tokens=128, temperature=0, ignore_eos=True)):
                count += len(chunk.token_ids)
                if time.perf_counter() > until:
                    break
        return count

    return sum(await asyncio.gather(*(one(index) for index in range(streams))))


async def loop_lag(model: str, streams: int, seconds: float) -> dict[str, Any]:
    engine = await AsyncEngine.from_pretrained(model, hosted=True, kv_cache_memory="512MB")
    async with engine:
        await stream_all(engine, 4, 1.0)  # warm
        idle = await probe(seconds / 4)
        load = asyncio.create_task(stream_all(engine, streams, seconds))
        busy = await probe(seconds, load)
        tokens = load.result()
        inner = engine.stats().loop_lag
    return {
        "idle_ms": idle,
        "load_ms": busy,
        "tokens_per_second": tokens / seconds,
        "engine_loop_p99_ms": inner.p99 * 1e3,
    }


async def shared_prefix(model: str, repeat: int) -> dict[str, Any]:
    rng = random.Random(2)
    times: dict[str, list[float]] = {"on": [], "off": []}
    computed: dict[str, int] = {}
    for _ in range(repeat):
        for name, taken in times.items():
            engine = await AsyncEngine.from_pretrained(
                model, hosted=True, kv_cache_memory="512MB", prefix_caching=name == "on"
            )
            async with engine:
                vocab = engine.info.vocab_size
                prefix = [rng.randrange(10, vocab) for _ in range(1024)]
                prompts = [prefix + [rng.randrange(10, vocab) for _ in range(32)] for _ in range(32)]
                began = time.perf_counter()
                await asyncio.gather(
                    *(engine.generate(p, SamplingParams(max_tokens=16, temperature=0)) for p in prompts)
                )
                taken.append(time.perf_counter() - began)
                computed[name] = engine.stats().computed_tokens
    medians = {name: statistics.median(values) for name, values in times.items()}
    return {"seconds": medians, "computed_tokens": computed, "speedup": medians["off"] / medians["on"]}


async def run(args: argparse.Namespace) -> dict[str, Any]:
    with Neighbours(args.beside):
        lag = await loop_lag(args.model, args.streams, args.seconds)
    return {"loop_lag": lag, "shared_prefix": await shared_prefix(args.model, args.repeat)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--beside", type=int, default=0, help="busy processes beside it")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    result = asyncio.run(run(args))
    if args.json:
        print(json.dumps(result))
        return
    lag, shared = result["loop_lag"], result["shared_prefix"]
    print(f"{args.streams} streams on a hosted engine, {lag['tokens_per_second']:.0f} tokens/s")
    for name in ("idle_ms", "load_ms"):
        values = "  ".join(f"{key} {value:.2f}" for key, value in lag[name].items())
        print(f"  caller's loop, {name:8} {values}")
    print(f"  engine's loop, p99 {lag['engine_loop_p99_ms']:.2f} ms")
    print(
        f"32 x (1,024 shared + 32 own): cache on {shared['seconds']['on']:.2f} s, off {shared['seconds']['off']:.2f} s "
        f"({shared['speedup']:.1f}x); positions computed {shared['computed_tokens']}"
    )


if __name__ == "__main__":
    main()
