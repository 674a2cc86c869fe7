"""The engine's source of time. One reading per step makes a run replayable."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """The only source of time. Tests use a manual one."""

    def now(self) -> float:
        """Seconds on a monotonic scale."""


class MonotonicClock:
    """Seconds of the machine's monotonic clock."""

    def now(self) -> float:
        return time.monotonic()
