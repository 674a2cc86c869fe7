"""Adapters on a real model through the public names: both tiers at work, cached prefixes, changed content."""

from __future__ import annotations

import asyncio
import builtins
import io
import os
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.adapter_engine import slots_of
from support.fake_engine import gather_all, until
from support.held_steps import HeldSteps
from support.lora_zoo import Zoo, random_prompts

from asyncengine.errors import RequestFailed
from asyncengine.lora.layers.slots import LoraLayers

from .lora_engine import ask, assert_given_back, greedy, info_of, load

pytest.importorskip("peft")

pytestmark = pytest.mark.usefixtures("no_thread_left")

WANT = 8
PROMPTS = random_prompts([9, 40, 40])
PROMPT = PROMPTS[1]
PAGES_OF_IT = 32
"""Tokens of `PROMPT` in full pages."""


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    return Zoo("llama", tmp_path_factory.mktemp("zoo"), 16, everything=False)


# ---------------------------------------------------------------- both tiers


class FileWatch:
    """A record of the threads that touch files below a folder."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self._folder = os.fspath(folder)
        self.threads: dict[threading.Thread, int] = {}
        for name in ("open", "stat", "lstat", "scandir", "listdir", "readlink"):
            patch.setattr(os, name, self._watched(getattr(os, name)))
        for module in (builtins, io):
            patch.setattr(module, "open", self._watched(open))

    def _watched(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def watched(path: Any = ".", *args: Any, **kwargs: Any) -> Any:
            if isinstance(path, (str, os.PathLike)) and os.fspath(path).startswith(self._folder):
                thread = threading.current_thread()
                self.threads[thread] = self.threads.get(thread, 0) + 1
            return call(path, *args, **kwargs)

        return watched


@pytest.mark.parametrize("hosted", [False, True], ids=["owned", "hosted"])
async def test_two_hundred_requests_over_sixteen_adapters(
    zoo: Zoo, hosted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four slots, and host memory for about six: every token as peft says, and files read on the workers only."""
    chance = random.Random(hosted)
    jobs = [(chance.choice(zoo.names), chance.choice(PROMPTS), chance.randrange(1, WANT + 1)) for _ in range(200)]
    expected = [zoo.answer(name, prompt, WANT)[:most] for name, prompt, most in jobs]
    settings = {"max_loras": 4, "max_num_seqs": 16, "max_num_batched_tokens": 64, "hosted": hosted}
    async with await load(zoo, adapters=zoo.paths, **settings) as engine:
        sizes = [info.nbytes for info in engine.adapters()]
    budget = 6 * sum(sizes) // len(sizes)
    assert max(sizes) * 4 > budget // 2 > max(sizes)
    async with await load(zoo, adapters=zoo.paths, adapter_memory=budget, **settings) as engine:
        assert sum(info.in_memory for info in engine.adapters()) < 10
        watch = FileWatch(zoo.path("a0").parent, monkeypatch)
        calls = [engine.generate(prompt, greedy(most), adapter=name) for name, prompt, most in jobs]
        made = await asyncio.gather(*calls)
        assert [one.token_ids for one in made] == expected
        await assert_given_back(engine)
        assert slots_of(engine.core).copies >= 16
        assert sum(watch.threads.values()) >= 2 * 8, "some were read again"
        assert {thread.name.rpartition("_")[0] for thread in watch.threads} == {"asyncengine-lora"}
        for info in engine.adapters():
            await engine.unload_adapter(info.name)
        assert engine.stats().adapters == {"loaded": 0, "in_memory": 0, "nbytes": 0}


async def test_the_first_adapter_comes_while_the_base_model_runs(zoo: Zoo) -> None:
    """An engine that knew of none takes device memory for it under running requests, and gives none of it to them."""
    want = 40
    async with await load(zoo) as engine:
        with HeldSteps(engine, after=2):
            before = engine.stream(PROMPT, greedy(want))
            first = await anext(before)
            await engine.load_adapter("a8", zoo.path("a8"))
        assert await ask(engine, "a8", PROMPTS[0]) == (zoo.answer("a8", PROMPTS[0], WANT), 0)
        assert before._assembler is not None
        assert not before._assembler.finished, "it ran all the time"
        rest = await before.result()
        assert first.token_ids == rest.token_ids[: len(first.token_ids)]
        assert rest.token_ids == zoo.answer(None, PROMPT, want)
        await engine.unload_adapter("a8")
        await assert_given_back(engine)


