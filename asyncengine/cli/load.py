"""The load that `bench` puts on an engine, and what it measures."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from asyncengine.async_engine import AsyncEngine
from asyncengine.sampling_params import SamplingParams
from asyncengine.stats import Summary

PROBE = 0.005
"""Seconds between two readings of the caller's event-loop lag."""


@dataclass(frozen=True, slots=True)
class Load:
    """Closed loop: each of `concurrency` streams sends its next request when the one before has ended."""

    concurrency: int
    rounds: int
    input_len: int
    output_len: int
    adapters: tuple[str | None, ...] = (None,)
    """Stream i uses the one at i modulo their number; None: no adapter."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Times in seconds. `inter_token` is the gap between deliveries divided by the tokens delivered."""

    concurrency: int
    requests: int
    output_tokens: int
    seconds: float
    first_token: Summary
    inter_token: Summary
    loop_lag: Summary
    preemptions: int
    tokens_per_pass: float
    """Tokens of one request in one step: above 1 where guesses came true."""

    @property
    def tokens_per_second(self) -> float:
        return self.output_tokens / self.seconds


@dataclass(slots=True)
class _Samples:
    tokens: int = 0
    first: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    lag: list[float] = field(default_factory=list)


async def measure(engine: AsyncEngine, load: Load, seed: int = 0) -> Measured:
    """Put `load` on `engine` from the running loop. Prompts are random and all different: no prefix is shared."""
    samples = _Samples()
    before = engine.stats()
    params = SamplingParams(max_tokens=load.output_len, temperature=0.0, ignore_eos=True)
    began = time.perf_counter()
    async with _probing(samples.lag), asyncio.TaskGroup() as group:
        for index in range(load.concurrency):
            adapter = load.adapters[index % len(load.adapters)]
            group.create_task(_client(engine, load, adapter, params, random.Random(f"{seed}/{index}"), samples))
    after = engine.stats()
    return Measured(
        load.concurrency,
        load.concurrency * load.rounds,
        samples.tokens,
        time.perf_counter() - began,
        Summary.of(samples.first),
        Summary.of(samples.gaps),
        Summary.of(samples.lag),
        after.preemptions - before.preemptions,
        (after.generated_tokens - before.generated_tokens) / max(1, after.passes - before.passes),
    )


async def _client(
    engine: AsyncEngine,
    load: Load,
    adapter: str | None,
    params: SamplingParams,
    rng: random.Random,
    samples: _Samples,
) -> None:
    for _ in range(load.rounds):
        prompt = [rng.randrange(engine.info.vocab_size) for _ in range(load.input_len)]
        last = time.perf_counter()
        first = True
        async with engine.stream(prompt, params, adapter=adapter) as stream:
            async for chunk in stream:
                now, count = time.perf_counter(), len(chunk.token_ids)
                samples.tokens += count
                if first and count:
                    samples.first.append(now - last)
                    first = False
                elif count:
                    samples.gaps += [(now - last) / count] * count
                last = now


@contextlib.asynccontextmanager
async def _probing(lag: list[float]) -> AsyncIterator[None]:
    """Measure how late the caller's own loop runs its timers while the block runs."""

    async def probe() -> None:
        while True:
            due = time.perf_counter() + PROBE
            await asyncio.sleep(PROBE)
            lag.append(time.perf_counter() - due)

    task = asyncio.create_task(probe())
    try:
        yield
    finally:
        task.cancel()
