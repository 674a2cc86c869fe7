"""Adapters in host memory under a byte budget, the tier between the files and the device slots, and the claims of
requests on them. No threads, no files: the registry has those.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from asyncengine.errors import AdapterError, InvariantViolation, again
from asyncengine.lora.adapter import Adapter, Meaning
from asyncengine.seams import AdapterDone


class HostStore:
    """Adapters by digest, least recently used first. What is held stays. Not thread-safe: the registry's lock is."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.resident: dict[str, Adapter] = {}
        self.held: dict[str, int] = {}
        self.reserved: dict[str, int] = {}
        """Bytes that contents which are being read will need. Nothing is evicted for them before they are here."""

    @property
    def nbytes(self) -> int:
        return sum(adapter.nbytes for adapter in self.resident.values())

    def holds(self, digest: str) -> int:
        return self.held.get(digest, 0)

    # ---------------------------------------------------------------- use

    def hold(self, digest: str) -> None:
        """Keep `digest`, which is here, until as many `let_go`."""
        self.resident[digest] = self.resident.pop(digest)  # used most recently
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
        for digest in sorted(self.resident, key=lambda digest: digest != leaves):
            if excess <= 0:
                break
            adapter = self.resident[digest]
            if not self.holds(digest) and not stays(digest):
                chosen.append(digest)
                excess -= adapter.nbytes
        return chosen if excess <= 0 else None

    def put(self, adapter: Adapter, stays: Callable[[str], bool], leaves: str | None = None) -> bool:
        """Take `adapter` in, evicting what must go. False, and nothing changed, if there cannot be room."""
        if adapter.digest in self.resident:
            return True
        victims = self.victims(adapter.nbytes, stays, leaves)
        if victims is None:
            return False
        for digest in victims:
            self.drop(digest)
        self.resident[adapter.digest] = adapter
        return True

    def drop(self, digest: str) -> None:
        if self.holds(digest):
            raise InvariantViolation(f"adapter {digest[:12]} is dropped while it is held")
        self.resident.pop(digest, None)

    def clear(self) -> None:
        for books in (self.resident, self.held, self.reserved):
            books.clear()

    def check(self) -> None:
        """Raises `InvariantViolation` if the books do not balance."""
        if self.nbytes > self.max_bytes:
            raise InvariantViolation(f"adapters take {self.nbytes} bytes of {self.max_bytes}")
        if any(digest not in self.resident for digest in self.held):
            raise InvariantViolation("an adapter is held, but not in memory")


Calls = list[Callable[[], object]]
"""Calls to make once the registry's lock is free."""


@dataclass(slots=True)
class _Claim:
    ticket: int
    meaning: Meaning
    done: AdapterDone | None = None
    granted: bool = False
    passes: int = 0
    """Claims granted past this one while there was no room for it."""


