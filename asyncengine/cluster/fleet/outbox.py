"""The replica's end of all its streams: one place where the engine puts and one reader takes what is new of all.

A stream's chunks wait in its mailbox, as in any engine. One delivery carries everything that is new since the last
one, with each sample's chunks merged: the slower the reader, the fewer and larger the deliveries, and what waits is
bounded by the requests' own `max_tokens`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from itertools import groupby

from asyncengine.cluster.fleet.wire import Beginning, Parcel, Piece, Vectors
from asyncengine.engine.mailbox import Mailbox, Waiter
from asyncengine.engine.vector_window import VectorWindow
from asyncengine.outputs import Chunk
from asyncengine.request_spec import RequestSpec
from asyncengine.scheduler import Output


class OutboxSlot(Mailbox):
    """A request's mailbox that tells the outbox when it has something."""

    __slots__ = ("_outbox", "begun", "key")

    def __init__(self, key: int, outbox: Outbox) -> None:
        super().__init__()
        self.key = key
        self.begun = False
        self._outbox = outbox

    def put(self, chunk: Chunk) -> Waiter | None:
        super().put(chunk)
        return self._outbox.note(self)


class OutboxWindow(VectorWindow):
    """Texts of one order. It tells the outbox when the last of them has ended: nothing of it is left here then."""

    __slots__ = ("_outbox", "key")

    def __init__(self, key: int, specs: Sequence[RequestSpec], outbox: Outbox) -> None:
        super().__init__(specs)
        self.key = key
        self._outbox = outbox

    def put(self, output: Output) -> Waiter | None:
        super().put(output)
        if self.tickets:
            return None
        if self.fault is not None:
            return self._outbox.note_vectors(Vectors(self.key, None, self.cached_tokens, self.fault))
        import numpy as np

        vectors = np.stack([vector for vector in self.vectors if vector is not None])
        return self._outbox.note_vectors(Vectors(self.key, vectors, self.cached_tokens))


class Outbox:
    """Which requests have something new. Lives on the engine's loop."""

    def __init__(self) -> None:
        self._ready: dict[int, OutboxSlot] = {}
        self._vectors: list[Vectors] = []
        self._waiter: asyncio.Future[None] | None = None

    def note(self, slot: OutboxSlot) -> Waiter | None:
        """Returns whom to wake, or None."""
        self._ready[slot.key] = slot
        return self._take_waiter()

    def note_vectors(self, vectors: Vectors) -> Waiter | None:
        """The same of what has come of an order of texts."""
        self._vectors.append(vectors)
        return self._take_waiter()

    def _take_waiter(self) -> Waiter | None:
        waiter, self._waiter = self._waiter, None
        return waiter

    def wake(self) -> None:
        """Whoever waits looks again."""
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    async def wait(self, timeout: float) -> None:
        """Until something is new, at most `timeout` seconds."""
        if self._ready or self._vectors:
            return
        loop = asyncio.get_running_loop()
        waiter = self._waiter = loop.create_future()
        timer = loop.call_later(timeout, self.wake)
        try:
            await waiter
        finally:
            timer.cancel()

    def refuse(self, key: int, indices: Iterable[int], error: Exception) -> None:
        """A request, of samples of these indices, that the engine did not take."""
        slot = OutboxSlot(key, self)
        slot.cause = error
        for index in indices:
            Mailbox.put(slot, Chunk("", [], "error", index, error=str(error)))
        self._ready[key] = slot
        self.wake()

    def refuse_texts(self, key: int, error: Exception) -> None:
        """An order of texts that the engine did not take."""
        self._vectors.append(Vectors(key, None, fault=(0, Output(key, reason="error", error=error))))
        self.wake()

    def take_vectors(self) -> list[Vectors]:
        """All that is new."""
        vectors, self._vectors = self._vectors, []
        return vectors

    def take(self) -> list[Parcel]:
        """The same of what is written."""
        ready, self._ready = self._ready, {}
        return [_parcel(slot) for slot in ready.values()]


def _parcel(slot: OutboxSlot) -> Parcel:
    chunks = slot.take()
    pieces = [_merged(list(run)) for _, run in groupby(chunks, key=lambda chunk: chunk.index)]
    beginning = None
    if not slot.begun and slot.started_at is not None:
        slot.begun = True
        at = slot.started_at if slot.first_token_at is None else slot.first_token_at
        beginning = Beginning(slot.cached_tokens, at - slot.started_at, slot.prompt_logprobs)
    return Parcel(slot.key, pieces, beginning, slot.cause)


def _merged(run: list[Chunk]) -> Piece:
    if len(run) == 1:
        (one,) = run
        return Piece(one.index, one.text, one.token_ids, one.finish_reason, one.logprobs, one.error)
    last = run[-1]
    logprobs = [entry for chunk in run for entry in chunk.logprobs or ()]
    tokens = [token for chunk in run for token in chunk.token_ids]
    text = "".join(chunk.text for chunk in run)
    return Piece(last.index, text, tokens, last.finish_reason, logprobs or None, last.error)
