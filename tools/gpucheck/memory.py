"""Out of memory: at loading it is an error in words, in a step it ends the request that needed too much, alone."""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from pathlib import Path
from typing import Any

import torch

from asyncengine.async_engine import AsyncEngine
from asyncengine.errors import OutOfMemory, RequestFailed
from asyncengine.execution.device.memory import is_out_of_memory
from tools.gpucheck.families import VOCAB, families, make_checkpoint
from tools.gpucheck.greedy import GREEDY, prompts, small_engine
from tools.gpucheck.report import CheckFailed
from tools.gpucheck.session import Session, Settings
from tools.gpucheck.stress import nothing_held

_TOO_MUCH = 2**50
MARK = 1
"""A prompt that begins with this token takes too much memory."""


def run(session: Session) -> None:
    llama = families()[0]
    folder = make_checkpoint(llama.make(True), session.folder / "memory", torch.bfloat16, session.settings.seed)
    for name, work in (("more KV memory than there is", too_much_kv), ("a step that does not fit", step_too_large)):
        session.check(name, partial(work, session.settings, folder))


async def too_much_kv(settings: Settings, folder: Path) -> str:
    try:
        async with small_engine(settings, folder, dtype="bfloat16", kv_cache_memory="900000GiB"):
            pass
    except OutOfMemory as error:
        return str(error)
    raise CheckFailed("900,000 GiB of KV memory were granted")


async def step_too_large(settings: Settings, folder: Path) -> str:
    """One request of a batch takes more memory than there is; the others must not notice."""
    texts = prompts((9, 20, 31, 14, 26), VOCAB, settings.seed)
    params = GREEDY.replace(max_tokens=16)
    async with small_engine(settings, folder, dtype="bfloat16") as engine:
        before = await asyncio.gather(*(engine.generate(text, params) for text in texts))
        greedy_for_memory(engine)
        asked = [engine.generate(text, params) for text in texts]
        marked = engine.generate([MARK, *texts[0]], params)
        with _quiet_log():
            *after, failed = await asyncio.gather(*asked, marked, return_exceptions=True)
        if not isinstance(failed, RequestFailed):
            raise CheckFailed(f"the request without memory ended with {failed!r}")
        hurt = [one for one in after if isinstance(one, BaseException)]
        if hurt:
            raise CheckFailed(f"{len(hurt)} others ended with it: {hurt[0]!r}")
        again = await engine.generate(texts[0], params)
        if len(again.token_ids) != params.max_tokens or len(before) != len(after):
            raise CheckFailed("the engine does not serve any more")
        await nothing_held(engine)
    return f"ended with {failed}; {len(after)} others went on"


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
                    raise CheckFailed(f"an allocation failed with something else: {error!r}") from error
                raise
        run(pending, masks)

    executor._run = hungry


class _quiet_log:  # noqa: N801
    """The engine warns of steps that do not fit; here that is what is wanted."""

    def __enter__(self) -> None:
        self._level = logging.getLogger("asyncengine").level
        logging.getLogger("asyncengine").setLevel(logging.ERROR)

    def __exit__(self, *_: object) -> None:
        logging.getLogger("asyncengine").setLevel(self._level)
