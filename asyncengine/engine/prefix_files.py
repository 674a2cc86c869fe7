"""Prefixes that callers hold: pinned in the cache, written to a file, read from one.

A prefix is computed by a request of one token. When that ends its pages are pinned, for as long as a block runs or as
they are copied. A file is read by the caller's thread into pages that no request uses until all of it is checked, like
a reading from the durable cache (`scheduler.restores`).
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from concurrent.futures import Future
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncengine.cache_news import PrefixCacheReset
from asyncengine.checks import as_text
from asyncengine.engine.loop import EngineLoop
from asyncengine.engine.peers import Call, PeerPrefixes
from asyncengine.engine.threads import finished_blocking
from asyncengine.engine.turns import CacheReset
from asyncengine.engine.validation import PreparedRequest
from asyncengine.errors import EngineClosed, InvalidParameter, RequestFailed
from asyncengine.files import written_whole
from asyncengine.kvcache.store.disk import SystemDisk
from asyncengine.kvcache.store.prefix_stream import PrefixReader, write_prefix
from asyncengine.kvcache.store.record import Identity, RecordError
from asyncengine.options import ChatMessages, Prompt
from asyncengine.outputs import Completion
from asyncengine.request_spec import RequestSpec
from asyncengine.scheduler.messages import ImportPrefix, PinPrefix, PrefixLoaded, ResetPrefixCache, UnpinPrefix
from asyncengine.scheduler.restores import RestoreOrder
from asyncengine.seams import PageMemory
from asyncengine.stream import TokenStream

if TYPE_CHECKING:
    from asyncengine.engine.frontend import Frontend

_CROWDED = "the prefix had to leave the cache: requests need its pages, or the model has other weights"


class Prefixes:
    """Prefixes of one engine that callers hold. From any thread."""

    def __init__(self, loop: EngineLoop, identify: Callable[[], Identity] | None) -> None:
        """`identify`: see `execution.models.identity`; None: pages cannot be copied."""
        self._loop = loop
        self._identify = identify
        self._lock = threading.Lock()
        self._pinned: dict[int, int] = {}
        """Pages of each prompt that is pinned for a block, by the ticket of the request that computes it."""

    # ---------------------------------------------------------------- pins

    def check(self, call: str, *, copies: bool) -> None:
        """Raise `InvalidParameter` where prefixes cannot be held, or, if `copies`, written and read."""
        if not isinstance(self._loop, EngineLoop):
            raise InvalidParameter(call, "is of one engine, and this is a fleet of several")
        if not self._loop.scheduler.kv.prefix_caching:
            raise InvalidParameter(call, "needs prefix_caching=True")
        if copies and self._identify is None:
            raise InvalidParameter(call, "works with models on a CPU")
        if copies and self._loop.sources.updated:
            raise InvalidParameter(call, "does not work after update_weights: nobody knows what its weights are called")

    async def share(self, call: Call) -> Callable[[bytes], Awaitable[bytes]]:
        """Ask other engines for prefixes, by `call`, from now on; returns what answers their questions.

        Raises `InvalidParameter`."""
        self.check("share_prefixes", copies=True)
        identity, memory = await asyncio.to_thread(self._copied)
        peers = PeerPrefixes(self._loop.scheduler.kv, identity, memory, self._loop.clock, call)
        self._loop.sources.add(peers)
        return peers.answer

    def _copied(self) -> tuple[Identity, PageMemory]:
        """The identity of pages, for which the weights are read, and their memory."""
        assert self._identify is not None
        return self._identify(), self._loop.runner.executor.page_memory()

    def pin(self, spec: RequestSpec, *, limited: bool) -> None:
        """Have the prompt of `spec` pinned, which is about to be posted. `limited`: for a block; all that is pinned so
        takes half of the cache at most, each prompt counted by itself, or it raises `InvalidParameter`."""
        kv, pages = self._loop.scheduler.kv, spec.prompt_len // self._loop.scheduler.kv.page_size
        with self._lock:
            most, pinned = kv.pool.capacity // 2, sum(self._pinned.values())
            if limited and pinned + pages > most:
                size = kv.page_size
                limit = f"half of the KV cache: {most * size} tokens, of which {pinned * size} are taken"
                raise InvalidParameter(
                    "prefix", f"has {spec.prompt_len} tokens, and all that is pinned takes at most {limit}"
                )
            if limited and kv.states is not None and len(self._pinned) >= kv.states.capacity // 2:
                limit = f"{len(self._pinned)} prefixes are pinned: of a model with recurrent states that is the most"
                raise InvalidParameter("prefix", limit)
            if limited:
                self._pinned[spec.ticket] = pages
        self._loop.inbox.post(PinPrefix(spec.ticket))

    def is_pinned(self, ticket: int) -> bool:
        """Whether the prompt of a request that has ended is pinned, still."""
        return self._loop.scheduler.kv.is_pinned(ticket)

    def unpin(self, ticket: int) -> None:
        """Undo `pin`. An engine that has ended has unpinned all."""
        with self._lock:
            self._pinned.pop(ticket, None)
        self._loop.inbox.post(UnpinPrefix(ticket))

    def reset(self, namespace: str | None, number: int) -> Future[PrefixCacheReset]:
        """See `AsyncEngine.reset_prefix_cache`; under a `number` that no weight update has. Raises
        `InvalidParameter`."""
        done: Future[PrefixCacheReset] = Future()
        message = ResetPrefixCache(number, None if namespace is None else as_text("namespace", namespace))
        self._loop.updates[number] = CacheReset(done)
        if not self._loop.inbox.post(message):
            self._loop.fail_update(number)
        return done

    # ---------------------------------------------------------------- files

    def write(self, path: Path, spec: RequestSpec) -> int:
        """Write the pinned prompt of `spec`; returns the tokens of its pages. Raises `InvalidParameter`,
        `RequestFailed`, `OSError`; then there is no file, or the one that was there before."""
        assert self._identify is not None
        kv, identity, ticket = self._loop.scheduler.kv, self._identify(), spec.ticket
        memory = self._open_memory()
        try:
            namespace, pages, places = kv.pinned(ticket)
            tokens = spec.prompt[: pages * kv.page_size]
            if not tokens:
                limit = f"is too short: pages have {kv.page_size} tokens, and it has {spec.prompt_len}"
                raise InvalidParameter("prefix", limit)
            with written_whole(path) as file:
                write_prefix(
                    file, identity, namespace, tokens, kv.page_size, places, memory, lambda: kv.is_pinned(ticket)
                )
        except (KeyError, RecordError):
            raise RequestFailed(_CROWDED) from None
        return len(tokens)

    def read(self, path: Path, adapter: str, salt: str, number: int, left: threading.Event | None) -> int:
        """Read a file into the cache, under a `number` that is used for nothing else; returns its tokens. `left` ends
        it early. Raises `InvalidParameter`, `RequestFailed`, `EngineClosed`."""
        assert self._identify is not None
        kv, memory = self._loop.scheduler.kv, self._open_memory()
        try:
            with os.fdopen(SystemDisk().open(str(path)), "rb") as file:
                prefix = PrefixReader(file)
                prefix.check(self._identify(), (adapter, salt), kv.page_size)
                if (count := len(prefix.tokens)) > kv.longest:
                    raise InvalidParameter("file", f"has {count} tokens, and the KV cache holds {kv.longest}")
                order = self._order(ImportPrefix(number, adapter, salt, tuple(prefix.tokens)))
                if order.number:
                    self._fill(prefix, order, memory, left)
                elif order.start * kv.page_size < count:
                    raise RequestFailed(_CROWDED)
                return count
        except OSError as error:
            raise InvalidParameter("file", f"cannot be read: {error}") from None
        except RecordError as error:
            raise InvalidParameter("file", f"cannot be used: {error}", str(path)) from None

    def _open_memory(self) -> PageMemory:
        """The engine's pages, which live on if it closes. Raises `EngineClosed` where it has closed."""
        try:
            return self._loop.runner.executor.page_memory()
        finally:
            if self._loop.inbox.closed:  # before that nothing is let go, and later there is nothing to be had
                raise EngineClosed("the engine has closed")

    def _order(self, message: ImportPrefix) -> RestoreOrder:
        """The loop's answer. Raises `EngineClosed`."""
        answer: Future[RestoreOrder] = Future()
        self._loop.sources.imports[message.number] = answer
        if not self._loop.inbox.post(message):
            answer.cancel()
        return finished_blocking(answer)

    def _fill(
        self, prefix: PrefixReader, order: RestoreOrder, memory: PageMemory, left: threading.Event | None
    ) -> None:
        def proceed() -> None:
            if order.cancelled or (left is not None and left.is_set()):
                raise RequestFailed(_CROWDED)

        size, whole = self._loop.scheduler.kv.page_size, False
        try:
            proceed()
            prefix.fill(order.addresses, memory, size, proceed)
            whole = True
        finally:  # the pages go back, or later requests find them in the cache
            pages = len(order.tokens) // size - order.start if whole else 0
            taken = self._loop.inbox.post(PrefixLoaded(order.number, pages, whole and bool(order.slot)))
        if not taken:
            raise EngineClosed("the engine has closed")


