"""Prefixes in the caches of other engines: a request that was told of such a peer waits for its pages as for a disk's.

The peer is asked how many pages it has (`find`). Where these are more than are cached here, and are fetched sooner than
computed, the request gets pages which are filled batch by batch (`load`), each batch a stream of records
(`kvcache.store.prefix_stream`) that says what it was computed with, for which tokens, and has a checksum for
everything. A peer that does not answer, answers too late or with anything else is a reading that ends early: the
missing pages are computed, and no other request waits.

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
from asyncengine.step import Batch, RecordType

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
Address = tuple[RecordType, int, int]
"""(type of record, index of its page in the prefix, index in the memory of that type)."""


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
            hit = best
            try:
                hit = await self._ask(peer, wanted.namespace, tokens, cached, best)
            except Exception as error:
                self._fail(peer, error)
            answer(hit)

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
        per_page = memory.nbytes(RecordType.PAGE) + (memory.nbytes(RecordType.WINDOW) if self._kv.windows else 0)

        def patience(pages: int) -> float:
            new = pages - cached if pages > best.pages else 0
            return rates.patience(max(0, new) * size, new * per_page + memory.nbytes(RecordType.STATE))

        if rates.read == 0.0 or not patience(most):  # not worth it even if the peer still has all its pages
            return best
        async with asyncio.timeout(seconds or ASK_SECONDS):
            answer = await self.call(peer, self._question(namespace, tokens[: most * size]))
        pages = min(most, int(answer))  # b"" is no number: the peer refused, which counts as a failure
        wait = patience(pages)
        return Hit(pages, wait + seconds, partial(self._load, peer)) if wait else best

    def _question(self, namespace: Namespace, tokens: Sequence[int], records: Sequence[Address] | None = None) -> bytes:
        """JSON: how many pages of `tokens` the peer has, or these `records`."""
        question = {"fingerprint": self.fingerprint, "namespace": namespace, "tokens": tokens}
        if records is not None:
            question["parts"] = [(type_, index) for type_, index, _ in records]
        return json.dumps(question).encode()

    def _load(self, peer: Peer, order: RestoreOrder, loaded: Loaded) -> None:
        self._tasks.start(self._fill(peer, order, loaded))

    async def _fill(self, peer: Peer, order: RestoreOrder, loaded: Loaded) -> None:
        addresses, filled = order.addresses, list[Address]()
        async with self._pulls:
            began = self._clock.now()
            try:
                await self._pull(order, peer, addresses, filled)
                nbytes = sum(self._memory.nbytes(type_) for type_, _, _ in addresses)
                now = self._clock.now()
                self._read[peer.name] = nbytes / max(1e-6, now - began), now + FORGET_SECONDS
            except Exception as error:
                if order.late or not order.cancelled:
                    self._fail(peer, error)
        missing = addresses[len(filled) :]
        end = next((index for type_, index, _ in missing if type_ is RecordType.PAGE), order.pages[-1][0] + 1)
        loaded(PrefixLoaded(order.number, end - order.start, bool(order.slot) and not missing))

    async def _pull(self, order: RestoreOrder, peer: Peer, addresses: Sequence[Address], filled: list[Address]) -> None:
        """Fill the memory at `addresses` batch by batch, and append to `filled` those that are. While one batch is
        filled, the next is on its way.

        When this has ended, no thread writes that memory: it waits for the one that does, and for no answer."""
        coming: deque[asyncio.Task[bytes]] = deque()
        batches = list(batches_of(addresses, lambda address: self._memory.nbytes(address[0]), BATCH_BYTES))
        try:
            for number, batch in enumerate(batches):
                for after in batches[number + len(coming) : number + 2]:  # two answers are always under way
                    question = self._question(order.namespace, order.tokens, after)
                    coming.append(asyncio.ensure_future(self.call(peer, question)))
                stream = await asyncio.wait_for(coming.popleft(), max(0.0, order.until - self._clock.now()))
                await asyncio.to_thread(self._fill_batch, stream, order, batch)
                filled += batch
        finally:
            for task in coming:
                task.cancel()

    def _fill_batch(self, stream: bytes, order: RestoreOrder, addresses: Sequence[Address]) -> None:
        """Read a peer's records into memory. Raises `RecordError` for anything else than was asked for."""
        size, identity = self._kv.page_size, self._identity
        reader = PrefixReader(io.BytesIO(stream))
        if identity is None or reader.tokens != order.tokens:
            raise RecordError("is another prefix than was asked for")
        reader.check(identity, order.namespace, size)

        def go_on() -> None:
            if order.cancelled:
                raise RecordError("is waited for by no request any more")

        reader.fill(addresses, self._memory, size, go_on)

    def _fail(self, peer: Peer, error: Exception) -> None:
        logger.info("no prefix from %s, it is computed: %r", peer.name, error)
        self._read[peer.name] = 0.0, self._clock.now() + FORGET_SECONDS

    # ---------------------------------------------------------------- answering

    async def answer(self, question: bytes) -> bytes:
        """The answer to a peer: the number of cached pages, or the records asked for; b"" where the fingerprint is
        another. Raises for a malformed question."""
        request = json.loads(question)
        namespace, tokens, addresses = tuple(request["namespace"]), request["tokens"], request.get("parts")
        identity = self._identity
        if identity is None or request["fingerprint"] != self.fingerprint:
            return b""
        if addresses is None:
            return b"%d" % (self._kv.peek(namespace, tokens, len(tokens)) // self._kv.page_size)
        async with self._answers:
            notes = self._notes(namespace, tokens, [(RecordType(type_), int(index)) for type_, index in addresses])
            return await asyncio.to_thread(self._copy, identity, namespace, tokens, notes)

    def _notes(
        self, namespace: Namespace, tokens: Sequence[int], addresses: Sequence[tuple[RecordType, int]]
    ) -> dict[Address, Unsaved]:
        """Notes of those of `addresses` that this cache has, without a digest: `write_prefix` makes that."""
        kv, path = self._kv, {}
        node = kv.tree.peek(namespace, tokens, len(tokens))
        while node is not None and node.parent is not None:
            path[node.depth - 1], node = node, node.parent
        notes: dict[Address, Unsaved] = {}
        nbytes = 0
        for type_, index in addresses:
            node = path.get(index)
            owner = node.twin if node is not None and type_ is RecordType.WINDOW else node
            states = kv.states if type_ is RecordType.STATE else None
            snapshot = None if states is None or node is None else states.snapshot_of(node)
            nbytes += self._memory.nbytes(type_)
            if node is None or owner is None or (states is None) is (type_ is RecordType.STATE):
                break
            slot = owner.page if states is None else 0 if snapshot is None else snapshot.slot
            if not slot or (notes and nbytes > BATCH_BYTES):
                break
            notes[type_, index, slot] = Unsaved(type_, slot, b"", b"", owner, owner.created, snapshot, states)
        return notes

    def _copy(
        self, identity: Identity, namespace: Namespace, tokens: Sequence[int], notes: dict[Address, Unsaved]
    ) -> bytes:  # fmt: skip
        stream = io.BytesIO()
        write_prefix(
            stream, identity, namespace, tokens, self._kv.page_size, notes, self._memory,
            lambda: all(note.is_intact() for note in notes.values()),
        )  # fmt: skip
        return stream.getvalue()
