"""Engines for small models on the GPU, greedy requests, and how near log-probabilities are to the reference's.

The ladder runs without pytest: nothing here, nor what it imports, is of `tests/support`.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import torch

from asyncengine.async_engine import AsyncEngine
from asyncengine.config import EngineConfig
from asyncengine.execution.models.loading import load_model
from asyncengine.execution.runner.building import build_runner
from asyncengine.sampling_params import SamplingParams
from asyncengine.testing import assert_nothing_held

from .compare import Ask, Generate
from .reference import Reference

ON_GPU = torch.cuda.is_available()
DEVICE, BACKEND = ("cuda:0", "flashinfer") if ON_GPU else ("cpu", "torch")
"""On a CPU the tests that use these are skipped; the ladder's stand-ins run there."""
CASES = json.loads(Path(__file__).with_name("cases.json").read_text(encoding="utf-8"))
"""Cases of the tests and of the ladder, by what they are cases of."""
SEED = 5
GREEDY = SamplingParams(temperature=0.0, top_p=1.0, top_k=0, repetition_penalty=1.0, ignore_eos=True)
MOST_ERROR = 1.5
"""Mean error of log-probabilities, in units of transformers' own error in the same type."""
LENGTHS = (5, 5, 33, 33, 60, 60, 100, 100)
"""Lengths of prompts. They are computed in chunks of up to 64 tokens, beside the decodes of others."""
PATIENCE = 30.0
"""Seconds until an engine that gets no requests must be idle."""
WANT = 48
"""Tokens of an output."""


def sampling(cases: str) -> dict[str, SamplingParams]:
    """Parameters of the named cases, each of which lists what it has otherwise than `GREEDY`."""
    made = {name: dict(fields) for name, fields in CASES[cases].items()}
    for fields in made.values():
        if "logit_bias" in fields:  # JSON's keys are strings
            fields["logit_bias"] = {int(token): bias for token, bias in fields["logit_bias"].items()}
    return {name: GREEDY.replace(**fields) for name, fields in made.items()}


def runner_of(folder: Path, **settings: Any) -> Any:
    """A runner on the GPU without an engine, in bfloat16; graphs are the caller's to capture."""
    config = EngineConfig(**{"device": "cuda", "dtype": "bfloat16", "max_num_seqs": 64, **settings})
    return build_runner(load_model(str(folder), config), config).runner


def captured(work: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    """A CUDA graph of `work`, and the output that each replay of it writes."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = work()
    return graph, output


async def scores(engine: AsyncEngine, asks: Sequence[Ask], reference: Reference) -> None:
    """Log-probabilities of prompts and outputs: as near to float32 as transformers' own in the same type.

    Finds what tokens hide: an error that is small everywhere. Raises `AssertionError` beyond `MOST_ERROR`.
    """
    params = [params_of(ask).replace(logprobs=True, prompt_logprobs=True) for ask in asks]
    done = await asyncio.gather(*(
        engine.generate(ask.prompt, wanted, adapter=ask.adapter) for ask, wanted in zip(asks, params, strict=True)
    ))  # fmt: skip
    errors = []
    for ask, completion in zip(asks, done, strict=True):
        entries = [*(completion.prompt_logprobs or ())[1:], *(completion.logprobs or ())]
        found = [float("nan") if entry is None else entry.logprob for entry in entries]
        errors.append(reference.score_errors([*ask.prompt, *completion.token_ids], found, ask.adapter))
    tested, own, count = (sum(column) for column in zip(*errors, strict=True))
    assert tested <= MOST_ERROR * own, f"off by {tested / count:.3g} in the mean; transformers' by {own / count:.3g}"


@asynccontextmanager
async def small_engine(folder: Path, **changes: Any) -> AsyncIterator[AsyncEngine]:
    """An engine for a small model: little KV memory, small chunks."""
    options = {
        "device": DEVICE, "attention_backend": BACKEND, "kv_cache_memory": "64MiB",
        "max_num_seqs": 24, "max_num_batched_tokens": 64, "show_progress": False, "step_hard_limit": 180.0, **changes,
    }  # fmt: skip
    engine = await AsyncEngine.from_pretrained(folder, **options)
    try:
        yield engine
    finally:
        await engine.aclose()


def generating(engine: AsyncEngine) -> Generate:
    """Requests of `engine`, all at once."""

    async def generate(asks: Sequence[Ask]) -> list[list[int]]:
        done = await asyncio.gather(*(engine.generate(ask.prompt, params_of(ask), adapter=ask.adapter) for ask in asks))
        return [list(completion.token_ids) for completion in done]

    return generate


def params_of(ask: Ask) -> SamplingParams:
    if ask.grammar is None:
        return GREEDY.replace(max_tokens=ask.want)
    return GREEDY.replace(max_tokens=ask.want, grammar=ask.grammar, ignore_eos=False)


def graphs_of(engine: Any) -> Any:
    """The runner's graphs, or None."""
    return getattr(engine.core.loop.runner.executor, "graphs", None)


def backend_of(engine: AsyncEngine) -> str:
    """Name of the attention backend that the engine runs on."""
    executor: Any = engine.core.loop.runner
    return str(executor.executor.attention_backend)


def prompts(lengths: Sequence[int], vocab: int, seed: int) -> list[list[int]]:
    """Random prompts."""
    generator = random.Random(seed)
    return [[generator.randrange(3, vocab) for _ in range(length)] for length in lengths]


async def nothing_held(engine: AsyncEngine) -> None:
    """Wait until the engine is idle. Raises `AssertionError` if its books do not balance then."""
    scheduler, loop = engine.core.loop.scheduler, asyncio.get_running_loop()
    until = loop.time() + PATIENCE
    while scheduler.requests or engine.core.loop.in_flight or engine.core.loop.delivery.streams:
        assert loop.time() < until, f"{len(scheduler.requests)} requests are still there"
        await asyncio.sleep(0.01)
    assert_nothing_held(engine.core)