class HeldPrefix:
    """A prompt, or the beginning of a chat, that one call computes and keeps in the cache until `release`."""

    def __init__(
        self, frontend: Frontend, prefix: Prompt | ChatMessages, keywords: Mapping[str, Any], file: object = ...
    ) -> None:
        """`file`: where it will be written; left out: it is pinned for a block. Raises `InvalidParameter`."""
        self._frontend, self._prefix, self._keywords = frontend, prefix, keywords
        self._path = None if file is ... else path_of(file)
        self._spec: RequestSpec | None = None
        if self._path is not None and (self._path.is_dir() or not self._path.parent.is_dir()):
            raise InvalidParameter("file", "must be the path of a file in a folder that is there", str(file))
        frontend.prefixes.check("pin" if self._path is None else "export_prefix", copies=self._path is not None)

    def prepare(self, arrival: float | None = None) -> PreparedRequest:
        """The request that computes it. Raises as `Frontend.prepare`, and where too much would be pinned."""
        prepared = self._frontend.prepare_prefix(self._prefix, self._keywords, arrival)
        self._frontend.prefixes.pin(prepared.spec, limited=self._path is None)
        self._spec = prepared.spec
        return prepared

    @asynccontextmanager
    async def computed(self, stream: TokenStream) -> AsyncIterator[int]:
        """The number of its tokens, which are computed by `stream`, of `prepare`, and let go at the end. Raises as
        `finish`."""
        try:
            async with stream:
                tokens = self.finish(await stream.result())
            yield tokens
        finally:
            self.release()

    def finish(self, answer: Completion) -> int:
        """The number of its tokens, once it is computed. Raises `RequestFailed` where it is not, or not pinned."""
        assert self._spec is not None
        if answer.finish_reason not in ("stop", "length"):
            raise RequestFailed(f"the prefix was not computed: its request ended by {answer.finish_reason!r}")
        if not self._frontend.prefixes.is_pinned(self._spec.ticket):
            raise RequestFailed(_CROWDED)
        return self._spec.prompt_len

    def write(self) -> int:
        """Write it to its file. Raises as `Prefixes.write`."""
        assert self._spec is not None
        assert self._path is not None
        return self._frontend.prefixes.write(self._path, self._spec)

    def release(self) -> None:
        """Let it go."""
        if self._spec is not None:
            self._frontend.prefixes.unpin(self._spec.ticket)


def path_of(file: Any) -> Path:
    """The absolute path of a file. Raises `InvalidParameter`."""
    try:
        path = Path(file).absolute()
    except TypeError:
        path = Path("\0")
    if "\0" in str(path):
        raise InvalidParameter("file", "must be the path of a file", file)
    return path
