"""Where time comes from. One reading per step makes a run replayable."""

from __future__ import annotations

import time

from asyncengine.protocols import Clock


class MonotonicClock:
    """Seconds of the machine's monotonic clock."""

    def now(self) -> float:
        return time.monotonic()


__all__ = ["Clock", "MonotonicClock"]
