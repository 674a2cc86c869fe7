"""Names of adapters, what they mean now, and who uses what they meant before.

A name means a digest. Loading changed content under a name makes it mean another digest; requests that were submitted
before go on with the one they claimed. Files are read on a small thread pool, each content by one thread at a time.
A load that fails changes nothing, and evicts nothing: up to `workers` adapters being read lie outside the budget.

Every request has a claim, by ticket: `claim` at submit (which digest), `start` when the engine takes the request up
(tells when the adapter is in memory), `cancel` at its end, whatever happened.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, InvalidStateError, ThreadPoolExecutor
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
    """Thread-safe. `done` callbacks and futures complete on whatever thread brought the news."""

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
        """Number of the call that last gave or took a name's meaning: a later one wins, whichever is read first."""
        self.reading: dict[Any, Future[Adapter]] = {}
        """Contents that a thread reads right now, by the loader's fingerprint of their files."""
        self._leaving: dict[str, list[Future[None]]] = {}
        self._orders = self._loading = 0
        self._closed = False
        self._lock = threading.Lock()
        self._pool = pool or ThreadPoolExecutor(workers, thread_name_prefix="asyncengine-lora")

    # ---------------------------------------------------------------- names

    def load(self, name: str, path: str | os.PathLike[str], *, pinned: bool = False) -> Future[AdapterInfo]:
        """Read the adapter in `path` and call it `name`, in place of what that name meant. Does not block.

        The future raises `AdapterError` (also `AdapterInUse`: no memory left beside what is in use) or `EngineClosed`;
        everything is as it was then; `AdapterNotFound` if the name was unloaded meanwhile. It is cancelled by `close`.
        `pinned`: never evicted.
        """
        folder = os.fspath(path)
        return self._submit(name, lambda: self._read(name, folder), folder, pinned)

    def take(self, name: str, tensors: Any, config: Any) -> Future[AdapterInfo]:
        """The same of tensors by PEFT's names with their configuration. They are never evicted, as no file brings them
        back: a name that gets other content, or none, lets go of them."""
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
        """Forget `name`. The future is done when nothing uses its content any more.

        Raises `AdapterNotFound`, and `AdapterInUse` if requests use it and no other name means the same content,
        unless `wait`: then no new request can name it, and the future waits for those there are.
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
        """The present meaning of `name`. Raises `AdapterNotFound`."""
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
        """The tokens of a prompt from which on it acts; none for one that acts everywhere, or is not in memory."""
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
        of = self._meaning(name)
        in_memory, requests = of.digest in self.store.resident, self.claims.users(of.digest)
        return AdapterInfo(name, of.path, of.digest, of.rank, of.nbytes, of.modules, of.pinned, in_memory, requests)

    # ---------------------------------------------------------------- claims

    def claim(self, tickets: Sequence[int], name: str) -> str:
        """The digest that all `tickets` will use, whatever becomes of the name. Raises `AdapterNotFound`."""
        with self._lock:
            self._check_open()
            meaning = self._meaning(name)
            for ticket in tickets:
                self.claims.add(ticket, meaning)
            return meaning.digest

    def start(self, ticket: int, done: AdapterDone) -> None:
        """Call `done(ticket, digest)` once the claimed adapter is in memory and stays there, or `done(ticket, error)`:
        perhaps at once. A ticket without a claim is ignored."""
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

    # ---------------------------------------------------------------- books; all of these hold the lock

    def stays(self, digest: str) -> bool:
        """Whether it is pinned, or still claimed though no name means it, so that it could not be read again."""
        meanings = [meaning for meaning in self._names.values() if meaning.digest == digest]
        return any(meaning.pinned for meaning in meanings) or (not meanings and self.claims.users(digest) > 0)

    def _hopeless(self, meaning: Meaning) -> bool:
        """The pinned adapters alone leave no room for it."""
        pinned = {of.digest: of.nbytes for of in self._names.values() if of.pinned and of.digest != meaning.digest}
        return meaning.nbytes + sum(pinned.values()) > self.store.max_bytes

    def _unknown(self, digest: str) -> bool:
        """Whether no name means `digest` any more."""
        return not self.claims.users(digest) and all(of.digest != digest for of in self._names.values())

    def _settle(self, digest: str | None, calls: Calls) -> None:
        """Something about `digest` has changed: drop it if it is unknown now, and see whose turn it is."""
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
                leaves = old.digest if old is not None and self._unknown(old.digest) else None
                if not self.store.put(adapter, self.stays, leaves):
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
        """Once the last reading has ended, no one asks for names that are gone."""
        with self._lock:
            self._loading -= 1
            if not self._loading:
                self._changed_by = {name: call for name, call in self._changed_by.items() if name in self._names}

    def _reload(self, meaning: Meaning) -> None:
        """Bring an evicted content back for those who wait for it."""
        adapter: Adapter | None = None
        error: Exception | None = None
        try:
            adapter = self._read(meaning.name, meaning.path)
            if adapter.digest != meaning.digest:
                raise AdapterError("adapter", "its files have changed since it was loaded; load it again", meaning.name)
        except Exception as broken:  # whatever it is, those who wait must hear of it
            error = broken
        calls: Calls = []
        with self._lock:
            if not self._closed:
                self.claims.reloaded(meaning.digest, adapter, error, calls)
                self._settle(meaning.digest, calls)
        _tell(calls)

    def _read(self, name: str, path: str) -> Adapter:
        """Read `path`, or share the reading of another thread that reads the same content right now."""
        try:
            key = self._loader.fingerprint(path, self.store.max_bytes)
            mine: Future[Adapter] = Future()
            with self._lock:
                shared = self.reading.setdefault(key, mine)
            if shared is mine:
                try:
                    mine.set_result(self._loader.load(name, path))
                except BaseException as error:
                    mine.set_exception(error)
                finally:
                    with self._lock:
                        del self.reading[key]
            return shared.result()
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
        """Raises `InvariantViolation` if the books do not balance."""
        with self._lock:
            self.store.check()

    def close(self) -> None:
        """Cancel what has not begun and let go of everything. Idempotent."""
        with self._lock:
            self._closed = True
            leaving = [future for futures in self._leaving.values() for future in futures]
            for books in (self._names, self._changed_by, self._leaving):
                books.clear()
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
