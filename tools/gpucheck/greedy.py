"""Greedy outputs of several families against transformers' own."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from asyncengine.async_engine import AsyncEngine
from asyncengine.sampling_params import SamplingParams
from tools.gpucheck.compare import Ask, Generate, compare
from tools.gpucheck.families import VOCAB, Family, families, make_checkpoint
from tools.gpucheck.reference import Reference
from tools.gpucheck.report import CheckFailed
from tools.gpucheck.session import Session, Settings

GREEDY = SamplingParams(temperature=0.0, top_p=1.0, top_k=0, repetition_penalty=1.0, ignore_eos=True)
MOST_ERROR = 1.5
"""Mean error of log-probabilities, in units of transformers' own error in the same type."""
LENGTHS = (5, 5, 33, 33, 60, 60, 100, 100)
"""Lengths of prompts. They are computed in chunks of up to 64 tokens, beside the decodes of others."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_IN_FLOAT16 = ("llama",)
"""Families that run in float16 too. Each further kind of layer would compile kernels of its own."""


def run(session: Session) -> None:
    settings = session.settings
    want = 24 if settings.quick else 48
    for family in families():
        runs = ["float32", "bfloat16"]
        if family.name in _IN_FLOAT16 and not settings.quick:
            runs.append("float16")
        for dtype in runs:
            session.check(f"{family.name}, {dtype}", partial(check_family, session, family, dtype, want))


async def check_family(session: Session, family: Family, dtype: str, want: int, **changes: Any) -> str:
    """float32 through the torch backend, 16 bits through FlashInfer: the same but for near ties. `changes`: settings of
    the engine."""
    kind, seed = DTYPES[dtype], session.settings.seed
    folder = session.folder / f"{family.name}-{dtype}"
    make_checkpoint(family.make(dtype != "float32"), folder, kind, seed)
    reference = Reference(folder, kind, session.device)
    asks = [Ask(tuple(prompt), want) for prompt in prompts(LENGTHS, VOCAB, seed)]
    expected = reference.generate([ask.prompt for ask in asks], want)
    return await _compared(session.settings, folder, dtype, asks, expected, reference, changes)


async def _compared(
    settings: Settings, folder: Path, dtype: str, asks: list[Ask], expected: list[list[int]], reference: Reference,
    changes: dict[str, Any],
) -> str:  # fmt: skip
    backend = "torch" if dtype == "float32" else settings.backend
    async with small_engine(settings, folder, dtype=dtype, attention_backend=backend, **changes) as engine:
        used = backend_of(engine)
        exact = dtype == "float32"
        judge = reference.exact_gap if exact else reference.gap
        found = (await compare(generating(engine), asks, expected, judge)).verdict()
        if not exact:
            found += f", {await scores(engine, asks, reference)}"
    return f"{found}, on {used}"


async def scores(engine: AsyncEngine, asks: Sequence[Ask], reference: Reference) -> str:
    """Log-probabilities of prompts and outputs: as near to float32 as transformers' own in the same type.

    Finds what tokens hide: an error that is small everywhere. Raises `CheckFailed` beyond `MOST_ERROR`.
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
    ratio = tested / own
    if not ratio <= MOST_ERROR:
        raise CheckFailed(
            f"log-probabilities are off by {tested / count:.3g} in the mean, {ratio:.1f} times what transformers' are"
        )
    return f"errors of log-probabilities {ratio:.2f} times transformers' own"


@asynccontextmanager
async def small_engine(settings: Settings, folder: Path, **changes: Any) -> AsyncIterator[AsyncEngine]:
    """An engine for a small model: little KV memory, small chunks."""
    options = {
        "device": settings.device, "attention_backend": settings.backend, "kv_cache_memory": "64MiB",
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


def backend_of(engine: AsyncEngine) -> str:
    """Name of the attention backend that the engine runs on."""
    executor: Any = engine.core.loop.runner
    return str(executor.executor.attention_backend)


def prompts(lengths: Sequence[int], vocab: int, seed: int) -> list[list[int]]:
    """Random prompts."""
    generator = random.Random(seed)
    return [[generator.randrange(3, vocab) for _ in range(length)] for length in lengths]