async def test_a_slot_that_could_not_be_written_is_not_used_with_its_old_weights(
    zoo: Zoo, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No device memory for an adapter's first use: requests may fail, but none is answered by another's weights."""
    make_room, failures = LoraLayers.make_room, 6

    def full(self: LoraLayers, place: Any, rank: int) -> None:
        nonlocal failures
        if failures:
            failures -= 1
            raise torch.OutOfMemoryError("no room")
        make_room(self, place, rank)

    async with await load(zoo, adapters=zoo.paths, max_loras=1) as engine:
        assert (await ask(engine, "a0", PROMPT))[0] == zoo.answer("a0", PROMPT, WANT)
        monkeypatch.setattr(LoraLayers, "make_room", full)
        made = await gather_all(engine.generate(prompt, greedy(), adapter="a1") for prompt in PROMPTS)
        failures = 0
        made += await gather_all(engine.generate(prompt, greedy(), adapter="a1") for prompt in PROMPTS)
        for prompt, outcome in zip([*PROMPTS, *PROMPTS], made, strict=True):
            assert isinstance(outcome, RequestFailed) or outcome.token_ids == zoo.answer("a1", prompt, WANT)
        assert not any(isinstance(outcome, RequestFailed) for outcome in made[len(PROMPTS) :])
        await assert_given_back(engine)


# ---------------------------------------------------------------- cached prefixes


async def test_only_the_same_content_shares_a_cached_prefix(zoo: Zoo, tmp_path: Path) -> None:
    twin = zoo.copy("a1", tmp_path / "another folder")
    async with await load(zoo, adapters={"a1": zoo.path("a1"), "a2": zoo.path("a2"), "twin": twin}) as engine:
        for name in (None, "a1", "a2"):  # each first to come, whatever is cached under the others
            assert await ask(engine, name, PROMPT) == (zoo.answer(name, PROMPT, WANT), 0)
            assert await ask(engine, name, PROMPT) == (zoo.answer(name, PROMPT, WANT), PAGES_OF_IT)
        right = (zoo.answer("a1", PROMPT, WANT), PAGES_OF_IT)
        assert info_of(engine, "twin").digest == info_of(engine, "a1").digest
        assert await ask(engine, "twin", PROMPT) == right
        await engine.unload_adapter("a1")
        await engine.load_adapter("again", twin)
        assert await ask(engine, "again", PROMPT) == right
        for name in ("again", "twin"):
            await engine.unload_adapter(name)
        await engine.load_adapter("a1", zoo.path("a1"))
        assert await ask(engine, "a1", PROMPT) == right, "unloaded altogether and loaded again"
        await assert_given_back(engine)


# ---------------------------------------------------------------- changed content


async def test_old_requests_end_on_the_old_content_and_new_ones_use_the_new(zoo: Zoo) -> None:
    """One slot and room for two rows: of the old requests some run, some wait in the queue, at the first reload."""
    want, versions = 16, []
    async with await load(zoo, adapters={"a3": zoo.path("a3")}, max_loras=1, max_num_seqs=2) as engine:
        calls: list[tuple[int, asyncio.Task[Any]]] = []
        answers = []
        for version in range(3):
            if version:
                zoo.draw("a3")
                await engine.load_adapter("a3", zoo.path("a3"))
            versions.append(info_of(engine, "a3").digest)
            answers.append([zoo.answer("a3", prompt, want) for prompt in PROMPTS])
            calls += [
                (index, asyncio.create_task(engine.generate(prompt, greedy(want), adapter="a3")))
                for index, prompt in enumerate(PROMPTS)
            ]
            await until(lambda: info_of(engine, "a3").requests == len(PROMPTS))
        assert len(set(versions)) == 3
        made = [(await call).token_ids for _, call in calls]
        assert made == [tokens for version in answers for tokens in version]
        assert answers[0] != answers[1] != answers[2]
        assert await ask(engine, "a3", PROMPT) == (answers[2][1][:WANT], PAGES_OF_IT)
        await assert_given_back(engine)
        assert engine.stats().adapters["in_memory"] == 1
