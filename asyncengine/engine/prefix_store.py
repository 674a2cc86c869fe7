"""The durable prefix cache at work: what the cache publishes is written by a thread, what a request needs is read by
others, and the engine's loop waits for neither.

`find` decides on the loop's thread whether reading is worth it: the records' bytes at the rate at which this folder was
read when it was opened, against the tokens at the rate at which this model computes. Both are measured once, so that
the same requests are treated alike. Only a reading that takes several times as long as expected changes the rate, and
no request waits for its end.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from asyncengine.engine.prefix_sources import Hit, Loaded, Source, batches_of
from asyncengine.kvcache import KVCache
from asyncengine.kvcache.radix_tree import Namespace
from asyncengine.kvcache.saving import MOST_UNSAVED, SaveLog, Unsaved
from asyncengine.kvcache.store.record import Header, digests_of, page_digest, root_digest
from asyncengine.kvcache.store.segments import Record, SegmentStore
from asyncengine.scheduler.messages import PrefixLoaded
from asyncengine.scheduler.restores import RestoreOrder, Wanted
from asyncengine.seams import PageMemory
from asyncengine.step import RecordType

logger = logging.getLogger("asyncengine")

READERS = 2
"""Threads that read: one alone waits for the disk, copies and checks in turns."""
_BATCH_BYTES = 32 * 2**20
"""Bytes that are written between two syncs, if one record alone is not more."""
MOST_COPIED = 256 * 2**20
"""Bytes of evicted pages that wait to be written, at most: beyond that pages are evicted and not stored."""
_PROBE_BYTES = 16 * 2**20
_PROBE_RECORDS = 64
"""Most bytes and records that are read to measure the rate."""
_OVERHEAD = 0.002
"""Seconds of a reading beside its bytes."""
WORTH = 0.8
"""Reading is worth it if it takes less than this share of computing."""
_PATIENCE = 3.0
LEAST_PATIENCE = 0.1
"""A request waits for `_PATIENCE` times the seconds that its reading should take, and `LEAST_PATIENCE` seconds more."""
_NICE = 5
"""Priority of the writing thread, in steps below the program's own."""


class Rates(NamedTuple):
    """The two rates that decide between reading and computing. None: unknown, and reading counts as worth it."""

    read: float | None = None
    """Bytes a second."""
    compute: float | None = None
    """Tokens a second."""

    def patience(self, num_tokens: int, nbytes: int) -> float:
        """Seconds to wait, at most, for `nbytes` to be read in place of computing `num_tokens`; 0.0: it is not worth
        it."""
        seconds = _OVERHEAD + (nbytes / self.read if self.read else 0.0)
        if not num_tokens or (self.compute is not None and seconds > WORTH * num_tokens / self.compute):
            return 0.0
        return LEAST_PATIENCE + _PATIENCE * seconds


