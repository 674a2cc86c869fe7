"""Ranks that exchange results by collective operations, as on GPUs: gloo stands in for NCCL, and a CPU for GPUs.

What a GPU does otherwise has not run anywhere: tests/gpu has some for machines with two.
"""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from support.drive import prompts
from support.rank_threads import in_ranks
from support.tiny_models import VOCAB

from asyncengine import EngineDead, InvalidParameter, SamplingParams
from asyncengine.config import EngineConfig
from asyncengine.execution.device import collective_gather
from asyncengine.execution.runner import ranks as rank_wiring

from .rank_processes import load, mapped, ranks

pytestmark = pytest.mark.skipif(
    collective_gather.missing("gloo") is not None, reason=str(collective_gather.missing("gloo"))
)
(TOKENS,) = prompts([16], VOCAB)


def gathers(size: int) -> list[Any]:
    memory = collective_gather.make_memory("gloo")
    try:
        return [collective_gather.open_gather(memory, rank, size, "gloo") for rank in range(size)]
    finally:
        os.close(memory)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_what_each_has_written_is_what_all_have(dtype: torch.dtype) -> None:
    """Bits are the same, of zeros with a sign and of what is no number, too; sizes are no whole number of words."""
    whole = torch.arange(15).view(3, 5).to(dtype)
    if dtype.is_floating_point:
        whole[0, 0], whole[1, 2], whole[2, 4] = -0.0, float("nan"), float("-inf")

    def work(one: Any) -> list[torch.Tensor]:
        found = []
        for _ in range(3):
            buffer = one.buffer(3, 5, dtype)
            buffer[one.rank :: 3] = whole[one.rank :: 3]
            one.meet()
            found.append(buffer.clone())
        one.close()
        return found

    for found in in_ranks(3, work, gathers(3)):
        assert all(torch.equal(each.view(torch.uint8), whole.view(torch.uint8)) for each in found)


def test_one_that_is_gone_before_they_have_met_is_not_waited_for() -> None:
    first, other = gathers(2)
    told = threading.Timer(0.3, first.break_off, ["rank 1 was killed"])
    told.start()
    first.buffer(2, 2, torch.float32)
    with pytest.raises(RuntimeError, match="rank 1 was killed"):
        first.meet()
    told.join()
    first.close()
    other.close()
    assert not os.path.exists(first._folder)


@pytest.mark.parametrize("told", ["before", "while it waits", "not at all"])
def test_the_reason_of_another_s_end_is_what_a_meeting_says(told: str) -> None:
    """The first reason stands, after a meeting too, where gloo itself says only that a connection is closed."""
    first, other = gathers(2)

    def meet(one: Any) -> None:
        one.buffer(2, 2, torch.float32)
        one.meet()

    in_ranks(2, meet, [first, other])
    if told == "before":
        first.break_off("rank 1 was killed")
    other.close()
    if told == "while it waits":
        waited = first._ended.wait
        first._ended.wait = lambda most: (first.break_off("rank 1 was killed"), waited(most))
    with pytest.raises(
        RuntimeError, match=r"another rank of the model is gone: \S" if told == "not at all" else "^rank 1 was killed$"
    ):
        meet(first)
    first.break_off("another reason")
    assert first.lost == ("another reason" if told == "not at all" else "rank 1 was killed")
    first.close()


async def test_an_engine_over_two_processes_answers_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each process has caches of its own: what needs those of all in one is refused, and all else works. Whoever waits
    for a rank in a collective operation, in mid-stream, is told that it was killed."""
    params = SamplingParams(max_tokens=8, temperature=0, top_logprobs=3, ignore_eos=True)
    drawn = params.replace(temperature=0.9, seed=7)

    async def scores(engine: Any) -> list[Any]:
        made = [
            await engine.generate("Once upon a time", params),
            await engine.generate([5, 6, 7] * 20, drawn, adapter="pirate"),
        ]
        return [(each.token_ids, each.logprobs) for each in made]

    async with await load(1) as engine:
        expected = await scores(engine)
    monkeypatch.setattr(rank_wiring, "_ON_CPU", "gloo")
    async with await load(2) as engine:
        assert len(ranks()) == 1
        assert await scores(engine) == expected
        with pytest.raises(InvalidParameter, match="export_prefix: works with models on a CPU"):
            await engine.export_prefix([5, 6, 7] * 20, tmp_path / "file")
        await engine.sleep()
        await engine.wake()
        assert await scores(engine) == expected
        stream = engine.stream([5, 6, 7] * 5, SamplingParams(max_tokens=1200, temperature=0, ignore_eos=True))
        for _ in range(4):
            await anext(stream)
        ranks()[0].send_signal(signal.SIGKILL)
        killed = time.monotonic()
        with pytest.raises(EngineDead, match=r"rank 1 of the model \(process \d+\) was killed"):
            async for _ in stream:
                pass
        assert time.monotonic() - killed < 30, "a loaded machine takes longer than the second that is promised"
    assert not ranks()
    del engine, stream
    gc.collect()  # the error holds frames that held some of it
    assert not mapped()


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"tensor_parallel": 3}, "tensor_parallel: needs a GPU for each rank; visible here: 2"),
        ({"device": "cuda:1"}, "device: must be .*: with tensor_parallel rank r is on cuda:r"),
        ({}, "kv_cache_memory: must be given with tensor_parallel on GPUs"),
        ({"tensor_parallel": 1, "pipeline_parallel": 2, "device": "auto"}, "pipeline_parallel: on CUDA is not there"),
    ],
)
def test_what_gpus_cannot_be_is_refused(settings: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No process is started before the refusal. Two GPUs are made up."""
    from contextlib import ExitStack

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    config = EngineConfig(**{"tensor_parallel": 2, "device": "cuda", **settings})
    device = torch.device("cuda", int(config.device[5:] or 0))
    with ExitStack() as undo, pytest.raises(InvalidParameter, match=reason):
        rank_wiring.start_ranks(config, device, None, undo)
    assert not ranks()
