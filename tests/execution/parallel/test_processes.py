"""An engine over two processes, which share each layer or have some of the layers each: what it answers, what it
refuses, and what is left when one of them is gone.

`ASYNCENGINE_LONG=50` kills a rank at so many moments.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from support import forked
from support.data import cases_of
from support.long import LONG, TIMES

from asyncengine import AsyncEngine, EngineDead, InvalidParameter, SamplingParams
from asyncengine.config import EngineConfig
from asyncengine.demo import MODEL_PATH
from asyncengine.events import EngineDied
from asyncengine.execution.device import shared_gather
from asyncengine.execution.device.child import Child
from asyncengine.execution.runner.ranks import Ranks
from asyncengine.grammar import Grammar

from .rank_processes import load, mapped, ranks

pytestmark = pytest.mark.skipif(shared_gather.missing() is not None, reason=str(shared_gather.missing()))
KILLS = TIMES
BUSY = 30.0
"""Seconds that a busy machine may take to tell of an end, which comes within one."""
TOPICS = {"trains": "a train", "weather": None, "books": None}


async def scores(engine: AsyncEngine) -> list[Any]:
    """Tokens and log-probabilities of requests of many kinds at once, and a decision's answers."""
    greedy = SamplingParams(max_tokens=24, temperature=0, top_logprobs=3, ignore_eos=True)
    drawn = SamplingParams(max_tokens=24, n=2, temperature=0.9, top_p=0.9, seed=7, logprobs=True, prompt_logprobs=True)
    date = SamplingParams(max_tokens=40, temperature=0, logprobs=True, grammar=Grammar.regex("[0-9]{4}-[0-9]{2}"))
    again = list(range(40, 70)) * 3  # which is guessed on
    questions = {
        "late": {"type": "noul", "instructions": "Is it late?"},
        "topic": {"type": "choice", "criteria": TOPICS},
    }
    decision, *made = await asyncio.gather(
        engine.decide("The train left at noon.", questions),
        engine.generate(again, greedy),
        engine.generate("Once upon a time", drawn),
        engine.generate("The date is ", date),
        engine.generate("Tell me a story", greedy, adapter="pirate"),
        engine.generate([*again[:50], 5], greedy),
    )
    return [decision.answers, *([(sample.token_ids, sample.logprobs) for sample in each.samples] for each in made)]


