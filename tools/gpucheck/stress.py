"""A thousand requests that come, are left and are preempted at random: afterwards nothing may be left over or lost."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from asyncengine.async_engine import AsyncEngine
from asyncengine.sampling_params import SamplingParams
from asyncengine.testing.leaks import assert_nothing_held
from tools.gpucheck.compare import Ask, compare
from tools.gpucheck.families import VOCAB, families, make_checkpoint
from tools.gpucheck.greedy import GREEDY, generating, prompts, small_engine
from tools.gpucheck.reference import Reference
from tools.gpucheck.report import CheckFailed
from tools.gpucheck.session import Session, Settings

AT_ONCE = 96
SLACK = 2**20
"""Bytes by which device memory may differ from one wave to the next."""
PATIENCE = 30.0
"""Seconds until an engine that nobody asks anything must be idle."""
Allocated = Callable[[], int]


def run(session: Session) -> None:
    qwen3 = next(family for family in families() if family.name == "qwen3")
    folder = make_checkpoint(qwen3.make(True), session.folder / "stress", torch.bfloat16, session.settings.seed)
    reference = Reference(folder, torch.bfloat16, session.device)
    count = 300 if session.settings.quick else 1000
    session.check(
        f"{count} requests, aborts, chunks, preemption",
        lambda: storm(session.settings, folder, count, lambda: allocated(session.device), reference),
    )


def allocated(device: torch.device) -> int:
    """Bytes of device memory in use by tensors; 0 on CPU, where torch does not count."""
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize(device)
    return torch.cuda.memory_allocated(device)


async def storm(
    settings: Settings, folder: Path, count: int, memory: Allocated, reference: Reference | None = None
) -> str:
    """Raises `CheckFailed` for what is lost, left over, wrong or grown."""
    threads = engine_threads()
    random_ = random.Random(settings.seed)
    want = 24
    asks = [Ask(tuple(prompt), want) for prompt in prompts((7, 50, 90, 120), VOCAB, settings.seed + 1)]
    expected = None
    if reference is not None:
        expected = reference.generate([ask.prompt for ask in asks], want)
        # its copy in float32 is made here, not while memory is watched
        reference.gap(asks[0].prompt, expected[0][0], expected[0][1])
    options = {"kv_cache_memory": "2MiB", "preempt_every": 40, "max_num_seqs": 32, "dtype": "bfloat16"}
    async with small_engine(settings, folder, **options) as engine:
        await wave(engine, random_, count // 4)  # caches of bounded size fill
        await nothing_held(engine)
        before = memory()
        storming = asyncio.create_task(wave(engine, random_, count))
        if expected is not None and reference is not None:  # in the middle of it all
            (await compare(generating(engine), asks, expected, reference.gap)).verdict()
        left = await storming
        await nothing_held(engine)
        grown = memory() - before
        stats = engine.stats()
    if abs(grown) > SLACK:
        raise CheckFailed(f"device memory changed by {grown / 2**20:.1f} MiB over {count} requests")
    check_counts(stats, left)
    await threads_ended(threads)
    return f"{left} left early, {stats.preemptions} preemptions, {stats.steps} steps; memory changed by {grown} bytes"


async def wave(engine: AsyncEngine, random_: random.Random, count: int) -> int:
    """`count` requests, at most `AT_ONCE` at a time; how many were left before their end."""
    places = asyncio.Semaphore(AT_ONCE)
    seeds = [random_.randrange(2**32) for _ in range(count)]

    async def one(seed: int) -> bool:
        async with places:
            return await request(engine, random.Random(seed))

    return sum(await asyncio.gather(*(one(seed) for seed in seeds)))


async def request(engine: AsyncEngine, random_: random.Random) -> bool:
    """One of many kinds; True if it was left before its end."""
    prompt = [random_.randrange(3, VOCAB) for _ in range(random_.randrange(1, 150))]
    params = _params(random_)
    if random_.random() < 0.3:
        task = asyncio.create_task(engine.generate(prompt, params))
        done, _ = await asyncio.wait({task}, timeout=random_.random() * 0.1)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        return not done
    if random_.random() < 0.2:
        taken = 0
        async with engine.stream(prompt, params) as stream:
            async for chunk in stream:
                taken += len(chunk.token_ids)
                if taken > 3:
                    return True
        return False
    completion = await engine.generate(prompt, params)
    if any(len(sample.token_ids) != params.max_tokens for sample in completion.samples):
        raise CheckFailed(f"a request for {params.max_tokens} tokens got {len(completion.token_ids)}")
    return False


def _params(random_: random.Random) -> SamplingParams:
    kind = random_.random()
    base = GREEDY.replace(max_tokens=random_.randrange(1, 30))
    if kind < 0.5:
        return base
    return base.replace(
        temperature=0.8, top_p=0.9, seed=random_.randrange(100), n=random_.choice((1, 1, 2)), logprobs=kind > 0.9,
        repetition_penalty=1.2 if kind > 0.7 else 1.0,
    )  # fmt: skip


async def nothing_held(engine: AsyncEngine) -> None:
    """Wait until the engine is idle. Raises `CheckFailed` if its books do not balance then."""
    scheduler, loop = engine.core.loop.scheduler, asyncio.get_running_loop()
    until = loop.time() + PATIENCE
    while scheduler.requests or engine.core.loop.in_flight or engine.core.loop.delivery.streams:
        if loop.time() > until:
            raise CheckFailed(f"{len(scheduler.requests)} requests are still there after {PATIENCE:.0f} s")
        await asyncio.sleep(0.01)
    try:
        assert_nothing_held(engine.core)
    except Exception as error:
        raise CheckFailed(f"the books do not balance: {error}") from None


def check_counts(stats: Any, left: int) -> None:
    """Check that no request was ended by an error, and that preemption was really forced."""
    errors = stats.finished.get("error", 0)
    if errors:
        raise CheckFailed(f"{errors} requests ended with an error")
    if not stats.preemptions:
        raise CheckFailed("nothing was preempted: the check did not check what it should")
    if not left:
        raise CheckFailed("nobody left early: the check did not check what it should")


def engine_threads() -> set[threading.Thread]:
    """The engines' threads that run."""
    return {thread for thread in threading.enumerate() if thread.name.startswith("asyncengine")}


async def threads_ended(before: set[threading.Thread], patience: float = 5.0) -> None:
    """Raises `CheckFailed` if threads that began after `before` still run some seconds after closing."""
    until = time.monotonic() + patience
    while remaining := sorted(thread.name for thread in engine_threads() - before):
        if time.monotonic() > until:
            raise CheckFailed(f"threads left after closing: {', '.join(remaining)}")
        await asyncio.sleep(0.01)
