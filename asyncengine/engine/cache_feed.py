"""The stream of a prefix cache's events: written on the engine's loop between its steps, read on any event loop."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future

from asyncengine.cache_news import AllBlocksCleared, BlockRemoved, BlockStored, CacheEvent, KVEventBatch
from asyncengine.engine.loop import EngineLoop
from asyncengine.engine.threads import finished, promised
from asyncengine.errors import EngineClosed
from asyncengine.kvcache.cache_log import CacheLog
from asyncengine.kvcache.radix_tree import Node

UNSIGNED = 0xFFFF_FFFF_FFFF_FFFF


class CacheFeed:
    """Batches for one reader, at most `most` of them unread. When there would be more, one batch that lists
    the whole cache anew replaces them all: a slow reader takes no more memory, and ends with the right state."""

    def __init__(self, loop: EngineLoop, medium: str, names: Callable[[], dict[str, str]], most: int) -> None:
        """`names`: the name of each loaded adapter by its digest."""
        self._loop, self._tree, self._medium, self._names = loop, loop.scheduler.kv.tree, medium, names
        self._most = most
        self._log: CacheLog | None = None
        """None: it has yet to begin."""
        self._batches: deque[KVEventBatch | Exception] = deque()
        self._next_seq = self._expected_seq = 0
        """Number of the next batch, and of the one that its reader expects."""
        self._lock = threading.Lock()
        self._waiting: Future[None] = promised()
        self._left = False

    async def read(self) -> AsyncIterator[KVEventBatch]:
        """All batches, until the engine closes or dies, which is raised."""
        self._loop.cache_feeds.append(self)
        if not self._loop.inbox.post():  # nothing: it wakes the loop, which starts this feed's log
            self.end(self._loop.make_failure())
        try:
            while True:
                waiting = self._waiting = promised()  # before it looks for what may come meanwhile
                with self._lock:
                    batch = self._batches.popleft() if self._batches else None
                    if isinstance(batch, KVEventBatch):
                        self._expected_seq = batch.seq + 1
                if batch is None:
                    await finished(waiting)
                elif isinstance(batch, KVEventBatch):
                    yield batch
                elif isinstance(batch, EngineClosed):
                    return
                else:
                    raise batch
        finally:
            self._left = True

    def update(self) -> None:
        """Queue a batch of what has changed since the last call. Runs on the engine's loop, as `end` does."""
        if self._left:
            self._loop.cache_feeds.remove(self)
            self._tree.logs = tuple(log for log in self._tree.logs if log is not self._log)
            return
        if (log := self._log) is None:
            log = self._log = self._tree.keep_log(self._loop.scheduler.kv.pool.capacity)
            log.overflowed = True  # what is cached already comes first
        if not log:
            return
        with self._lock:
            lost = self._next_seq - self._expected_seq if len(self._batches) == self._most else 0
            if lost:
                self._batches.clear()
                log.overflowed = True
            if events := self._events(*log.drain(self._tree.nodes())):
                self._batches.append(KVEventBatch(time.time(), events, self._next_seq, lost))
                self._next_seq += 1
        self._wake()

    def end(self, failure: Exception) -> None:
        """No batch will come any more."""
        self._batches.append(failure)
        self._wake()

    def _wake(self) -> None:
        if not self._waiting.done():
            self._waiting.set_result(None)

    def _events(self, whole: bool, stored: list[Node], removed: list[int]) -> tuple[CacheEvent, ...]:
        events: list[CacheEvent] = []
        if whole or (removed and not self._tree.num_pages):
            events.append(AllBlocksCleared())
        elif removed:
            events.append(BlockRemoved(tuple(page & UNSIGNED for page in removed), self._medium))
        names, runs = self._names() if stored else {}, list[list[Node]]()
        for node in stored:
            if runs and node.parent is runs[-1][-1]:
                runs[-1].append(node)
            else:
                runs.append([node])
        return (*events, *(self._stored(run, names) for run in runs))

    def _stored(self, run: list[Node], names: dict[str, str]) -> BlockStored:
        parent, root = run[0].parent, run[0]
        while root.parent is not None:
            root = root.parent
        assert parent is not None
        digest, salt, *_ = map(str, root.namespace or ())
        hashes, tokens = tuple(node.hash & UNSIGNED for node in run), tuple(t for node in run for t in node.tokens)
        before, size = None if parent is root else parent.hash & UNSIGNED, self._tree.page_size
        keys = ((salt,), *(None for _ in run[1:])) if salt and parent is root else None
        return BlockStored(hashes, before, tokens, size, self._medium, names.get(digest, digest) or None, keys)
