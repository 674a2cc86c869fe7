"""Launching a step never waits for the device: else the two that are in flight would run one after the other.

torch can be told to raise wherever it would wait. Only while a step is launched: reading its results has to wait.
"""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu.bench import GRAMMARS
from gpu.engines import GREEDY, ON_GPU, SEED, prompts, sampling, small_engine
from gpu.families import TEXT_VOCAB, make_checkpoint, text_config

from asyncengine.async_engine import AsyncEngine

pytestmark = pytest.mark.skipif(not ON_GPU, reason="needs an NVIDIA GPU")

KINDS = {**sampling("launched"), "constrained": GREEDY.replace(grammar=GRAMMARS["pattern"](), ignore_eos=False)}
_LENGTHS = (5, 33, 60, 100, 9, 20)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(text_config(), tmp_path_factory.mktemp("model"), torch.bfloat16, SEED, tokenizer=True)


@pytest.mark.parametrize("kind", KINDS)
async def test_no_launch_waits(kind: str, folder: Path) -> None:
    """Prompts, chunks and decodes, with graphs where there are any."""
    want = 30  # enough for any of the grammars
    texts = prompts(_LENGTHS, TEXT_VOCAB, SEED)
    params = KINDS[kind].replace(max_tokens=want, seed=SEED)

    async def ask(engine: AsyncEngine) -> None:
        await asyncio.gather(*(engine.generate(text, params) for text in texts))

    async with small_engine(folder, dtype="bfloat16", max_steps_in_flight=2, prefix_caching=False) as engine:
        await ask(engine)  # what is done once may wait
        with watched(engine.core.loop.runner.executor) as seen:
            await ask(engine)
    assert not seen.waits
    assert seen.launches >= 10, "nothing was shown"


@dataclass(slots=True)
class Seen:
    """Launches seen, and the places where they waited."""

    launches: int = 0
    waits: list[str] = field(default_factory=list)


@contextmanager
def watched(executor: Any) -> Iterator[Seen]:
    """A launch that waits is noted and done again, so that its requests go on."""
    seen = Seen()
    launch = executor.launch_once

    def strict(batch: Any) -> Any:
        seen.launches += 1
        torch.cuda.set_sync_debug_mode("error")
        try:
            return launch(batch)
        except RuntimeError as error:
            if "synchroniz" not in str(error):
                raise
            seen.waits.append(_place(error))
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return launch(batch)

    executor.launch_once = strict
    try:
        yield seen
    finally:
        del executor.launch_once


def _place(error: BaseException) -> str:
    """The place in the engine where it was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if "asyncengine" in Path(frame.filename).parts]
    frame = (own or list(frames))[-1]
    return f"in {Path(frame.filename).name}, line {frame.lineno} ({frame.line})"
