"""Out of memory: at loading it is an error in words, in a step it ends the request that needed too much, alone."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu.engines import GREEDY, ON_GPU, SEED, nothing_held, prompts, small_engine
from gpu.families import family_called, make_checkpoint
from support.tiny_configs import VOCAB

from asyncengine.async_engine import AsyncEngine
from asyncengine.errors import OutOfMemory, RequestFailed
from asyncengine.execution.device.memory import is_out_of_memory

pytestmark = pytest.mark.skipif(not ON_GPU, reason="needs an NVIDIA GPU")

_TOO_MUCH = 2**50
MARK = 1
"""A prompt that begins with this token takes too much memory."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_checkpoint(family_called("llama").make(True), tmp_path, torch.bfloat16, SEED)


async def test_more_kv_memory_than_there_is(folder: Path) -> None:
    with pytest.raises(OutOfMemory):
        async with small_engine(folder, dtype="bfloat16", kv_cache_memory="900000GiB"):
            pass


async def test_a_step_that_does_not_fit(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One request of a batch takes more memory than there is; the others must not notice."""
    texts = prompts((9, 20, 31, 14, 26), VOCAB, SEED)
    params = GREEDY.replace(max_tokens=16)
    async with small_engine(folder, dtype="bfloat16") as engine:
        before = await asyncio.gather(*(engine.generate(text, params) for text in texts))
        greedy_for_memory(engine)
        asked = [engine.generate(text, params) for text in texts]
        marked = engine.generate([MARK, *texts[0]], params)
        with caplog.at_level(logging.ERROR, "asyncengine"):  # it warns of steps that do not fit
            *after, failed = await asyncio.gather(*asked, marked, return_exceptions=True)
        assert isinstance(failed, RequestFailed)
        assert [len(one.token_ids) for one in after] == [len(one.token_ids) for one in before]
        again = await engine.generate(texts[0], params)
        assert len(again.token_ids) == params.max_tokens, "the engine does not serve any more"
        await nothing_held(engine)


def greedy_for_memory(engine: AsyncEngine) -> None:
    """From now on a step with a marked request really asks the device for a petabyte."""
    executor: Any = engine.core.loop.runner.executor
    run = executor._run

    def hungry(pending: Any, masks: Any) -> None:
        if any(row.tokens[0] == MARK for row in pending.batch.rows):
            try:
                torch.empty(_TOO_MUCH, dtype=torch.uint8, device=executor.device)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise AssertionError("an allocation failed with something else") from error
                raise
        run(pending, masks)

    executor._run = hungry
