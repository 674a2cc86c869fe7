"""Limits on how long a step may run: one timer for all, as two for each take as long as scheduling it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

Watched = TypeVar("Watched")


class Watchdog(Generic[Watched]):
    """Looks at what is being waited for when it has lasted `soft` seconds, and when it has lasted `hard`.

    The timer runs on while nothing is waited for, and is armed again only where something is: for a step that began
    since, it fires early, sees so, and is armed for that.
    """

    def __init__(
        self, soft: float, hard: float, slow: Callable[[Watched], object], over: Callable[[Watched], object]
    ) -> None:
        """`slow` and `over` are told what has reached the first and the second limit, once each."""
        self._limits = (soft, slow), (hard, over)
        self._watched: Watched | None = None
        self._began = 0.0
        self._reported: set[int] = set()
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, watched: Watched) -> None:
        """From now on this is waited for, on the running loop."""
        loop = asyncio.get_running_loop()
        self._watched, self._began = watched, loop.time()
        if self._reported:  # the timer is set for what the one before has yet to reach
            self._reported = set()
            self._stop()
        if self._timer is None:
            self._arm(loop)

    def end(self) -> None:
        """It is there, or nobody waits for it any more."""
        self._watched = None

    def close(self) -> None:
        """Idempotent."""
        self._watched = None
        self._stop()

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self, loop: asyncio.AbstractEventLoop) -> None:
        due = [self._began + limit for place, (limit, _) in enumerate(self._limits) if place not in self._reported]
        self._timer = loop.call_at(min(due), self._look, loop) if due else None

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = None
        watched = self._watched
        if watched is None:
            return
        now = loop.time()
        try:
            for place, (limit, tell) in enumerate(self._limits):
                if place not in self._reported and now >= self._began + limit:
                    self._reported.add(place)
                    tell(watched)
        finally:
            self._arm(loop)
