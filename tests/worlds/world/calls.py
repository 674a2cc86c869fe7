"""Callers in a life: how each of them asks, reads, leaves, and notes what it got."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from worlds.world.plan import Call

from asyncengine.outputs import Chunk, Completion
from asyncengine.stream import SyncTokenStream, TokenStream
from asyncengine.sync_engine import Engine

if TYPE_CHECKING:
    from worlds.world.life import Life


class Record:
    """The outcome of one call, as its caller saw it."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self.tokens: list[list[int]] = [[] for _ in range(call.params.n)]
        self.reasons: dict[int, str] = {}
        self.problems: list[str] = []
        self.error: Exception | None = None
        self.begun = self.left = self.aborted = False
        self.submitted = 0.0
        self.ended: float | None = None

    def take(self, chunk: Chunk) -> None:
        """Note a chunk."""
        if chunk.index in self.reasons:
            self.problems.append(f"a chunk after the end: {chunk!r}")
        self.tokens[chunk.index] += chunk.token_ids
        if chunk.finish_reason is not None:
            self.reasons[chunk.index] = chunk.finish_reason


class _BlockingStream:
    """A stream for threads, in the shape of one for tasks."""

    def __init__(self, stream: SyncTokenStream) -> None:
        self._stream = stream
        self.abort = stream.abort

    def __aiter__(self) -> _BlockingStream:
        return self

    async def __anext__(self) -> Chunk:
        for chunk in self._stream:
            return chunk
        raise StopAsyncIteration

    async def aclose(self) -> None:
        self._stream.close()


class _BlockingEngine:
    """An engine for threads, in the shape of one for tasks: its coroutines never wait for a loop."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def generate(self, *args: Any, **options: Any) -> Completion:
        return self._engine.generate(*args, **options)

    def stream(self, *args: Any, **options: Any) -> _BlockingStream:
        return _BlockingStream(self._engine.stream(*args, **options))


def ask_blocking(life: Life, call: Call) -> None:
    """`ask` on a plain thread."""
    with suppress(StopIteration):
        ask(life, call).send(None)


async def ask(life: Life, call: Call) -> None:
    """One call. Never raises but for cancellation: what came is in the call's record."""
    record = life.records[call.number]
    record.begun = True
    try:
        await life.sleep(call, max(0.0, call.at - life.now()))
        record.submitted = life.now()
        if call.style != "cancel":
            await _read(life, call, record)
            return
        asked = asyncio.get_running_loop().create_task(_read(life, call, record))
        asked.add_done_callback(lambda done: done.cancelled() or done.exception())  # if this task is cancelled, too
        await asyncio.wait([asked], timeout=call.patience)
        record.left = record.left or not asked.done()
        asked.cancel()
        await asyncio.wait([asked])
        if not asked.cancelled():
            asked.result()
    except asyncio.CancelledError:
        record.left = True
        raise
    except Exception as error:
        record.error = error
    finally:
        record.ended = life.now()
        life.note_end()


async def _read(life: Life, call: Call, record: Record) -> None:
    engine: Any = life.engines[call.engine]
    options: dict[str, Any] = dict(call.options)
    if call.caller == "thread":
        engine = _BlockingEngine(Engine(engine))
    else:
        engine, options["model"] = life.group, str(call.engine)
    if call.style == "result":
        for index, sample in enumerate((await engine.generate(call.prompt, call.params, **options)).samples):
            record.tokens[index], record.reasons[index] = sample.token_ids, sample.finish_reason
        return
    stream = engine.stream(call.prompt, call.params, **options)
    if call.style.startswith("abort"):
        by_id = call.style == "abort by id"
        aborts = (lambda: life.engines[call.engine].abort(f"call-{call.number}")) if by_id else stream.abort
        life.abort_after(call.patience, record, aborts)
    chunks = 0
    async for chunk in stream:
        record.take(chunk)
        life.note_progress()
        chunks += 1
        if call.style in ("leave", "drop") and chunks == call.chunks:
            record.left = True
            break
        if call.style == "slow":
            await life.sleep(call, call.patience)
    if isinstance(stream, TokenStream) and stream.request_id is None:
        record.left = True  # aborted before it started: there was nothing to end
    if call.style != "drop":  # which lets go of it without a word
        await stream.aclose()
