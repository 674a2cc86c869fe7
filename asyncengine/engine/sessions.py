"""Sessions as their callers see them: news for the scheduler, and how long each tool keeps a session away."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import partial
from typing import Any

from asyncengine.engine.assembler import Assembler
from asyncengine.engine.serving_loop import ServingLoop
from asyncengine.engine.validation import PreparedRequest
from asyncengine.scheduler.messages import SessionEvent

MOST_WAITS = 4096
"""Tools whose times are remembered, and sessions that wait for any; the oldest are forgotten first."""
NEWEST = 0.3
"""Weight of the newest time of a tool in its mean."""


class ToolWaits:
    """Measures the time between an answer with calls and the next request of its session, by the tools' names.

    Where all tools of an answer have been measured, the scheduler is told when the session will be back: its pages are
    kept or given up accordingly. From any thread."""

    def __init__(self, loop: ServingLoop) -> None:
        self._loop = loop
        self.seconds: dict[str, float] = {}
        """Mean seconds for which each tool has kept sessions away, by its name."""
        self._called: dict[str, tuple[float, tuple[str, ...]]] = {}
        self._lock = threading.Lock()

    def assembler(self, prepared: PreparedRequest) -> Assembler:
        """The consumer's end of a request that is to be posted."""
        session = prepared.spec.options.session
        if session is None:
            return Assembler(prepared, self._loop.clock.now)
        prepared.mailbox.away = self._returned(session)
        return Assembler(prepared, self._loop.clock.now, partial(self._answered, session))

    def _answered(self, session: str, tools: Sequence[str]) -> None:
        now = self._loop.clock.now()
        with self._lock:
            _remember(self._called, session, (now, tuple(tools)))
            waits = [self.seconds.get(tool) for tool in tools]
        measured = [seconds for seconds in waits if seconds is not None]
        if len(measured) == len(waits):  # tools may run side by side: the slowest decides
            self._loop.inbox.post(SessionEvent(session, "waiting", now, max(measured)))

    def _returned(self, session: str) -> float | None:
        with self._lock:
            if session not in self._called:
                return None
            at, tools = self._called.pop(session)
            took = self._loop.clock.now() - at
            for tool in tools:
                before = self.seconds.get(tool, took)
                _remember(self.seconds, tool, before + NEWEST * (took - before))
            return took


def _remember(table: dict[str, Any], key: str, value: Any) -> None:
    table.pop(key, None)
    table[key] = value
    if len(table) > MOST_WAITS:
        del table[next(iter(table))]
