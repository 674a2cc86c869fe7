"""A thousand requests that come, are left and are preempted at random: afterwards nothing may be left over or lost."""

from __future__ import annotations

import asyncio
import contextlib
import random
from pathlib import Path

import pytest
import torch
from gpu.compare import Ask, compare
from gpu.engines import DEVICE, GREEDY, ON_GPU, SEED, generating, nothing_held, prompts, small_engine
from gpu.families import family_called, make_checkpoint
from gpu.reference import Reference
from support.tiny_configs import VOCAB

from asyncengine.async_engine import AsyncEngine
from asyncengine.sampling_params import SamplingParams

pytestmark = pytest.mark.skipif(not ON_GPU, reason="needs an NVIDIA GPU")

AT_ONCE = 96
SLACK = 2**20
"""Bytes by which device memory may differ from one wave to the next."""
COUNT = 1000


def allocated(device: torch.device) -> int:
    """Bytes of device memory in use by tensors; 0 on CPU, where torch does not count."""
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize(device)
    return torch.cuda.memory_allocated(device)


async def test_a_storm_leaves_nothing_behind(tmp_path: Path) -> None:
    """A thousand requests that are left and preempted at random; others, in the midst of it, are answered rightly."""
    device = torch.device(DEVICE)
    qwen3 = family_called("qwen3")
    folder = make_checkpoint(qwen3.make(True), tmp_path, torch.bfloat16, SEED)
    reference, random_, want = Reference(folder, torch.bfloat16, device), random.Random(SEED), 24
    asks = [Ask(tuple(prompt), want) for prompt in prompts((7, 50, 90, 120), VOCAB, SEED + 1)]
    expected = reference.generate([ask.prompt for ask in asks], want)
    # its copy in float32 is made here, not while memory is watched
    reference.gap(asks[0].prompt, expected[0][0], expected[0][1])
    options = {"kv_cache_memory": "2MiB", "preempt_every": 40, "max_num_seqs": 32, "dtype": "bfloat16"}
    async with small_engine(folder, **options) as engine:
        await wave(engine, random_, COUNT // 4)  # caches of bounded size fill
        await nothing_held(engine)
        before = allocated(device)
        storming = asyncio.create_task(wave(engine, random_, COUNT))
        (await compare(generating(engine), asks, expected, reference.gap)).verdict()
        left = await storming
        await nothing_held(engine)
        grown, stats = allocated(device) - before, engine.stats()
    assert abs(grown) <= SLACK
    assert not stats.finished.get("error", 0)
    assert stats.preemptions, "nothing was preempted: the test did not show what it should"
    assert left, "nobody left early: the test did not show what it should"


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
    assert all(len(sample.token_ids) == params.max_tokens for sample in completion.samples)
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