@pytest.mark.parametrize(
    ("setting", "kept"), [("tensor_parallel", "auto"), ("pipeline_parallel", "auto"), ("tensor_parallel", "int8")]
)
async def test_an_engine_over_two_processes_answers_as_one(
    tmp_path: Path, setting: str, kept: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Guesses, grammars, adapters, preemption, samples; then other weights, sleep, and prefixes from files and a store,
    which are those of one process. Last the other process is killed, in the midst of answers or while there are none:
    the engine ends with it, and nothing is left."""
    file, other, prompt = tmp_path / "prefix", tmp_path / "other", list(range(50, 120))
    greedy = SamplingParams(max_tokens=8, temperature=0, top_logprobs=3)
    async with await load(1, kv_cache_dtype=kept) as engine:
        expected = await scores(engine)
        last = await engine.generate([*prompt, 7], greedy)
        await engine.export_prefix(prompt, other)
        weights, kv_bytes = engine.info.weight_bytes, engine.info.kv_cache_bytes
    async with await load(setting=setting, kv_cache_dir=str(tmp_path / "store"), kv_cache_dtype=kept) as engine:
        assert getattr(engine.info, setting) == 2
        assert engine.info.kv_cache_bytes == kv_bytes
        assert "2 processes" in engine.info.in_words
        assert weights <= engine.info.weight_bytes < 1.1 * weights
        assert await scores(engine) == expected
        assert engine.stats().preemptions > 0
        assert engine.stats().speculation.drafted > 0
        await engine.generate(prompt, greedy)
        await engine.export_prefix(prompt, file)
        assert file.read_bytes() == other.read_bytes()
        await engine.sleep()
        await engine.wake()
        assert await engine.import_prefix(other) > 0
        again = await engine.generate([*prompt, 7], greedy)
        assert again.usage.cached_tokens > 0
        assert (again.token_ids, again.logprobs) == (last.token_ids, last.logprobs)
        name = "model.layers.0.mlp.down_proj.weight"
        from safetensors.torch import load_file

        whole = load_file(str(MODEL_PATH / "model.safetensors"))
        await engine.update_weights(iter([(name, whole[name] * 0)]), partial=True)
        assert await scores(engine) != expected
        await engine.update_weights(str(MODEL_PATH))
        assert await scores(engine) == expected
        with caplog.at_level(logging.CRITICAL, "asyncengine"):  # its record would hold the error's frames
            await (killed_in_mid_answer(engine, 0) if setting == "pipeline_parallel" else killed_while_idle(engine))
    assert not ranks()
    del engine
    assert not mapped()


async def test_stages_of_several_ranks_answer_as_one_process(caplog: pytest.LogCaptureFixture) -> None:
    """Two stages, each of whose layers two processes share. Then one of them is killed."""
    async with await load(1) as engine:
        expected = await scores(engine)
        kept = engine.info.kv_cache_bytes
    async with await load(tensor_parallel=2, pipeline_parallel=2) as engine:
        assert engine.info.kv_cache_bytes == kept
        assert "4 processes" in engine.info.in_words
        assert await scores(engine) == expected
        await engine.sleep()
        await engine.wake()
        assert await scores(engine) == expected
        with caplog.at_level(logging.CRITICAL, "asyncengine"):
            await killed_in_mid_answer(engine, 3, rank=3)
    assert not ranks()
    del engine
    assert not mapped()


async def killed_in_mid_answer(engine: AsyncEngine, number: int, rank: int = 1, named: str = r"process \d+") -> None:
    """Kill a rank at some moment of a step or between two: every stream is told within a second."""
    rng = random.Random(number)
    params = SamplingParams(max_tokens=1200, temperature=0, ignore_eos=True)
    streams = [engine.stream([5 + each, 6, 7] * 5, params) for each in range(3)]
    began = [await anext(stream) for stream in streams]
    assert began
    for _ in range(rng.randrange(20)):
        await anext(streams[0])
    ranks()[rank - 1].send_signal(signal.SIGKILL)
    killed = time.monotonic()
    for stream in streams:
        with pytest.raises(EngineDead, match=rf"rank {rank} of the model \({named}\) was killed"):
            async for _ in stream:
                pass
    assert time.monotonic() - killed < BUSY


async def killed_while_idle(engine: AsyncEngine) -> None:
    """The engine finds out without a request."""
    heard = asyncio.Event()
    engine.on_event(lambda event: heard.set() if isinstance(event, EngineDied) else None)
    ranks()[0].kill()
    await asyncio.wait_for(heard.wait(), BUSY)
    with pytest.raises(EngineDead, match="rank 1 of the model"):
        await engine.generate([5, 6, 7])


@pytest.mark.skipif(not LONG, reason="one moment is that of the test above")
@pytest.mark.parametrize("number", range(KILLS))
async def test_a_rank_that_is_killed_ends_the_engine(number: int) -> None:
    """The processes share each layer and have some of the layers each, by turns; nothing is left."""
    setting = ("pipeline_parallel", "tensor_parallel")[number % 2]
    engine = await load(setting=setting, quantization="int8", preempt_every=None, adapters=())
    async with engine:
        await killed_in_mid_answer(engine, number)
        with pytest.raises(EngineDead):
            await engine.generate("Hello", SamplingParams(max_tokens=2))
    assert not ranks()
    del engine
    gc.collect()  # the error holds frames that held some of it
    assert not mapped()


PROGRAM = """
import os, psutil, signal
from asyncengine import Engine, SamplingParams
engine = Engine.from_pretrained("demo", tensor_parallel=2, num_threads=2, show_progress=False, quantization="int8")
(rank,) = [each for each in psutil.Process().children() if "rank_worker" in " ".join(each.cmdline())]
os.kill(rank.pid, signal.SIGINT)
assert engine.generate([5, 6, 7], SamplingParams(max_tokens=4, ignore_eos=True)).token_ids
print(rank.pid, flush=True)
for chunk in engine.stream([5, 6, 7], SamplingParams(max_tokens=4000, ignore_eos=True)):
    print("went on", flush=True)
"""


def test_a_message_to_a_killed_rank_says_who_was_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its socket has ended, and the watcher has not seen yet whose it was."""
    seen, last_words = threading.Event(), Child.last_words
    monkeypatch.setattr(Child, "last_words", lambda child: seen.wait(60) and last_words(child))
    others = Ranks(2)
    try:
        join = others._watcher.join
        monkeypatch.setattr(others._watcher, "join", lambda *seconds: (seen.set(), join(*seconds)))
        (process,) = ranks()
        process.kill()
        process.wait(60)
        with pytest.raises(RuntimeError, match=rf"rank 1 of the model \(process {process.pid}\) was killed"):
            others.send("forward")
    finally:
        seen.set()
        others.close()


def test_a_killed_engine_leaves_no_rank() -> None:
    """Ranks see it themselves, as no engine can end them. A rank does not mind Ctrl-C, which the engine gets too."""
    program = forked.start(PROGRAM)
    assert program.stdout is not None
    with program.stdout:
        rank = psutil.Process(int(program.stdout.readline()))
        assert program.stdout.readline() == b"went on\n"
        program.kill()
        program.wait()
    gone, alive = psutil.wait_procs([rank], timeout=BUSY)
    assert not alive
    assert gone


@pytest.mark.parametrize(
    ("settings", "says"),
    [*(({setting: value}, rf"{setting}.* 1 .* 64|{setting}: must be an int") for value in (0, 65, -1, True, 2.0, "2")
       for setting in ("tensor_parallel", "pipeline_parallel")),
     ({"pipeline_parallel": 2, "device": "cuda:1"}, "pipeline_parallel: on CUDA is not there yet"),
     ({"tensor_parallel": 16, "pipeline_parallel": 5}, "times tensor_parallel must be at most 64")],
    ids=str,
)  # fmt: skip
def test_settings_that_cannot_be(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidParameter, match=says):
        EngineConfig(**settings)


@pytest.mark.parametrize(("model", "settings", "reason"), cases_of(__file__))
async def test_what_cannot_be_split_is_refused(
    model: str, settings: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The constructor refuses it, and leaves no process. No rank starts here: it would be ended before it loads."""
    from asyncengine.execution.device import child

    monkeypatch.setattr(child, "_START", "import sys; sys.stdin.read()")
    given = {"tensor_parallel": 2, "show_progress": False, **settings}
    named = "max_steps_in_flight" if "most" in reason else r"(tensor|pipeline)_parallel"
    with pytest.raises(InvalidParameter, match=f"{named}: .*{reason}"):
        await AsyncEngine.from_pretrained(model, **given)
    assert not [each for each in psutil.Process().children() if "sys.stdin.read" in " ".join(each.cmdline())]
