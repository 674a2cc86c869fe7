"""Prefixes in the caches of other engines: a request that was told of such a peer waits for its pages as for a disk's.

The peer is asked what it has (`find`); where that is more than is here, and sooner had than computed, the request gets
pages which are filled batch by batch (`load`), each batch a stream of records (`kvcache.store.prefix_stream`) that says
what it was computed with, for which tokens, and has a checksum for everything. A peer that does not answer, answers too
late or with anything else is a reading that ends early: what is not there is computed, and nobody else has waited.

The peer locks nothing. It copies pages as the writer of the durable cache does, and looks afterwards whether its tree
still had them (`kvcache.saving`); a page that has gone meanwhile is an answer less.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
from typing import Any, TypeVar

from asyncengine.engine.clock import Clock
from asyncengine.engine.prefix_sources import Hit, Loaded, Source, batches_of
from asyncengine.engine.prefix_store import Rates
from asyncengine.kvcache import KVCache
from asyncengine.kvcache.radix_tree import Namespace
from asyncengine.kvcache.saving import Unsaved
from asyncengine.kvcache.store.prefix_stream import PrefixReader, write_prefix
from asyncengine.kvcache.store.record import Identity, RecordError, fingerprint_of
from asyncengine.request_spec import Peer
from asyncengine.scheduler.messages import PrefixLoaded
from asyncengine.scheduler.restores import RestoreOrder, Wanted
from asyncengine.seams import PageMemory
from asyncengine.step import Batch, RecordPart

# Tasks that an object has under way.

T = TypeVar("T")


class Tasks:
    """Tasks of one event loop, kept while they run: the loop itself holds them by weak references."""

    def __init__(self) -> None:
        self._running: dict[asyncio.Task[Any], None] = {}

    def start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.get_running_loop().create_task(work)
        self._running[task] = None
        task.add_done_callback(lambda done: self._running.pop(done, None))
        return task

    def cancel(self) -> None:
        """Cancel all. Raises `RuntimeError` if their loop is closed."""
        for task in list(self._running):
            task.cancel()

    async def end(self) -> None:
        """Cancel all, and wait until they have ended."""
        self.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)


logger = logging.getLogger("asyncengine")

ASK_SECONDS = 0.25
"""Seconds that a request waits for a peer to say what it has, at most."""
BATCH_BYTES = 4 * 2**20
"""Bytes of the records of one answer, if one record alone is not more. A pull has two answers under way."""
MOST_PULLS = 2
"""Pulls that run at a time, and answers that are copied at a time; others wait for their turn."""
PLANNED_SECONDS = 1.0
"""Seconds that a request waits for such an answer, and beyond the time that its pages take, where a peer has computed
them for it: both are busy."""
PLANNED_RATE = 50e6
"""Bytes a second that such a peer is granted at least."""
FORGET_SECONDS = 30.0
"""Seconds after which a peer's rate counts as unknown again: it may have been slow, or away, for a while."""
_LEAST_TOKENS = 64
"""Tokens of a prompt in a step from which on its time says how fast prompts are computed."""

Call = Callable[[Peer, bytes], Awaitable[bytes]]
"""Brings a question to a peer and its answer back."""
Part = tuple[RecordPart, int, int]
"""Part, place of its page among those of the prefix, and number in the memory of that part."""


