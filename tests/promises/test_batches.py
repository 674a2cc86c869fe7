"""Many requests, some of them at a time: what is taken when, in which order it comes, and what leaving ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from typing import Any

import pytest
from support.fake_engine import idle

from asyncengine import AsyncEngine, Engine, SamplingParams
from asyncengine.batches import as_completed
from asyncengine.errors import InvalidParameter, WrongLoop

SHORT = SamplingParams(max_tokens=2, temperature=0)


@pytest.fixture
async def engine() -> AsyncIterator[AsyncEngine]:
    async with await AsyncEngine.from_pretrained("demo", show_progress=False, num_threads=1) as engine:
        yield engine


async def test_items_are_taken_when_there_is_room_and_come_as_they_end() -> None:
    taken, gates = [], [asyncio.Event() for _ in range(4)]

    def items() -> Iterator[int]:
        for item in range(4):
            taken.append(item)
            yield item

    async def run(item: int) -> int:
        await gates[item].wait()
        if item == 1:
            raise ValueError("one")
        return item * 10

    async with aclosing(as_completed(items(), run, 2)) as outcomes:
        gates[1].set()
        item, error = await anext(outcomes)
        assert (item, str(error), taken) == (1, "one", [0, 1])
        gates[2].set()
        assert await anext(outcomes) == (2, 20)
        assert taken == [0, 1, 2]
        gates[0].set()
        gates[3].set()
        assert [each async for each in outcomes] == [(0, 0), (3, 30)]


async def test_leaving_cancels_what_runs() -> None:
    ended = asyncio.Event()

    async def run(item: int) -> int:
        try:
            await asyncio.sleep(0 if item == 0 else 1000)
        except asyncio.CancelledError:
            ended.set()
            raise
        return item

    async with aclosing(as_completed(range(2), run, 2)) as outcomes:
        assert await anext(outcomes) == (0, 0)
    await asyncio.wait_for(ended.wait(), 10)


async def test_a_batch_gives_what_single_calls_give(engine: AsyncEngine) -> None:
    chat = {"messages": [{"role": "user", "content": "hello"}], "params": SHORT}
    rows = [{"prompt": "One", "params": SHORT}, chat, {"prompt": "", "adapter": "missing"}]
    outcomes = dict([each async for each in engine.batch(rows, in_flight=2)])
    assert set(outcomes) == {0, 1, 2}
    assert outcomes[0].text == (await engine.generate("One", SHORT)).text
    assert outcomes[1].text == (await engine.chat(chat["messages"], SHORT)).text
    assert isinstance(outcomes[2], InvalidParameter)
    with pytest.raises(InvalidParameter, match="in_flight"):
        await anext(engine.batch(rows, in_flight=0))


async def test_rows_that_are_none_are_refused_by_their_number(engine: AsyncEngine) -> None:
    for nothing in (None, 5, engine):
        with pytest.raises(InvalidParameter, match="rows: must be an iterable of mappings"):
            await anext(engine.batch(nothing))  # type: ignore[arg-type]
    rows: list[Any] = [None, 5, "prompt", ["prompt"], {}, {"text": "a"}, {"prompt": "a", 5: 6}]
    errors = dict([each async for each in engine.batch(rows)])
    assert all(isinstance(error, InvalidParameter) for error in errors.values())
    for number in range(6):
        assert str(errors[number]).startswith(f'rows[{number}]: must be a mapping with "messages" or "prompt"')
    assert str(errors[6]).startswith("5: unknown parameter")


async def test_leaving_a_batch_aborts_its_requests(engine: AsyncEngine) -> None:
    endless = SamplingParams(max_tokens=1000, ignore_eos=True)
    rows = [{"prompt": "a", "params": SHORT}, {"prompt": "b", "params": endless}]
    async with aclosing(engine.batch(rows)) as outcomes:
        number, _ = await anext(outcomes)
    assert number == 0
    await idle(engine)


async def test_blocking_batches_are_the_same_and_leave_alike(engine: AsyncEngine) -> None:
    """Also on the thread of a running loop, where a notebook's cells are, if the engine has a thread of its own."""
    rows = [{"prompt": "One", "params": SHORT}, {"prompt": ""}, {"prompt": "Two", "params": SHORT}]
    with Engine.from_pretrained("demo", show_progress=False, num_threads=1) as blocking:
        outcomes = dict(blocking.batch(iter(rows), in_flight=2))
        assert outcomes[0].text == blocking.generate("One", SHORT).text
        assert outcomes[2].text == blocking.generate("Two", SHORT).text
        assert isinstance(outcomes[1], InvalidParameter)
        with pytest.raises(InvalidParameter, match="in_flight"):
            next(blocking.batch(rows, in_flight=0))
        endless = {"prompt": "b", "params": SamplingParams(max_tokens=1000, ignore_eos=True)}
        answers = blocking.batch([rows[0], endless])
        assert next(answers)[0] == 0
        answers.close()
        await idle(blocking.aengine)
    with pytest.raises(WrongLoop):
        next(Engine(engine).batch(rows))
