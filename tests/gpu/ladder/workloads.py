"""Loads to measure under, driven through the public API."""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from asyncengine.async_engine import AsyncEngine
from asyncengine.sampling_params import SamplingParams

from ..engines import GREEDY

_TICK = 0.001
"""Seconds that the probe of the event loop sleeps."""


@dataclass(frozen=True, slots=True)
class Burst:
    """Times of a number of requests that came at once."""

    lengths: list[tuple[int, int]]
    """(prompt, output) tokens each."""
    seconds: float
    steps: int

    @property
    def rate(self) -> float:
        """Output tokens per second."""
        return sum(output for _, output in self.lengths) / self.seconds

    @property
    def prompt_rate(self) -> float:
        """Prompt tokens per second."""
        return sum(prompt for prompt, _ in self.lengths) / self.seconds

    def __str__(self) -> str:
        return f"{self.seconds:.2f} s, {self.steps} steps of {self.seconds / max(self.steps, 1) * 1e3:.2f} ms"


@dataclass(slots=True)
class Latencies:
    """Seconds."""

    first_token: list[float] = field(default_factory=list)
    between: list[float] = field(default_factory=list)
    lag: list[float] = field(default_factory=list)


def random_lengths(count: int, low: int, high: int, seed: int) -> list[tuple[int, int]]:
    """Lengths as nano-vllm's benchmark draws them: prompt and output uniform in [low, high]."""
    generator = random.Random(seed)
    return [(generator.randint(low, high), generator.randint(low, high)) for _ in range(count)]


def random_prompts(lengths: Sequence[tuple[int, int]], vocab: int, seed: int) -> list[list[int]]:
    generator = random.Random(seed + 1)
    return [[generator.randrange(10, vocab) for _ in range(prompt)] for prompt, _ in lengths]


async def burst(
    engine: AsyncEngine, lengths: Sequence[tuple[int, int]], seed: int, params: SamplingParams = GREEDY, *,
    shared: Sequence[int] = (), adapters: Sequence[str | None] = (None,),
) -> Burst:  # fmt: skip
    """All requests at once, until the last has ended. `shared`: tokens that all prompts begin with, beside their own;
    `adapters`: in turns. Raises `RuntimeError` if one got fewer tokens than asked for.
    """
    made = random_prompts(lengths, engine.info.vocab_size, seed)
    asked = [params.replace(max_tokens=output) for _, output in lengths]
    steps = engine.stats().steps
    began = time.perf_counter()
    done = await asyncio.gather(*(
        engine.generate([*shared, *prompt], wanted, adapter=adapters[index % len(adapters)])
        for index, (prompt, wanted) in enumerate(zip(made, asked, strict=True))
    ))  # fmt: skip
    seconds = time.perf_counter() - began
    if [len(completion.token_ids) for completion in done] != [output for _, output in lengths]:
        raise RuntimeError("a request got fewer tokens than it asked for")
    return Burst(list(lengths), seconds, engine.stats().steps - steps)


async def single(
    engine: AsyncEngine, prompt: int, output: int, seed: int, rounds: int = 3, params: SamplingParams = GREEDY
) -> float:
    """Tokens per second of one stream between its first token and its last, by the median of `rounds`."""
    rates = []
    for turn in range(rounds):
        (tokens,) = random_prompts([(prompt, output)], engine.info.vocab_size, seed + turn)
        first = last = 0.0
        before = count = 0
        async for chunk in engine.stream(tokens, params.replace(max_tokens=output)):
            last = time.perf_counter()
            count += len(chunk.token_ids)
            if not first:
                first, before = last, count
        if last <= first:
            raise RuntimeError("one stream gave all its tokens at once")
        rates.append((count - before) / (last - first))
    return statistics.median(rates)


async def poisson(engine: AsyncEngine, rate: float, seconds: float, seed: int) -> Latencies:
    """Requests that arrive at random, `rate` a second on average, whether or not others have ended: 64 to 512 tokens
    in, 64 to 256 out. All prompts are made before, and a late timer delays none but its own request."""
    found = Latencies()
    generator = random.Random(seed)
    (pool,) = random_prompts([(8192, 1)], engine.info.vocab_size, seed)
    probe = asyncio.create_task(_probe_lag(found.lag))
    tasks: list[asyncio.Task[None]] = []
    due = began = time.perf_counter()
    while due < began + seconds:
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        at, length = generator.randrange(8192 - 512), generator.randint(64, 512)
        prompt = pool[at : at + length]
        tasks.append(asyncio.create_task(_stream(engine, prompt, generator.randint(64, 256), found)))
        due += generator.expovariate(rate)
    await asyncio.gather(*tasks)
    probe.cancel()
    return found


async def _stream(engine: AsyncEngine, prompt: list[int], output: int, found: Latencies) -> None:
    last = time.perf_counter()
    waiting = True
    async for chunk in engine.stream(prompt, GREEDY.replace(max_tokens=output)):
        now = time.perf_counter()
        if waiting:
            found.first_token.append(now - last)
            waiting = False
        elif chunk.token_ids:
            found.between.append((now - last) / len(chunk.token_ids))
        last = now


async def _probe_lag(late: list[float]) -> None:
    while True:
        began = time.perf_counter()
        await asyncio.sleep(_TICK)
        late.append(max(0.0, time.perf_counter() - began - _TICK))


def quantile(values: Sequence[float], at: float) -> float | None:
    """None of nothing."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(at * len(ordered)))] if ordered else None