class PeerPrefixes(Source):
    """One engine's questions to its peers, and its answers to theirs. Every method is called on the engine's loop."""

    def __init__(
        self, kv: KVCache, identity: Identity, memory: PageMemory, clock: Clock, call: Call,
    ) -> None:  # fmt: skip
        """`identity`: what the numbers in `memory` depend on; peers of another one are of no use."""
        self._kv, self._memory, self._clock, self.call = kv, memory, clock, call
        self._identity: Identity | None = identity
        self.fingerprint = fingerprint_of(identity).hex()
        self._compute: float | None = None
        """Tokens of a prompt that the model computes in a second, as seen in the last step with a prompt."""
        self._read: dict[str, tuple[float, float]] = {}
        """Bytes a second of each peer, by name, and the clock reading until which that counts; 0.0: it failed."""
        self._pulls, self._answers = asyncio.Semaphore(MOST_PULLS), asyncio.Semaphore(MOST_PULLS)
        self._tasks = Tasks()

    def saw(self, batch: Batch, seconds: float) -> None:
        if batch.num_tokens - len(batch.rows) >= _LEAST_TOKENS and seconds > 0:
            self._compute = batch.num_tokens / seconds

    def forget(self) -> None:
        self._identity = None

    def close(self) -> None:
        """Ask and answer no more. Idempotent."""
        self._identity = None
        with contextlib.suppress(RuntimeError):  # their loop is closed
            self._tasks.cancel()

    # ---------------------------------------------------------------- asking

    def find(self, wanted: Wanted, best: Hit, answer: Callable[[Hit], None]) -> None:
        peer, cached = wanted.request.spec.peer, wanted.cached // self._kv.page_size
        if peer is None or self._identity is None or peer.pages <= max(best.pages, cached):
            answer(best)
            return
        tokens = wanted.request.keys[: wanted.limit]

        async def ask() -> None:
            found = best
            try:
                found = await self._ask(peer, wanted.namespace, tokens, cached, best)
            except Exception as error:
                self._fail(peer, error)
            answer(found)

        if min(tokens, default=-1) < 0:  # a picture's id, which no record has
            answer(best)
        else:
            self._tasks.start(ask())

    async def _ask(
        self, peer: Peer, namespace: Namespace, tokens: Sequence[int], cached: int, best: Hit
    ) -> Hit:  # fmt: skip
        """The pages that `peer` has of `tokens`, of which `cached` are here; `best` where they are not worth it."""
        size, memory = self._kv.page_size, self._memory
        read, until = self._read.get(peer.name, (None, 0.0))
        rates, seconds = Rates(read if until > self._clock.now() else None, self._compute), 0.0
        if peer.planned:
            rates, seconds = Rates(PLANNED_RATE), PLANNED_SECONDS
        most = min(peer.pages, len(tokens) // size)
        per_page = memory.nbytes(RecordPart.PAGE) + (memory.nbytes(RecordPart.WINDOW) if self._kv.windows else 0)

        def patience(pages: int) -> float:
            new = pages - cached if pages > best.pages else 0
            return rates.patience(max(0, new) * size, new * per_page + memory.nbytes(RecordPart.STATE))

        if rates.read == 0.0 or not patience(most):  # not even if it has what it had
            return best
        async with asyncio.timeout(seconds or ASK_SECONDS):
            answer = await self.call(peer, self._question(namespace, tokens[: most * size]))
        pages = min(most, int(answer))  # b"" is no number: it refuses
        wait = patience(pages)
        return Hit(pages, wait + seconds, partial(self._load, peer)) if wait else best

    def _question(self, namespace: Namespace, tokens: Sequence[int], parts: Sequence[Part] | None = None) -> bytes:
        """JSON: how much of `tokens` is there, or records of `parts`."""
        asked = {"fingerprint": self.fingerprint, "namespace": namespace, "tokens": tokens}
        if parts is not None:
            asked["parts"] = [(part, place) for part, place, _ in parts]
        return json.dumps(asked).encode()

    def _load(self, peer: Peer, order: RestoreOrder, loaded: Loaded) -> None:
        self._tasks.start(self._fill(peer, order, loaded))

    async def _fill(self, peer: Peer, order: RestoreOrder, loaded: Loaded) -> None:
        parts, filled = order.places, list[Part]()
        async with self._pulls:
            began = self._clock.now()
            try:
                await self._pull(order, peer, parts, filled)
                nbytes = sum(self._memory.nbytes(part) for part, _, _ in parts)
                now = self._clock.now()
                self._read[peer.name] = nbytes / max(1e-6, now - began), now + FORGET_SECONDS
            except Exception as error:
                if order.late or not order.cancelled:
                    self._fail(peer, error)
        missing = parts[len(filled) :]
        end = next((place for part, place, _ in missing if part is RecordPart.PAGE), order.pages[-1][0] + 1)
        loaded(PrefixLoaded(order.number, end - order.start, bool(order.slot) and not missing))

    async def _pull(self, order: RestoreOrder, peer: Peer, parts: Sequence[Part], filled: list[Part]) -> None:
        """Fill `parts` batch by batch, and note in `filled` what is. While one is filled, the next is on its way.

        Nothing fills memory any more when it has ended: it waits for the thread that does, and for no answer."""
        coming: deque[asyncio.Task[bytes]] = deque()
        batches = list(batches_of(parts, lambda part: self._memory.nbytes(part[0]), BATCH_BYTES))
        try:
            for number, batch in enumerate(batches):
                for after in batches[number + len(coming) : number + 2]:
                    question = self._question(order.namespace, order.tokens, after)
                    coming.append(asyncio.ensure_future(self.call(peer, question)))
                stream = await asyncio.wait_for(coming.popleft(), max(0.0, order.until - self._clock.now()))
                await asyncio.to_thread(self._fill_parts, stream, order, batch)
                filled += batch
        finally:
            for task in coming:
                task.cancel()

    def _fill_parts(self, stream: bytes, order: RestoreOrder, parts: Sequence[Part]) -> None:
        """Read a peer's records into memory. Raises `RecordError` for anything else than was asked for."""
        size, identity = self._kv.page_size, self._identity
        reader = PrefixReader(io.BytesIO(stream))
        if identity is None or reader.tokens != order.tokens:
            raise RecordError("is another prefix than was asked for")
        reader.check(identity, order.namespace, size)

        def go_on() -> None:
            if order.cancelled:
                raise RecordError("is waited for by nobody any more")

        reader.fill(parts, self._memory, size, go_on)

    def _fail(self, peer: Peer, error: Exception) -> None:
        logger.info("no prefix from %s, it is computed: %r", peer.name, error)
        self._read[peer.name] = 0.0, self._clock.now() + FORGET_SECONDS

    # ---------------------------------------------------------------- answering

    async def answer(self, question: bytes) -> bytes:
        """The answer to a peer: the number of pages that are here, or records; b"" where they are not, or of another
        fingerprint. Raises for what is no question."""
        asked = json.loads(question)
        namespace, tokens, parts = tuple(asked["namespace"]), asked["tokens"], asked.get("parts")
        identity = self._identity
        if identity is None or asked["fingerprint"] != self.fingerprint:
            return b""
        if parts is None:
            return b"%d" % (self._kv.peek(namespace, tokens, len(tokens)) // self._kv.page_size)
        async with self._answers:
            notes = self._notes(namespace, tokens, [(RecordPart(part), int(place)) for part, place in parts])
            return await asyncio.to_thread(self._copy, identity, namespace, tokens, notes)

    def _notes(
        self, namespace: Namespace, tokens: Sequence[int], parts: Sequence[tuple[RecordPart, int]]
    ) -> dict[Part, Unsaved]:
        """Notes of those of `parts` that are here, without a digest: `write_prefix` makes that."""
        kv, path = self._kv, {}
        node = kv.tree.peek(namespace, tokens, len(tokens))
        while node is not None and node.parent is not None:
            path[node.depth - 1], node = node, node.parent
        notes: dict[Part, Unsaved] = {}
        nbytes = 0
        for part, place in parts:
            node = path.get(place)
            owner = node.twin if node is not None and part is RecordPart.WINDOW else node
            states = kv.states if part is RecordPart.STATE else None
            snapshot = None if states is None or node is None else states.snapshot_of(node)
            nbytes += self._memory.nbytes(part)
            if node is None or owner is None or (states is None) is (part is RecordPart.STATE):
                break
            number = owner.page if states is None else 0 if snapshot is None else snapshot.slot
            if not number or (notes and nbytes > BATCH_BYTES):
                break
            notes[part, place, number] = Unsaved(part, number, b"", b"", owner, owner.created, snapshot, states)
        return notes

    def _copy(
        self, identity: Identity, namespace: Namespace, tokens: Sequence[int], notes: dict[Part, Unsaved]
    ) -> bytes:  # fmt: skip
        stream = io.BytesIO()
        write_prefix(
            stream, identity, namespace, tokens, self._kv.page_size, notes, self._memory,
            lambda: all(note.is_intact() for note in notes.values()),
        )  # fmt: skip
        return stream.getvalue()
