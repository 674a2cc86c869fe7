"""Adapters in host memory under a byte budget: the tier between the files and the device slots."""

from __future__ import annotations

from collections.abc import Callable

from asyncengine.errors import InvariantViolation
from asyncengine.lora.adapter import Adapter


class HostStore:
    """Adapters by digest, least recently used first. What is held stays. Not thread-safe: the registry's lock is."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._resident: dict[str, Adapter] = {}
        self.held: dict[str, int] = {}
        self.reserved: dict[str, int] = {}

    @property
    def nbytes(self) -> int:
        return sum(adapter.nbytes for adapter in self._resident.values())

    @property
    def digests(self) -> list[str]:
        return list(self._resident)

    def get(self, digest: str) -> Adapter | None:
        return self._resident.get(digest)

    def holds(self, digest: str) -> int:
        return self.held.get(digest, 0)

    # ---------------------------------------------------------------- use

    def hold(self, digest: str) -> None:
        """Keep `digest`, which is here, until as many `let_go`."""
        self._resident[digest] = self._resident.pop(digest)  # used most recently
        self.held[digest] = self.held.get(digest, 0) + 1

    def let_go(self, digest: str) -> None:
        left = self.holds(digest) - 1
        if left < 0:
            raise InvariantViolation(f"adapter {digest[:12]} let go more often than held")
        if left:
            self.held[digest] = left
        else:
            del self.held[digest]

    # ---------------------------------------------------------------- room

    def victims(self, need: int, stays: Callable[[str], bool], leaves: str | None = None) -> list[str] | None:
        """Whom to evict, in order, so that `need` more bytes fit beside what is reserved. None: they cannot fit.

        `leaves` goes before all others.
        """
        excess = self.nbytes + sum(self.reserved.values()) + need - self.max_bytes
        chosen = []
        for digest in sorted(self._resident, key=lambda digest: digest != leaves):
            if excess <= 0:
                break
            adapter = self._resident[digest]
            if not self.holds(digest) and not stays(digest):
                chosen.append(digest)
                excess -= adapter.nbytes
        return chosen if excess <= 0 else None

    def reserve(self, digest: str, nbytes: int) -> None:
        """`digest` is being read and will need `nbytes`. Nothing is evicted for it before it is here."""
        self.reserved[digest] = nbytes

    def unreserve(self, digest: str) -> None:
        self.reserved.pop(digest, None)

    def put(self, adapter: Adapter, stays: Callable[[str], bool], leaves: str | None = None) -> bool:
        """Take `adapter` in, evicting what must go. False, and nothing changed, if there cannot be room."""
        if adapter.digest in self._resident:
            return True
        victims = self.victims(adapter.nbytes, stays, leaves)
        if victims is None:
            return False
        for digest in victims:
            self.drop(digest)
        self._resident[adapter.digest] = adapter
        return True

    def drop(self, digest: str) -> None:
        if self.holds(digest):
            raise InvariantViolation(f"adapter {digest[:12]} is dropped while it is held")
        self._resident.pop(digest, None)

    def clear(self) -> None:
        for books in (self._resident, self.held, self.reserved):
            books.clear()

    def check(self) -> None:
        """Raises `InvariantViolation` if the books do not balance."""
        if self.nbytes > self.max_bytes:
            raise InvariantViolation(f"adapters take {self.nbytes} bytes of {self.max_bytes}")
        if any(digest not in self._resident for digest in self.held):
            raise InvariantViolation("an adapter is held, but not in memory")
