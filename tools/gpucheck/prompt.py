"""Prompts longer than `max_num_batched_tokens`: steps that compute only the inner part of one want no logits at all."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from asyncengine.async_engine import AsyncEngine
from tools.gpucheck.compare import Ask, compare
from tools.gpucheck.families import VOCAB, families, make_checkpoint
from tools.gpucheck.greedy import generating, prompts, small_engine
from tools.gpucheck.reference import Reference
from tools.gpucheck.report import CheckFailed
from tools.gpucheck.session import Session

LENGTH = 300
"""Tokens, of chunks of 64."""
_WANT = 8


def run(session: Session) -> None:
    qwen3 = next(family for family in families() if family.name == "qwen3")
    folder = make_checkpoint(qwen3.make(True), session.folder / "prompt", torch.bfloat16, session.settings.seed)
    reference = Reference(folder, torch.bfloat16, session.device)
    for count in (1, 3):
        session.check(f"{count} of {LENGTH} tokens", partial(check_prompts, session, folder, reference, count))


async def check_prompts(session: Session, folder: object, reference: Reference, count: int) -> str:
    """Alone, so that no decode shares its steps, and several. Raises `CheckFailed` for a wrong token."""
    asks = [Ask(tuple(prompt), _WANT) for prompt in prompts([LENGTH] * count, VOCAB, session.settings.seed)]
    expected = reference.generate([ask.prompt for ask in asks], _WANT)
    async with small_engine(session.settings, folder, dtype="bfloat16") as engine:  # type: ignore[arg-type]
        inner = _steps_without_logits(engine)
        found = (await compare(generating(engine), asks, expected, reference.gap)).verdict()
    if not inner:
        raise CheckFailed("every step wanted logits: nothing was shown")
    return f"{found}; {len(inner)} steps without logits"


def _steps_without_logits(engine: AsyncEngine) -> list[int]:
    """The numbers of those that the engine will have launched."""
    executor: Any = engine.core.loop.runner.executor
    launch, seen = executor.launch, list[int]()

    def watched(batch: object) -> object:
        if not any(row.samples for row in batch.rows):  # type: ignore[attr-defined]
            seen.append(batch.step)  # type: ignore[attr-defined]
        return launch(batch)

    executor.launch = watched
    return seen
