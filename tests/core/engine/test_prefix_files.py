"""Prefixes in files on a fake engine: what others do meanwhile leaves right tokens, balanced books and whole files."""

from __future__ import annotations

import asyncio
import os
import random
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from support.fake_engine import CACHE_KINDS, GREEDY, PATIENCE, SteppedExecutor, Steps, make_core, until
from support.fake_memory import FakePageMemory

from asyncengine import AsyncEngine, EngineClosed, InvalidParameter, RequestFailed
from asyncengine.engine.prefix_files import Prefixes
from asyncengine.outputs import Completion
from asyncengine.scheduler.messages import ImportPrefix, Message, PinPrefix, PrefixFound, PrefixLoaded, UnpinPrefix
from asyncengine.step import RecordType
from asyncengine.testing.leaks import assert_nothing_held
from asyncengine.testing.replay import Recording, replay

SIZE = 4
PROMPT = [2 + (7 * place) % 90 for place in range(30)]


class Memory(FakePageMemory):
    """Page memory whose second page is copied only when the gate opens."""

    def __init__(self, executor: Executor) -> None:
        super().__init__(executor)
        self.gate = executor.gate
        self.waiting = executor.waiting
        self.copied = 0

    def buffers(self, part: RecordType, index: int) -> Sequence[memoryview]:
        self.copied += 1
        if self.copied == 2:
            self.waiting.set()
            assert self.gate.wait(PATIENCE)
        return super().buffers(part, index)


class Executor(SteppedExecutor):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.gate, self.waiting = threading.Event(), threading.Event()
        self.gate.set()

    def page_memory(self) -> Memory:
        return Memory(self)

    def prepare_update(self, weights: Any, config: Any, partial: bool) -> Any:
        return lambda: self.update(2)


def engine_of(kind: str = "pages", pages: int = 128, recorder: Any = None, **settings: Any) -> AsyncEngine:
    def load() -> Any:
        executor = Executor(pages, SIZE, **CACHE_KINDS[kind])
        core = make_core(executor, wiring={"recorder": recorder}, check_every=1, **settings)
        core.prefixes = Prefixes(core.loop, lambda: {"model": kind})
        return core

    return AsyncEngine(load, hosted=True)


def executor_of(engine: AsyncEngine) -> Executor:
    return engine.core.loop.runner.executor  # type: ignore[attr-defined,no-any-return]


async def ask(engine: AsyncEngine, prompt: list[int], most: int = 5, **options: Any) -> Completion:
    answer = await engine.generate(prompt, GREEDY.replace(max_tokens=most, seed=0, ignore_eos=True), **options)
    assert answer.token_ids == executor_of(engine).model.oracle(prompt, most, 0, ()), "a wrong token"
    return answer


def content(file: Path) -> bytes:
    return file.read_bytes()


@pytest.fixture
async def file(tmp_path: Path) -> Path:
    async with engine_of() as engine:
        await engine.export_prefix(PROMPT, tmp_path / "file")
    return tmp_path / "file"


@pytest.mark.parametrize("kind", CACHE_KINDS)
async def test_random_prefixes_from_files_give_right_tokens_and_balanced_books(kind: str, tmp_path: Path) -> None:
    """Files of an engine's own and of another one's, over what is cached of them in part, in a small cache."""
    rng = random.Random(kind)
    async with engine_of(kind) as other, engine_of(kind, pages=40) as engine:
        files = 0
        for _ in range(60):
            prompt = [*PROMPT[: rng.randrange(4, 31)], *(rng.randrange(2, 97) for _ in range(rng.randrange(20)))]
            try:
                await rng.choice([other, engine]).export_prefix(prompt, tmp_path / "file")
                files += await engine.import_prefix(tmp_path / "file")
            except InvalidParameter:
                assert len(prompt) < 2 * SIZE, "too short for a page that others may start from"
            answer = await engine.generate([*prompt, 5], GREEDY.replace(max_tokens=5, seed=0))
            if kind in ("pages", "states"):
                assert answer.token_ids == executor_of(engine).model.oracle([*prompt, 5], 5, 0, (1,))
        assert files
        await until(lambda: engine.stats().pages.shared == 0)
        engine.core.loop.scheduler.check()
        assert_nothing_held(engine.core)


async def test_an_import_that_finds_no_room_fails_alone(file: Path) -> None:
    async with engine_of(pages=16) as engine:
        executor_of(engine).hold(after=1)
        running = asyncio.create_task(ask(engine, list(range(2, 42)), most=20))
        try:
            assert await asyncio.to_thread(executor_of(engine).entered.wait, PATIENCE)
            importing = asyncio.create_task(engine.import_prefix(file))
            await until(lambda: bool(engine.core.loop.sources.imports))
            executor_of(engine).release()  # messages are taken between two steps
            with pytest.raises(RequestFailed, match="requests need its pages"):
                await importing
        finally:
            executor_of(engine).release()
        await running
        assert await engine.import_prefix(file) == 28
        assert (await ask(engine, PROMPT)).usage.cached_tokens == 28


async def test_an_import_gives_way_to_a_request_that_grows(file: Path) -> None:
    async with engine_of(pages=16) as engine:
        executor = executor_of(engine)
        executor.gate.clear()
        reading = asyncio.create_task(engine.import_prefix(file))
        assert await asyncio.to_thread(executor.waiting.wait, PATIENCE)
        growing = asyncio.create_task(ask(engine, [5, 6, 7], most=50))
        await until(lambda: engine.core.loop.scheduler.restores.readings[1].order.cancelled)
        executor.gate.set()
        with pytest.raises(RequestFailed, match="requests need its pages"):
            await reading
        await growing
        engine.core.loop.scheduler.check()
        assert_nothing_held(engine.core)


