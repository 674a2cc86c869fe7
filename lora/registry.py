"""The registry of adapters: names, the contents that they refer to, and the requests that use a content.

A name refers to a content by its digest. Loading other content under a name changes the digest; requests that were
submitted before go on with the one they claimed. Files are read on a small thread pool, each content by one thread at a
time. A load that fails changes nothing and evicts nothing: up to `workers` adapters being read are beside the budget.

Every request has a claim, by ticket: `claim` at submit (fixes the digest), `start` when the engine takes the request up
(calls back when the adapter is in memory), `cancel` at its end, however it ends.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, InvalidStateError, ThreadPoolExecutor
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from asyncengine.errors import AdapterError, AdapterInUse, AdapterNotFound, EngineClosed, again
from asyncengine.lora.adapter import Adapter, AdapterInfo, Meaning
from asyncengine.lora.claims import Calls, Claims, HostStore
from asyncengine.seams import AdapterDone

if TYPE_CHECKING:
    from asyncengine.lora.checkpoint.peft_loader import PeftLoader

_SHOWN = 16
"""Names listed in the message about an unknown one."""


class AdapterRegistry:
    """Thread-safe. `done` callbacks run, and futures complete, on the thread that caused them."""

    def __init__(
        self, loader: PeftLoader, *, max_bytes: int, workers: int = 2, max_passes: int = 64,
        pool: Executor | None = None,
    ) -> None:  # fmt: skip
        """`pool`: reads files, in place of `workers` threads of its own, and is shut down by `close`."""
        self._loader = loader
        self.store = HostStore(max_bytes)
        self.claims = Claims(self.store, max_passes, self.stays, self._hopeless)
        self._names: dict[str, Meaning] = {}
        self._changed_by: dict[str, int] = {}
        """Number of the call that last changed a name: a later call wins, even if its files are read first."""
        self.reading: dict[Any, Future[Adapter]] = {}
        """Contents that a thread is reading, by the loader's fingerprint of their files."""
        self._leaving: dict[str, list[Future[None]]] = {}
        self._orders = self._loading = 0
        self._closed = False
        self._lock = threading.Lock()
        self._pool = pool or ThreadPoolExecutor(workers, thread_name_prefix="asyncengine-lora")

    # ---------------------------------------------------------------- names

    def load(self, name: str, path: str | os.PathLike[str], *, pinned: bool = False) -> Future[AdapterInfo]:
        """Read the adapter in `path` and give it the name `name`, which may have referred to another. Does not block.

        The future raises `AdapterError` (also `AdapterInUse`: no memory left beside what is in use) or `EngineClosed`,
        and then nothing has changed; `AdapterNotFound` if the name was unloaded meanwhile. `close` cancels it.
        `pinned`: never evicted.
        """
        folder = os.fspath(path)
        return self._submit(name, lambda: self._read(name, folder), folder, pinned)

    def take(self, name: str, tensors: Any, config: Any) -> Future[AdapterInfo]:
        """The same for tensors by PEFT's names with their configuration. They are not evicted, for no file brings them
        back; they go when their name gets other content or is unloaded."""
        return self._submit(name, lambda: self._take(name, tensors, config), "", True)

    def _submit(self, name: str, read: Callable[[], Adapter], path: str, pinned: bool) -> Future[AdapterInfo]:
        if not isinstance(name, str) or not 0 < len(name) <= 256 or not name.isprintable():
            raise AdapterError("name", "must be 1 to 256 printable characters", name)
        with self._lock:
            self._check_open()
            self._orders, self._loading = self._orders + 1, self._loading + 1
            future = self._pool.submit(self._load, name, read, path, pinned, self._orders)
        future.add_done_callback(self._forget_changes)
        return future

    def unload(self, name: str, *, wait: bool = False) -> Future[None]:
        """Remove `name`. The future is done when no request uses its content any more.

        Raises `AdapterNotFound`, and `AdapterInUse` if requests use it and no other name refers to the same content,
        unless `wait`: then no new request can name it, and the future waits for the present ones.
        """
        gone: Future[None] = Future()
        calls: Calls = []
        with self._lock:
            digest = self._meaning(name).digest
            users = self.claims.users(digest)
            shared = any(other.digest == digest for key, other in self._names.items() if key != name)
            if users and not shared and not wait:
                raise AdapterInUse("adapter", f"{users} requests use it; pass wait=True to wait for them", name)
            del self._names[name]
            self._orders += 1
            self._changed_by[name] = self._orders
            if users and not shared:
                self._leaving.setdefault(digest, []).append(gone)
            else:
                calls.append(lambda: gone.set_result(None))
            self._settle(digest, calls)
        _tell(calls)
        return gone

    def list(self) -> tuple[AdapterInfo, ...]:
        """Every name, sorted."""
        with self._lock:
            return tuple(self._info(name) for name in sorted(self._names))

    def find(self, name: str) -> Meaning:
        """The content that `name` refers to now. Raises `AdapterNotFound`."""
        with self._lock:
            return self._meaning(name)

    def get(self, digest: str) -> Adapter:
        """The weights of an adapter that a granted claim keeps in memory."""
        with self._lock:
            adapter = self.store.resident.get(digest)
        if adapter is None:
            raise AdapterNotFound("adapter", "is not in memory", digest)
        return adapter

    def invocation(self, digest: str) -> tuple[int, ...]:
        """The invocation tokens of an activated LoRA; () for another adapter, or one that is not in memory."""
        with self._lock:
            adapter = self.store.resident.get(digest)
        return () if adapter is None else adapter.invocation

    def counts(self) -> dict[str, int]:
        """Counts of names, of contents in memory, and their bytes."""
        with self._lock:
            return {"loaded": len(self._names), "in_memory": len(self.store.resident), "nbytes": self.store.nbytes}

    def _meaning(self, name: str) -> Meaning:
        meaning = self._names.get(name) if isinstance(name, str) else None
        if meaning is None:
            known = ", ".join(repr(name) for name in sorted(self._names)[:_SHOWN]) or "none"
            raise AdapterNotFound("adapter", f"no adapter of that name is loaded (loaded: {known})", name)
        return meaning

    def _info(self, name: str) -> AdapterInfo:
        meaning = self._meaning(name)
        in_memory, requests = meaning.digest in self.store.resident, self.claims.users(meaning.digest)
        return AdapterInfo(**asdict(meaning), in_memory=in_memory, requests=requests)

    # ---------------------------------------------------------------- claims

    def claim(self, tickets: Sequence[int], name: str) -> str:
        """Claim the present content of `name` for all `tickets`; its digest, which they use even if the name changes.
        Raises `AdapterNotFound`."""
        with self._lock:
            self._check_open()
            meaning = self._meaning(name)
            for ticket in tickets:
                self.claims.add(ticket, meaning)
            return meaning.digest

    def start(self, ticket: int, done: AdapterDone) -> None:
        """Call `done(ticket, digest)` once the claimed adapter is in memory and stays there, or `done(ticket, error)`,
        perhaps before this returns. A ticket without a claim is ignored."""
        calls: Calls = []
        with self._lock:
            self.claims.start(ticket, done)
            self._settle(None, calls)
        _tell(calls)

    def cancel(self, ticket: int) -> None:
        """`ticket` is over, or no request waits for it: give back what it claimed. Idempotent."""
        calls: Calls = []
        with self._lock:
            digest = self.claims.remove(ticket)
            if digest is not None:
                self._settle(digest, calls)
        _tell(calls)

    # ---------------------------------------------------------------- tables; the caller holds the lock

    def stays(self, digest: str) -> bool:
        """Whether it may not be evicted: pinned, or claimed while no name refers to it, so that no file is known."""
        meanings = [meaning for meaning in self._names.values() if meaning.digest == digest]
        return any(meaning.pinned for meaning in meanings) or (not meanings and self.claims.users(digest) > 0)

    def _hopeless(self, meaning: Meaning) -> bool:
        """Whether the pinned adapters alone leave no room for it."""
        pinned = {m.digest: m.nbytes for m in self._names.values() if m.pinned and m.digest != meaning.digest}
        return meaning.nbytes + sum(pinned.values()) > self.store.max_bytes

    def _unknown(self, digest: str) -> bool:
        """Whether neither a claim nor a name refers to `digest`."""
        return not self.claims.users(digest) and all(meaning.digest != digest for meaning in self._names.values())

    def _settle(self, digest: str | None, calls: Calls) -> None:
        """Act on a change that concerns `digest`: drop it if it is unknown now, and grant claims that have room now."""
        if digest is not None and not self.claims.users(digest):
            for future in self._leaving.pop(digest, []):
                calls.append(lambda future=future: _finish(future))  # type: ignore[misc]
            if self._unknown(digest):
                self.store.drop(digest)
        if self.claims.waiting and not self._closed:
            for meaning in self.claims.pump(calls):
                self._pool.submit(self._reload, meaning)

    def _check_open(self) -> None:
        if self._closed:
            raise EngineClosed("the engine is closed")

    # ---------------------------------------------------------------- on a worker thread

    def _load(self, name: str, read: Callable[[], Adapter], path: str, pinned: bool, order: int) -> AdapterInfo:
        adapter = read()
        meaning = Meaning(name, path, adapter.digest, adapter.rank, adapter.nbytes, tuple(adapter.modules), pinned)
        calls: Calls = []
        with self._lock:
            self._check_open()
            old = self._names.get(name)
            if self._changed_by.get(name, 0) < order:
                self._names[name] = meaning
                replaced = old.digest if old is not None and self._unknown(old.digest) else None
                if not self.store.put(adapter, self.stays, replaced):
                    del self._names[name]
                    if old is not None:
                        self._names[name] = old
                    raise AdapterInUse("adapter_memory", "is all in use or pinned; try again later", adapter.nbytes)
                self._changed_by[name] = order
                self._settle(old.digest if old is not None else None, calls)
            info = self._info(name)
        _tell(calls)
        return info

    def _forget_changes(self, _: Future[AdapterInfo]) -> None:
        """Once no load is under way, the numbers of removed names are not compared with any more."""
        with self._lock:
            self._loading -= 1
            if not self._loading:
                self._changed_by = {name: call for name, call in self._changed_by.items() if name in self._names}

    def _reload(self, meaning: Meaning) -> None:
        """Read an evicted content again for the claims that wait for it."""
        adapter: Adapter | None = None
        error: Exception | None = None
        try:
            adapter = self._read(meaning.name, meaning.path)
            if adapter.digest != meaning.digest:
                raise AdapterError("adapter", "its files have changed since it was loaded; load it again", meaning.name)
        except Exception as raised:  # raised on this thread it would be lost, and the claims would wait for ever
            error = raised
        calls: Calls = []
        with self._lock:
            if not self._closed:
                self.claims.reloaded(meaning.digest, adapter, error, calls)
                self._settle(meaning.digest, calls)
        _tell(calls)

    def _read(self, name: str, path: str) -> Adapter:
        """Read `path`, or wait for another thread that is reading the same content."""
        try:
            key = self._loader.fingerprint(path, self.store.max_bytes)
            own_reading: Future[Adapter] = Future()
            with self._lock:
                reading = self.reading.setdefault(key, own_reading)
            if reading is own_reading:
                try:
                    own_reading.set_result(self._loader.load(name, path))
                except BaseException as error:
                    own_reading.set_exception(error)
                finally:
                    with self._lock:
                        del self.reading[key]
            return reading.result()
        except AdapterError as error:
            raise again(error) from None
        except Exception as error:
            raise AdapterError("adapter", f"could not be read ({error!r})", name) from error

    def _take(self, name: str, tensors: Any, config: Any) -> Adapter:
        adapter, most = self._loader.take(name, tensors, config), self.store.max_bytes
        if adapter.nbytes > most:
            raise AdapterError("adapter_memory", f"is {most} bytes, and the adapter needs {adapter.nbytes}", name)
        return adapter

    # ---------------------------------------------------------------- end

    def check(self) -> None:
        """Raises `InvariantViolation` if the tables contradict one another."""
        with self._lock:
            self.store.check()

    def close(self) -> None:
        """Cancel loads that have not begun and free all adapters. Idempotent."""
        with self._lock:
            self._closed = True
            leaving = [future for futures in self._leaving.values() for future in futures]
            for table in (self._names, self._changed_by, self._leaving):
                table.clear()
            self.claims.clear()
            self.store.clear()
        for future in leaving:
            with contextlib.suppress(InvalidStateError):
                future.set_exception(EngineClosed("the engine has closed"))
        self._pool.shutdown(wait=False, cancel_futures=True)


def _finish(future: Future[None]) -> None:
    with contextlib.suppress(InvalidStateError):  # its owner cancelled it
        future.set_result(None)


def _tell(calls: Calls) -> None:
    for call in calls:
        call()
