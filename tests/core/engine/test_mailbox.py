"""Tokens on their way from the engine's thread to a reader: those that nobody has taken join, and nothing is lost."""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
from collections import Counter
from functools import partial
from itertools import count
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
from support.fake_engine import make_core, make_engine, until
from support.long import TIMES

from asyncengine import SamplingParams
from asyncengine.engine import mailbox as mailbox_module
from asyncengine.engine.assembler import Assembler
from asyncengine.engine.mailbox import MAX_WOKEN, WAKE_TOKENS, Mailbox, Waiter, wake_all
from asyncengine.options import RequestOptions
from asyncengine.outputs import Chunk, LogprobEntry
from asyncengine.stream import TokenStream
from asyncengine.testing.world import World, simulate


def test_tokens_that_wait_are_one_chunk() -> None:
    mailbox = Mailbox()
    for token in range(WAKE_TOKENS + 3):
        mailbox.put_token(f"{token} ", token, 0)
    first, second = mailbox.take()
    assert first.token_ids == list(range(WAKE_TOKENS))
    assert second.token_ids == [WAKE_TOKENS, WAKE_TOKENS + 1, WAKE_TOKENS + 2]
    assert first.text + second.text == "".join(f"{token} " for token in range(WAKE_TOKENS + 3))
    mailbox.put_token("a", 1, 0)
    assert first.token_ids == list(range(WAKE_TOKENS)), "what was taken is the reader's"
    assert [chunk.token_ids for chunk in mailbox.take()] == [[1]]


def test_what_is_more_than_a_token_or_of_another_sample_stands_by_itself() -> None:
    mailbox = Mailbox()
    mailbox.put_token("a", 1, 0)
    mailbox.put_token("b", 2, 1)
    mailbox.put_token("c", 3, 0)
    mailbox.put(Chunk("d", [4], None, 0, [LogprobEntry(4, "d", -1.0, b"d")]))
    mailbox.put_token("e", 5, 0)
    mailbox.put(Chunk("", [], "stop", 0))
    assert [(chunk.text, chunk.index, chunk.token_ids) for chunk in mailbox.take()] == [
        ("a", 0, [1]), ("b", 1, [2]), ("c", 0, [3]), ("d", 0, [4]), ("e", 0, [5]), ("", 0, []),
    ]  # fmt: skip


@pytest.mark.parametrize("many", [1, 3, WAKE_TOKENS])
async def test_a_reader_is_woken_for_so_many_tokens_or_the_end(many: int) -> None:
    mailbox = Mailbox()
    assert mailbox.announce(many) is not None
    woken = [mailbox.put_token("a", token, 0) is not None for token in range(many)]
    assert woken == [False] * (many - 1) + [True]
    mailbox.take()
    assert mailbox.announce(many) is not None
    assert mailbox.put(Chunk("", [], "stop")) is not None


class Alarm(threading.Event):
    """An event for which nobody can wait in vain."""

    def wait(self, timeout: float | None = None) -> bool:
        assert self.is_set(), "the reader would wait for ever"
        return True