@pytest.mark.parametrize("kind", CACHE_KINDS)
async def test_leaving_an_import_gives_its_pages_back(kind: str, tmp_path: Path) -> None:
    async with engine_of(kind) as engine:
        await engine.export_prefix(PROMPT, tmp_path / "file")
    async with engine_of(kind) as engine:
        executor = executor_of(engine)
        executor.gate.clear()
        reading = asyncio.create_task(engine.import_prefix(tmp_path / "file"))
        assert await asyncio.to_thread(executor.waiting.wait, PATIENCE)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):  # at once: nobody has opened the gate
            await reading
        executor.gate.set()
        await until(lambda: engine.stats().pages.free == engine.stats().pages.total)
        assert (await engine.generate(PROMPT, GREEDY.replace(max_tokens=3))).usage.cached_tokens == 0


async def test_closing_ends_an_import_and_not_an_export(file: Path, tmp_path: Path) -> None:
    engine = engine_of()
    async with engine:
        executor = executor_of(engine)
        executor.gate.clear()
        reading = asyncio.create_task(engine.import_prefix(file))
        assert await asyncio.to_thread(executor.waiting.wait, PATIENCE)
    executor.gate.set()
    with pytest.raises(EngineClosed):
        await reading
    engine = engine_of()
    async with engine:
        executor = executor_of(engine)
        executor.gate.clear()
        writing = asyncio.create_task(engine.export_prefix(PROMPT, tmp_path / "other"))
        assert await asyncio.to_thread(executor.waiting.wait, PATIENCE)
    executor.gate.set()
    assert await writing == 28  # its pages were nobody else's yet
    assert content(tmp_path / "other") == content(file)


@pytest.mark.parametrize("why", ["a request", "other weights"])
async def test_a_prefix_that_has_to_go_while_it_is_written_leaves_no_file(why: str, file: Path) -> None:
    before = content(file)
    async with engine_of(pages=16) as engine:
        executor = executor_of(engine)
        executor.gate.clear()
        writing = asyncio.create_task(engine.export_prefix([*PROMPT[:28], 5, 6, 7], file))
        assert await asyncio.to_thread(executor.waiting.wait, PATIENCE)
        if why == "a request":
            await ask(engine, [5, 6, 7], most=50)
        else:
            await engine.update_weights({})
        executor.gate.set()
        with pytest.raises(RequestFailed, match="had to leave the cache"):
            await writing
        assert content(file) == before
        assert os.listdir(file.parent) == [file.name]
        assert_nothing_held(engine.core)


async def test_weights_that_change_before_the_pages_are_there_refuse_the_file(file: Path) -> None:
    async with engine_of() as engine:
        loop = engine.core.loop
        post, updated = loop.inbox.post, threading.Event()

        def later(message: Message) -> bool:
            if isinstance(message, ImportPrefix):
                updated.set()
                assert executor_of(engine).gate.wait(PATIENCE)
            return post(message)

        loop.inbox.post = later  # type: ignore[method-assign,assignment]
        executor_of(engine).gate.clear()
        reading = asyncio.create_task(engine.import_prefix(file))
        assert await asyncio.to_thread(updated.wait, PATIENCE)
        await engine.update_weights({})
        executor_of(engine).gate.set()
        with pytest.raises(RequestFailed, match="other weights"):
            await reading
        await until(lambda: engine.stats().pages.free == engine.stats().pages.total, "its pages")
        assert not loop.sources.imports


async def test_a_recording_with_pins_and_files_replays_to_the_same_outputs(file: Path, tmp_path: Path) -> None:
    entries: list[tuple[str, Any]] = []
    engine = engine_of(recorder=lambda kind, value: entries.append((kind, value)))
    async with engine:
        recording = Recording(engine.core.config, 128, entries)
        await engine.import_prefix(file)
        async with engine.pin(PROMPT):
            answer = await ask(engine, [*PROMPT, 9])
    kinds = {type(value) for kind, value in entries if kind == "apply"}
    assert kinds >= {PinPrefix, UnpinPrefix, ImportPrefix, PrefixLoaded}
    again = Recording.load(recording.save(tmp_path / "recording"))
    executor = Executor(128, SIZE)
    outputs = replay(again, executor, restore=FakePageMemory(executor).restore)
    last = max(output.ticket for output in outputs)
    assert [output.token for output in outputs if output.ticket == last and output.token >= 0] == answer.token_ids


def test_requests_that_share_a_reading_may_leave_it_and_it_goes_on() -> None:
    """A request that waits for the durable cache joins an import that has its next page."""
    steps = Steps()
    steps.scheduler.restores.enabled = True
    steps.apply(ImportPrefix(99, "", "", tuple(PROMPT[:28])))
    (order,) = steps.scheduler.restores.take_orders()
    ticket = steps.add(PROMPT)
    ((request, *_),) = steps.scheduler.restores.take_wanted()
    steps.apply(PrefixFound(request.ticket, 7, 5.0))
    assert steps.scheduler.restores.queue
    steps.abort(ticket)
    late = steps.add(PROMPT)
    steps.scheduler.restores.take_wanted()
    steps.apply(PrefixFound(late, 7, 5.0))
    steps.now = 6.0
    steps.step()
    assert not order.cancelled
    FakePageMemory(steps.executor).restore(order)
    steps.apply(PrefixLoaded(order.number, 7))
    steps.run()
    steps.assert_right([late])
    steps.assert_empty()
