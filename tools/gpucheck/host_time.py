"""Where the host's time goes in a step: the engine's own functions, timed from outside while it serves.

Wall-clock time on three threads. The loop's thread applies, schedules, delivers and commits; the device thread
prepares and launches; the results thread reads. What waiting for the device takes is not counted, as far as it is told
apart: a launch that finds the device's queue full does count.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

from asyncengine.async_engine import AsyncEngine
from asyncengine.events import Event, StepDone

_METHODS = {"apply": "_apply_inbox", "schedule": "_schedule", "deliver": "_deliver", "commit": "_commit"}
"""Of `EngineLoop`, by part."""
PARTS = ("apply", "schedule", "deliver", "commit", "launch", "read")


class HostClock:
    """Seconds by part, step by step, of an engine from now on."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._turn = dict.fromkeys(PARTS, 0.0)
        self._launches: dict[int, float] = {}
        self._reads: dict[int, float] = {}
        self._steps: list[tuple[int, dict[str, float]]] = []
        self._loop: Any = engine.core.loop
        loop, runner = self._loop, engine.core.loop.runner
        self._executor = runner.executor  # type: ignore[attr-defined]
        for name, method in _METHODS.items():
            setattr(loop, method, self._timed(name, getattr(loop, method)))
        executor = self._executor
        launch = executor.launch

        def timed_launch(batch: Any) -> Any:
            began = time.perf_counter()
            handle = launch(batch)
            self._launches[batch.step] = time.perf_counter() - began
            return _TimedHandle(handle, batch.step, self._reads)

        executor.launch = timed_launch
        self._stop_listening = engine.on_event(self._finish)

    def close(self) -> None:
        """The engine runs as it did before."""
        self._stop_listening()
        for method in _METHODS.values():
            delattr(self._loop, method)
        del self._executor.launch

    def _timed(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            began = time.perf_counter()
            try:
                return method(*arguments)
            finally:
                self._turn[name] += time.perf_counter() - began

        return timed

    def _finish(self, event: Event) -> None:
        """Called from within a commit: what the turn took so far belongs to the step that retires, within one turn."""
        if not isinstance(event, StepDone):
            return
        parts = dict(self._turn)
        parts["launch"] = self._launches.pop(event.step, 0.0)
        parts["read"] = self._reads.pop(event.step, 0.0)
        self._turn = dict.fromkeys(PARTS, 0.0)
        if event.rows == event.tokens:
            self._steps.append((event.rows, parts))

    def medians(self, rows: int) -> dict[str, float]:
        """Seconds by part, and their "total", in decode steps of at least `rows` rows; empty if there are none."""
        steps = [parts for count, parts in self._steps if count >= rows]
        if not steps:
            return {}
        found = {name: statistics.median(parts[name] for parts in steps) for name in PARTS}
        return {**found, "total": statistics.median(sum(parts.values()) for parts in steps)}


class _TimedHandle:
    """A `step.StepHandle` that tells reading results from waiting for them."""

    def __init__(self, handle: Any, step: int, reads: dict[int, float]) -> None:
        self._handle, self._step, self._reads = handle, step, reads

    @property
    def ready(self) -> bool:
        return bool(self._handle.ready)

    def wait(self) -> Any:
        readback = getattr(self._handle, "readback", None)
        if readback is not None:
            readback.wait()
        began = time.perf_counter()
        result = self._handle.wait()
        self._reads[self._step] = time.perf_counter() - began
        return result
