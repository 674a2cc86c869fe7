"""The fleet's adapters: their names, as all replicas have them, and the requests that use them."""

from __future__ import annotations

import builtins
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace

from asyncengine import AdapterInfo
from asyncengine.errors import AdapterInUse, AdapterNotFound


class FleetAdapters:
    """Adapters by name, with those methods of an `AdapterStore` that come before an engine's loop. Thread-safe."""

    def __init__(self, adapters: Sequence[AdapterInfo]) -> None:
        self._lock = threading.RLock()
        self._names = {info.name: info for info in adapters}
        self._claims: dict[int, str] = {}
        self._leaving: dict[str, builtins.list[Future[None]]] = {}

    def set(self, info: AdapterInfo) -> None:
        """Add an adapter that every replica has loaded."""
        with self._lock:
            self._names[info.name] = info

    def find(self, name: str) -> AdapterInfo:
        """Raises `AdapterNotFound` if no adapter has that name now."""
        with self._lock:
            info = self._names.get(name) if isinstance(name, str) else None
            if info is None:
                loaded = ", ".join(repr(name) for name in sorted(self._names)[:16]) or "none"
                raise AdapterNotFound("adapter", f"no adapter of that name is loaded (loaded: {loaded})", name)
            return info

    def claim(self, tickets: Sequence[int], name: str) -> str:
        """Keep the adapter until `cancel` of each ticket. Returns its digest. Raises `AdapterNotFound`."""
        with self._lock:
            digest = self.find(name).digest
            self._claims.update(dict.fromkeys(tickets, digest))
            return digest

    def claimed(self, ticket: int) -> str:
        """Digest of the adapter that the ticket has claimed; "" for none."""
        with self._lock:
            return self._claims.get(ticket, "")

    def cancel(self, ticket: int) -> None:
        with self._lock:
            digest = self._claims.pop(ticket, "")
            waiting = [] if digest in self._claims.values() else self._leaving.pop(digest, [])
        for future in waiting:  # outside the lock: callbacks of a future run at once, and may call back here
            future.set_result(None)

    def forget(self, name: str, wait: bool) -> Future[None]:
        """Remove a name: no later request can use it. The future is done when no earlier one does.

        Raises `AdapterNotFound`, `AdapterInUse`.
        """
        done: Future[None] = Future()
        with self._lock:
            digest = self.find(name).digest
            users = sum(claimed == digest for claimed in self._claims.values())
            if users and not wait:
                raise AdapterInUse("adapter", f"{users} requests use it; pass wait=True to wait for them", name)
            del self._names[name]
            if users:
                self._leaving.setdefault(digest, []).append(done)
                return done
        done.set_result(None)
        return done

    def list(self) -> tuple[AdapterInfo, ...]:
        with self._lock:
            used = builtins.list(self._claims.values())
            infos = [self._names[name] for name in sorted(self._names)]
            return tuple(replace(info, requests=used.count(info.digest)) for info in infos)

    def counts(self) -> dict[str, int]:
        infos = self.list()
        return {
            "loaded": len(infos),
            "in_memory": sum(info.in_memory for info in infos),
            "nbytes": sum(info.nbytes for info in infos),
        }

    def close(self) -> None:
        with self._lock:
            waiting = [future for futures in self._leaving.values() for future in futures]
            self._leaving.clear()
        for future in waiting:
            future.cancel()
