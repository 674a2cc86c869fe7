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
    """Adapters by digest, least recently used first. Held ones stay. Not thread-safe: the registry holds its lock."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.resident: dict[str, Adapter] = {}
        self.held: dict[str, int] = {}
        self.reserved: dict[str, int] = {}
        """Bytes of contents that are being read. Nothing is evicted for them until they have been read."""

    @property
    def nbytes(self) -> int:
        return sum(adapter.nbytes for adapter in self.resident.values())

    def holds(self, digest: str) -> int:
        return self.held.get(digest, 0)

    # ---------------------------------------------------------------- use

    def hold(self, digest: str) -> None:
        """Keep `digest`, which is in memory, until it was let go as many times as held."""
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
        """The digests to evict, in order, so that `need` more bytes fit beside what is reserved; None if they cannot.

        `leaves`: a digest to be evicted before all others.
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
        """Add `adapter`, evicting others as needed. False, and nothing changed, if there cannot be room."""
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
        for table in (self.resident, self.held, self.reserved):
            table.clear()

    def check(self) -> None:
        """Raises `InvariantViolation` if the budget is exceeded or a held adapter is missing."""
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
    """The claims of requests. Each is made, started, granted and given back. Started claims wait in order of arrival.

    A claim that finds no room, because everything in memory is in use, is passed by later ones whose adapter is in
    memory, `max_passes` times. Then nothing is granted before it, and adapters in use drain. Adapters that are not
    evicted in any case are always granted: they take no room from others, or their own claims have to drain.
    """

    def __init__(
        self, store: HostStore, max_passes: int, stays: Callable[[str], bool], hopeless: Callable[[Meaning], bool]
    ) -> None:
        """`stays(digest)`: it may not be evicted even without a granted claim. `hopeless(meaning)`: there would be no
        room for it even if no adapter were in use."""
        self._store = store
        self.max_passes = max_passes
        self.stays = stays
        self._hopeless = hopeless
        self.by_ticket: dict[int, _Claim] = {}
        self._users: dict[str, int] = {}
        self.waiting: dict[str, dict[int, _Claim]] = {}
        """Claims started and not granted, by digest and then by ticket, both in order of arrival."""

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

    # ---------------------------------------------------------------- granting

    def pump(self, calls: Calls) -> list[Meaning]:
        """Grant the claims that can be granted, and return the contents to read for others."""
        reload: list[Meaning] = []
        blocked: _Claim | None = None
        is_full = False  # some claim was passed `max_passes` times: later ones may not pass it any more
        for digest, group in list(self.waiting.items()):
            claims = list(group.values())
            if digest in self._store.resident:
                passing = (is_full or blocked is not None) and not self.stays(digest)
                for claim in claims:
                    if passing and (is_full or (blocked is not None and blocked.passes >= self.max_passes)):
                        break
                    if passing and blocked is not None:
                        blocked.passes += 1
                    self._grant(claim, calls)
            elif is_full:
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
                is_full = True
        return reload

    def _grant(self, claim: _Claim, calls: Calls) -> None:
        claim.granted = True
        self._store.hold(claim.meaning.digest)
        self._leave(claim)
        self._tell(claim, claim.meaning.digest, calls)

    def _leave(self, claim: _Claim) -> None:
        """Remove `claim` from those that wait, if it is one of them."""
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
        """Note that `digest` was read again (`adapter`), or could not be (`error`). Call `pump` next."""
        self._store.reserved.pop(digest, None)
        claims = list(self.waiting.get(digest, {}).values())
        if error is not None:
            self._fail(claims, error, calls)
        elif adapter is not None and self.users(digest) and not self._store.put(adapter, self.stays):
            for claim in claims[:1]:  # others took the room while it was read: they may not pass a second time
                claim.passes = self.max_passes

    def _fail(self, claims: list[_Claim], error: Exception, calls: Calls) -> None:
        for claim in claims:
            self._leave(claim)
            self._tell(claim, again(error), calls)

    def clear(self) -> None:
        for table in (self.by_ticket, self._users, self.waiting):
            table.clear()
