"""Time that moves only when told to."""

from __future__ import annotations


class ManualClock:
    """A `Clock` for tests: no test waits for real time to pass."""

    def __init__(self, now: float = 0.0) -> None:
        self._now = now

    def now(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        self._now += seconds