class Claims:
    """Each claim is made, started, granted and given back. Started claims wait in order of arrival.

    One that finds no room, because everything in memory is in use, lets later ones pass whose adapter is in memory:
    `max_passes` of them. Then nothing is granted before it, and what is in use drains. But what stays in memory in any
    case is always granted: it is in no request's way, or its claims are what must drain.
    """

    def __init__(
        self, store: HostStore, max_passes: int, stays: Callable[[str], bool], hopeless: Callable[[Meaning], bool]
    ) -> None:
        """`stays(digest)`: may not be evicted even if no granted claim holds it. `hopeless(meaning)`: there would be no
        room even if nothing were in use."""
        self._store = store
        self.max_passes = max_passes
        self.stays = stays
        self._hopeless = hopeless
        self.by_ticket: dict[int, _Claim] = {}
        self._users: dict[str, int] = {}
        self.waiting: dict[str, dict[int, _Claim]] = {}
        """Started and not granted, by digest in order of the first arrival, then by ticket likewise."""

    def users(self, digest: str) -> int:
        """Claims of `digest`, started or not, granted or not."""
        return self._users.get(digest, 0)

    def add(self, ticket: int, meaning: Meaning) -> None:
        if ticket in self.by_ticket:
            raise ValueError(f"ticket {ticket} has a claim already")
        self.by_ticket[ticket] = _Claim(ticket, meaning)
        self._users[meaning.digest] = self.users(meaning.digest) + 1

    def start(self, ticket: int, done: AdapterDone) -> None:
        claim = self.by_ticket.get(ticket)
        if claim is not None and claim.done is None:
            claim.done = done
            self.waiting.setdefault(claim.meaning.digest, {})[ticket] = claim

    def remove(self, ticket: int) -> str | None:
        """Give back the claim of `ticket`; its digest, or None if there was none."""
        claim = self.by_ticket.pop(ticket, None)
        if claim is None:
            return None
        digest = claim.meaning.digest
        self._leave(claim)
        self._users[digest] -= 1
        if not self._users[digest]:
            del self._users[digest]
        if claim.granted:
            self._store.let_go(digest)
        return digest

    # ---------------------------------------------------------------- whose turn it is

    def pump(self, calls: Calls) -> list[Meaning]:
        """Grant what can be granted; the contents to read for those that wait."""
        reload: list[Meaning] = []
        blocked: _Claim | None = None
        full = False  # somebody has been passed often enough
        for digest, group in list(self.waiting.items()):
            claims = list(group.values())
            if digest in self._store.resident:
                passing = (full or blocked is not None) and not self.stays(digest)
                for claim in claims:
                    if passing and (full or (blocked is not None and blocked.passes >= self.max_passes)):
                        break
                    if passing and blocked is not None:
                        blocked.passes += 1
                    self._grant(claim, calls)
            elif full:
                continue
            elif digest not in self._store.reserved and blocked is None:
                meaning = claims[0].meaning
                if self._store.victims(meaning.nbytes, self.stays) is not None:
                    self._store.reserved[digest] = meaning.nbytes
                    reload.append(meaning)
                elif self._hopeless(meaning):
                    limit = f"pinned adapters leave no room for {meaning.nbytes} bytes of {self._store.max_bytes}"
                    self._fail(claims, AdapterError("adapter_memory", limit, meaning.name), calls)
                else:
                    blocked = claims[0]
            first = blocked or claims[0]
            if first.passes >= self.max_passes and first.ticket in self.waiting.get(first.meaning.digest, {}):
                full = True
        return reload

    def _grant(self, claim: _Claim, calls: Calls) -> None:
        claim.granted = True
        self._store.hold(claim.meaning.digest)
        self._leave(claim)
        self._tell(claim, claim.meaning.digest, calls)

    def _leave(self, claim: _Claim) -> None:
        """`claim` waits no more, if it did."""
        digest = claim.meaning.digest
        group = self.waiting.get(digest, {})
        group.pop(claim.ticket, None)
        if not group:
            self.waiting.pop(digest, None)

    def _tell(self, claim: _Claim, outcome: str | Exception, calls: Calls) -> None:
        done, ticket = claim.done, claim.ticket
        assert done is not None
        calls.append(lambda: done(ticket, outcome))

    def reloaded(self, digest: str, adapter: Adapter | None, error: Exception | None, calls: Calls) -> None:
        """`digest` was read again, or cannot be. Call `pump` next."""
        self._store.reserved.pop(digest, None)
        mine = list(self.waiting.get(digest, {}).values())
        if error is not None:
            self._fail(mine, error, calls)
        elif adapter is not None and self.users(digest) and not self._store.put(adapter, self.stays):
            for claim in mine[:1]:  # others took the room meanwhile; not a second time
                claim.passes = self.max_passes

    def _fail(self, claims: list[_Claim], error: Exception, calls: Calls) -> None:
        for claim in claims:
            self._leave(claim)
            self._tell(claim, again(error), calls)

    def clear(self) -> None:
        for books in (self.by_ticket, self._users, self.waiting):
            books.clear()
