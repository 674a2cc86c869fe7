"""Adapters that share a batch, and the device slot in which each lies.

An adapter keeps its slot until all its admissions are released, which the scheduler does only when the last step that
names the slot has retired: so a slot is never overwritten under a step. Then the adapter stays in the slot until it is
needed for another (least recently used first), so that one that returns costs no copy.

No request waits here while a slot is idle, and none jumps the queue: the scheduler asks in its order, and first for a
request that has been passed over `max_passes` times, for which it lets one slot drain (see `scheduler.admission`).
Admissions are counted and not rows, so that requests that are not scheduled in a step, or have a prompt half computed,
keep their slots (SGLang #25865).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heappop
from typing import Any

from asyncengine.errors import InvariantViolation
from asyncengine.step import AdapterSwap


class AdapterSlots:
    """An `AdapterAdmission` over slots 1 ... max_loras (0 means no adapter). Used by one thread, no clock."""

    def __init__(self, max_loras: int, weights: Callable[[str], Any] | None = None) -> None:
        """`weights(digest)`: the payload of a swap, asked for at admission, for the host may evict it later."""
        if max_loras < 1:
            raise ValueError(f"max_loras must be at least 1, got {max_loras}")
        self.max_loras = max_loras
        self._weights = weights
        self._empty = list(range(1, max_loras + 1))
        """A heap, so that low slots come first: a step on CPU computes up to the highest slot in use."""
        self._swaps: list[AdapterSwap] = []
        self._slots: dict[str, int] = {}
        self._users: dict[str, int] = {}
        self._idle: dict[str, None] = {}
        """Adapters in a slot without an admission, least recently used first."""
        self.copies = 0
        """The number of times that a slot got new content."""

    # ---------------------------------------------------------------- protocol

    def fits(self, digest: str) -> bool:
        return digest in self._slots or bool(self._empty or self._idle)

    def admit(self, digest: str, running: Sequence[str]) -> int | None:
        for other in running:
            if other not in self._users:
                raise InvariantViolation(f"adapter {other[:12]} runs, but its slot was released")
        if digest not in self._slots and not self._place(digest):
            return None
        self._idle.pop(digest, None)
        self._users[digest] = self._users.get(digest, 0) + 1
        return self._slots[digest]

    def release(self, digest: str) -> None:
        users = self._users.get(digest, 0)
        if not users:
            raise InvariantViolation(f"adapter {digest[:12]} released more often than admitted")
        if users > 1:
            self._users[digest] = users - 1
        else:
            del self._users[digest]
            self._idle[digest] = None

    def _place(self, digest: str) -> bool:
        """Give `digest` an empty slot, or the one that was used least recently."""
        if self._empty:
            slot = heappop(self._empty)
        elif self._idle:
            oldest = next(iter(self._idle))
            del self._idle[oldest]
            slot = self._slots.pop(oldest)
        else:
            return False
        self._slots[digest] = slot
        self.copies += 1
        self._swaps.append(AdapterSwap(slot, digest, None if self._weights is None else self._weights(digest)))
        return True

    def take_swaps(self) -> tuple[AdapterSwap, ...]:
        if not self._swaps:
            return ()
        swaps, self._swaps = tuple(self._swaps), []
        return swaps

    # ---------------------------------------------------------------- the rest of the engine

    @property
    def resident(self) -> dict[str, int]:
        """Digest -> slot of every adapter on the device, used or idle."""
        return dict(self._slots)

    @property
    def in_use(self) -> dict[str, int]:
        """Digest -> admissions not yet released."""
        return dict(self._users)

    def check(self) -> None:
        """Each slot is empty or holds one adapter, which is used or idle. Raises `InvariantViolation`."""
        slots = sorted([*self._empty, *self._slots.values()])
        if slots != list(range(1, self.max_loras + 1)):
            raise InvariantViolation(f"adapter slots out of balance: {slots}")
        if sorted([*self._users, *self._idle]) != sorted(self._slots):
            raise InvariantViolation("an adapter in a slot is neither used nor idle, or both")