class PutAt:
    """A function for `sys.settrace` that puts one token before a line of the mailbox's file, counted from 1, is run."""

    def __init__(self, mailbox: Mailbox, line: int) -> None:
        self.mailbox, self.left = mailbox, line
        self.told: list[Waiter | None] = []
        """Results of `put_token`; empty: fewer lines were run."""

    def trace(self, frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code.co_filename != mailbox_module.__file__:
            return None
        self.left -= event == "line"
        if event == "line" and not self.left:
            self.told.append(self.mailbox.put_token("a", 1, 0))
            wake_all(waiter for waiter in self.told if waiter is not None)
        return self.trace


@pytest.mark.parametrize("blocking", [False, True])
async def test_the_only_token_is_put_at_any_line_of_its_reader(blocking: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The token comes at any line from a reader's look to its wait: it finds the token, or the writer must wake it."""
    monkeypatch.setattr(mailbox_module, "threading", SimpleNamespace(Event=Alarm))
    for put_at in count(1):
        mailbox = Mailbox()
        putting = PutAt(mailbox, put_at)
        waits, before = None, sys.gettrace()
        sys.settrace(putting.trace)
        try:
            chunks = mailbox.receive_blocking() if blocking else mailbox.take()
            waits = None if chunks else mailbox.announce()
        except AssertionError:
            assert not putting.told, f"lost at line {put_at}"
        finally:
            sys.settrace(before)
        if not putting.told:  # behind the last line
            break
        if waits is not None:
            assert putting.told == [waits], f"lost at line {put_at}"
        assert [each.token_ids for each in chunks or mailbox.take()] == [[1]]
    assert put_at > 8


@pytest.mark.parametrize("read", [True, False], ids=["read token by token", "read at its end"])
async def test_a_long_answer_is_not_as_many_objects_as_it_has_tokens(read: bool) -> None:
    """The garbage collector would look through the whole program each time there are so many more."""
    many = 1000

    def ours() -> int:
        """Objects of the engine's classes that the collector looks through."""
        gc.collect()
        return sum(str(type(each).__module__).startswith("asyncengine") for each in gc.get_objects())

    async with make_engine(pages=1024) as engine:
        stream = engine.stream([2, 3], SamplingParams(max_tokens=many, ignore_eos=True, temperature=0.0))
        await anext(stream)
        before = ours()
        reading = asyncio.create_task(stream.result()) if not read else None
        while read and engine.stats().generated_tokens < many - 1:
            await anext(stream)
        await until(lambda: engine.stats().generated_tokens >= many - 1)
        assert ours() - before < many // 3  # a node of the prefix cache for every page of four tokens
        completion = await (stream.result() if reading is None else reading)
        assert len(completion.token_ids) == many


@pytest.mark.parametrize("reader", ["thread", "task", "stream"])
def test_a_token_that_joins_a_chunk_under_its_reader(reader: str) -> None:
    """The engine's thread may take the last chunk back for a moment at any line, and its reader finds all the same; a
    reader that has just announced itself again is not forgotten with its former announcement."""
    for seed in range(40 * TIMES):
        world = World(seed, switching=0.5)
        world.interrupt_lines_of([str(mailbox_module.__file__)], 1.0)
        found: list[int] = []
        simulate(world, partial(_read_across_threads, world, reader, found), shuffled=True)
        assert not world.complaints, world.complaints
        assert found == list(range(40)), seed


def _read_across_threads(world: World, reader: str, found: list[int]) -> None:
    core = make_core(pages=64)
    prepared = core.prepare([5, 6], SamplingParams(max_tokens=40), RequestOptions())
    mailbox = prepared.mailbox

    def put_each() -> None:
        for token in range(40):
            waiter = mailbox.put_token("a", token, 0)
            if waiter is not None:
                wake_all([waiter])

    async def read() -> None:
        async def start() -> Assembler:
            return Assembler(prepared, core.loop.clock.now)

        stream = TokenStream(start, lambda tickets: None)
        while len(found) < 40:
            chunks = [await anext(stream)] if reader == "stream" else await mailbox.receive()
            found.extend(token for chunk in chunks for token in chunk.token_ids)

    world.spawn(put_each, "engine")
    if reader == "thread":
        while len(found) < 40:
            found.extend(token for chunk in mailbox.receive_blocking() for token in chunk.token_ids)
    else:
        asyncio.run(read())


@pytest.mark.parametrize("foreign", [False, True])
async def test_timers_run_while_many_readers_are_woken(foreign: bool) -> None:
    loop = asyncio.get_running_loop()
    waiters = [loop.create_future() for _ in range(3 * MAX_WOKEN + 5)]
    turn, woken = 0, list[tuple[int, int]]()

    def next_turn() -> None:
        nonlocal turn
        turn += 1
        loop.call_soon(next_turn)

    async def read(number: int) -> None:
        await waiters[number]
        woken.append((turn, number))

    readers = [asyncio.create_task(read(number)) for number in range(len(waiters))]
    await asyncio.sleep(0)
    loop.call_soon(next_turn)
    if foreign:
        await asyncio.to_thread(wake_all, waiters)
    else:
        wake_all(waiters)
    await asyncio.gather(*readers)
    assert [number for _, number in woken] == list(range(len(waiters)))
    assert max(Counter(turn for turn, _ in woken).values()) == MAX_WOKEN