class PrefixStore(Source):
    """Records of one engine's prefix cache. Every method but those of threads is called on the engine's loop."""

    def __init__(
        self, store: SegmentStore, memory: PageMemory, page_size: int, *, prompt_rate: float | None = None,
        salted: bool = False, evicted: bool = False,
    ) -> None:  # fmt: skip
        """`prompt_rate`: tokens of a prompt that the model computes in a second. `salted`: namespaces with a cache salt
        are stored, too. `evicted`: pages are stored when they are evicted, or about to go with all others."""
        self.store = store
        self._memory = memory
        self._page_size = page_size
        self._salted, self._evicted = salted, evicted
        self._fingerprint: bytes | None = store.fingerprint
        """None: nothing is stored or found any more, for the updated weights have no known identity."""
        self._first_near: Callable[[int], int] | None = None
        """The first position that one sees in layers with window pages; None: there are none."""
        self._states = False
        """A request can start only where there is a state."""
        self._roots: dict[bytes, None] = {}
        self._saves: queue.SimpleQueue[list[Unsaved] | threading.Event | None] = queue.SimpleQueue()
        self._loads: queue.SimpleQueue[_Load | None] = queue.SimpleQueue()
        self._queued = self._done = 0
        """Notes handed to the writing thread so far, and those that it is done with."""
        self._copied = self._written = 0
        """Bytes copied of evicted pages so far, and those of which the writing thread is done."""
        self._threads: list[threading.Thread] = []
        self._closing = False
        self.rates = Rates(self._measure(), prompt_rate)

    def attach(self, kv: KVCache) -> None:
        if kv.windows is not None and kv.windows.lookback is not None:
            self._first_near = kv.windows.lookback.first
        self._states = kv.states is not None
        kv.saves = SaveLog(self.root, kv, evicted=self._evicted)

    def root(self, namespace: Namespace) -> bytes | None:
        """Digest of a namespace; None: nothing of it is stored."""
        if self._fingerprint is None or (namespace[1:2] != ("",) and not self._salted):
            return None
        root = root_digest(self._fingerprint, namespace)
        self._roots[root] = None
        return root

    def forget(self) -> None:
        self._fingerprint = None

    # ---------------------------------------------------------------- reading

    def find(self, wanted: Wanted, best: Hit, answer: Callable[[Hit], None]) -> None:
        # Walks the pages of the prompt in order: a request can only start behind pages that are all there.
        root, size = self.root(wanted.namespace) if len(self.store) else None, self._page_size
        if root is None:
            answer(best)
            return
        cached, usable, total, near, nbytes = wanted.cached // size, 0, 0, 0, 0
        tokens = wanted.request.keys[: wanted.limit // size * size]
        for index, (_, packed, digest) in enumerate(digests_of(root, tokens, size)):
            if index < cached:
                continue
            page = self.store.find(digest, RecordType.PAGE)
            if page is None or page.tokens != packed:
                break
            total += page.size
            end, extra = index + 1, 0
            if self._first_near is not None:
                window = self.store.find(digest, RecordType.WINDOW)
                near = 0 if window is None else near + 1
                extra = 0 if window is None else near * window.size
                # a start at `end` needs every window page that it sees; those that are cached need no record
                if end - near > max(cached, self._first_near(end * size) // size):
                    continue
            if self._states:
                state = self.store.find(digest, RecordType.STATE)
                if state is None:
                    continue
                extra += state.size
            usable, nbytes = end, total + extra
        patience = self.rates.patience((usable - cached) * size, nbytes)
        answer(Hit(usable, patience, self.load) if patience and usable > best.pages else best)

    def load(self, order: RestoreOrder, loaded: Loaded) -> None:
        """Read what `order` says; `loaded` is called in any case."""
        root = self.root(order.namespace)
        load = _Load(order, self, root, loaded)
        self._start()
        for _ in range(READERS):
            self._loads.put(load)

    def _read(self) -> None:
        while (load := self._loads.get()) is not None:
            load.work()
            del load  # hold no page's memory while waiting

    def _measure(self) -> float | None:
        """Bytes a second at which records are read; None: there are none."""
        nbytes, began = 0, time.perf_counter()
        for header in self.store.newest(_PROBE_RECORDS):
            if nbytes >= _PROBE_BYTES:
                break
            if self.store.read(header, [memoryview(bytearray(header.size))]):
                nbytes += header.head_size + header.size
        self.store.bytes_read -= nbytes  # a measurement, not a request's reading
        seconds = time.perf_counter() - began
        return nbytes / seconds if nbytes and seconds else None

    # ---------------------------------------------------------------- writing

    def save(self, notes: list[Unsaved]) -> None:
        if notes and self.store.writable and not self._closing and self._queued - self._done < MOST_UNSAVED:
            if self._evicted:
                notes = [copied for note in notes if (copied := self._copy(note)) is not None]
            self._queued += len(notes)  # before the thread may count them as done
            self._start()
            self._saves.put(notes)

    def _copy(self, note: Unsaved) -> Unsaved | None:
        """The note with a copy of what was evicted; None: it is stored already, or too much waits to be written."""
        size = self._memory.nbytes(note.type)
        stored = self.store.find(page_digest(note.parent, note.tokens), note.type) is not None
        if stored or self._copied - self._written + size > MOST_COPIED:
            return None
        if note.is_intact():
            return note
        self._copied += size
        return note._replace(copy=b"".join(self._memory.buffers(note.type, note.number)))

    def flush(self, patience: float) -> None:
        if self._closing:
            until = time.monotonic() + patience
            for thread in self._threads:
                thread.join(max(0.0, until - time.monotonic()))
        elif self._threads:
            written = threading.Event()
            self._saves.put(written)
            written.wait(patience)

    def _write(self) -> None:
        if sys.platform == "linux":
            with contextlib.suppress(OSError):  # a container may forbid it
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        try:
            while (notes := self._saves.get()) is not None:
                if not isinstance(notes, list):  # an event, of whatever kind of thread
                    notes.set()
                    continue
                for batch in batches_of(notes, lambda note: self._memory.nbytes(note.type), _BATCH_BYTES):
                    try:
                        self.store.append(self._records(batch))
                    except Exception:  # of no concern to any request
                        logger.exception("writing prefixes failed")
                    self._done += len(batch)
                    self._written += sum(len(note.copy or b"") for note in batch)
                del notes
                if self.rates.read is None and len(self.store):
                    self.rates = self.rates._replace(read=self._measure())
        finally:
            self.store.close()

    def _records(self, notes: Sequence[Unsaved]) -> Iterator[Record]:
        """Records of the notes whose pages can be found again: the page before is stored, or will be when evicted."""
        begun: dict[bytes, None] = {}
        for note in notes:
            findable = self._evicted or note.parent in self._roots or note.parent in begun
            if findable or self.store.find(note.parent, RecordType.PAGE) is not None:
                size = self._memory.nbytes(note.type)
                header = Header(self.store.fingerprint, note.parent, note.tokens, note.type, size, 0)
                if note.type is RecordType.PAGE:
                    begun[header.digest] = None
                if self.store.find(header.digest, note.type) is None:
                    buffers = self._memory.buffers(note.type, note.number) if note.copy is None else [note.copy]
                    yield header, buffers, note.is_intact

    # ---------------------------------------------------------------- threads

    def _start(self) -> None:
        """Start the threads, when there is something to do: an engine that never served leaves none behind."""
        if self._threads:
            return
        works = [("writes", self._write), *((f"reads-{number}", self._read) for number in range(READERS))]
        for name, work in works:
            self._threads.append(threading.Thread(target=work, name=f"asyncengine-{name}", daemon=True))
            self._threads[-1].start()

    def close(self) -> None:
        if self._closing:
            return
        self._closing = True
        self._saves.put(None)
        for _ in range(READERS):
            self._loads.put(None)
        if not self._threads:
            self.store.close()


class _Load:
    """One order, shared by the reading threads: each takes the next record that no other has taken."""

    def __init__(self, order: RestoreOrder, owner: PrefixStore, root: bytes | None, loaded: Loaded) -> None:
        self._order = order
        self._owner = owner
        self._loaded = loaded
        self._lock = threading.Lock()
        self._left = READERS
        self._begun = time.monotonic()
        self._nbytes = 0
        self._headers: dict[int, Header] = {}
        self._root = root
        self._failed: dict[RecordType, int] = {}
        """The first page index of each type of record that could not be read."""
        self._todo = iter(order.addresses)

    def work(self) -> None:
        """Read records until none is left; the last thread to end says what came of it."""
        try:
            self._read_all()
        except Exception:  # whatever fails here, the request that waits must get its answer
            logger.exception("reading a stored prefix failed")
            self._fail(RecordType.PAGE, 0)
        with self._lock:
            self._left -= 1
            last = not self._left
        if last:
            self._tell()

    def _read_all(self) -> None:
        owner, order = self._owner, self._order
        with self._lock:
            if self._root is not None and not self._headers:
                chain = digests_of(self._root, order.tokens, owner._page_size)
                for index, (parent, packed, _) in enumerate(chain):
                    self._headers[index] = Header(owner.store.fingerprint, parent, packed, RecordType.PAGE, 0, 0)
        while True:
            with self._lock:
                type_, index, slot = next(self._todo, (None, 0, 0))
            if type_ is None:
                return
            header = self._headers.get(index)
            if order.cancelled or self._failed or header is None:
                self._fail(type_, index)
                return
            buffers = owner._memory.buffers(type_, slot)
            if not owner.store.read(header._replace(type=type_), buffers):  # it is not there, or not whole
                self._fail(type_, index)
                return
            owner._memory.filled(type_, slot, buffers)
            with self._lock:
                self._nbytes += owner._memory.nbytes(type_)

    def _fail(self, type_: RecordType, index: int) -> None:
        with self._lock:
            self._failed[type_] = min(index, self._failed.get(type_, index))

    def _tell(self) -> None:
        order, failed = self._order, self._failed
        if order.late:
            rate = self._nbytes / max(1e-3, time.monotonic() - self._begun)  # bytes until the request gave up
            self._owner.rates = self._owner.rates._replace(read=max(1.0, rate))
        pages = max(0, failed.get(RecordType.PAGE, len(order.tokens) // self._owner._page_size) - order.start)
        if RecordType.WINDOW in failed or (failed and order.windows):
            pages = 0
        self._loaded(PrefixLoaded(order.number, pages, bool(order.slot) and not failed))
