"""An engine's steps, seen from outside while it serves: when each ran, what was in it, and where the host's time went.

The engine's own functions are timed. Wall-clock time, on as many threads as the engine uses: schedule, deliver and
commit run on the loop's thread; reading may run elsewhere. What waiting for the device takes is not counted, as far as
it is told apart: a launch that finds the device's queue full does count.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from asyncengine.async_engine import AsyncEngine
from asyncengine.events import Event, Preempted, StepDone

_METHODS = {"apply": "apply_inbox", "schedule": "schedule", "deliver": "deliver", "commit": "commit"}
"""Methods of `EngineLoop`, by part; one that it does not have takes no time."""
PARTS = ("apply", "schedule", "deliver", "commit", "launch", "read")


@dataclass(slots=True)
class Taken:
    """One step. Times in seconds; `retired` since the clock began."""

    rows: int = 0
    prompts: int = 0
    """Rows that compute more than the token they sampled last."""
    prompt_tokens: int = 0
    launch: float = 0.0
    read: float = 0.0
    retired: float = 0.0
    gap: float = 0.0
    """Since the step before retired."""
    running: int = 0
    waiting: int = 0
    parts: dict[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        return (
            f"{self.gap * 1e3:.1f} ms at {self.retired:.2f} s: {self.rows} rows, {self.prompts} of them prompts of "
            f"{self.prompt_tokens} tokens; launch {self.launch * 1e3:.1f}, read {self.read * 1e3:.1f}; "
            f"{self.running} running, {self.waiting} waiting"
        )


class StepClock:
    """Records `steps` of an engine, from now on until `close`."""

    def __init__(self, engine: AsyncEngine) -> None:
        self.steps: list[Taken] = []
        self.preempted = 0
        self._pending: dict[int, Taken] = {}
        self._turn = dict.fromkeys(PARTS, 0.0)
        self._began = self._last = time.perf_counter()
        self._loop: Any = engine.core.loop
        self._executor: Any = engine.core.loop.runner.executor
        self._methods = [method for method in _METHODS.values() if hasattr(self._loop, method)]
        for name, method in _METHODS.items():
            if method in self._methods:
                setattr(self._loop, method, self._timed(name, getattr(self._loop, method)))
        launch = self._executor.launch

        def timed_launch(batch: Any) -> Any:
            began = time.perf_counter()
            handle = launch(batch)
            taken = self._pending[batch.step] = _described(batch)
            taken.launch = time.perf_counter() - began
            return _TimedHandle(handle, taken)

        self._executor.launch = timed_launch  # type: ignore[method-assign]
        self._stop_listening = engine.on_event(self._hear)

    def close(self) -> None:
        """The engine runs as it did before."""
        self._stop_listening()
        for method in self._methods:
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

    def _hear(self, event: Event) -> None:
        """Called from within a commit: what the turn took so far belongs to the step that retires, within one turn."""
        if isinstance(event, Preempted):
            self.preempted += event.count
        if not isinstance(event, StepDone) or (taken := self._pending.pop(event.step, None)) is None:
            return
        now = time.perf_counter()
        taken.retired, taken.gap, self._last = now - self._began, now - self._last, now
        taken.running, taken.waiting = event.running, event.waiting
        taken.parts = {**self._turn, "launch": taken.launch, "read": taken.read}
        self._turn = dict.fromkeys(PARTS, 0.0)
        self.steps.append(taken)

    def medians(self, rows: int) -> dict[str, float]:
        """Seconds by part, and their "total", in decode steps of at least `rows` rows; empty if there are none."""
        steps = [taken.parts for taken in self.steps if taken.rows >= rows and not taken.prompts]
        if not steps:
            return {}
        found = {name: statistics.median(parts[name] for parts in steps) for name in PARTS}
        return {**found, "total": statistics.median(sum(parts.values()) for parts in steps)}


def _described(batch: Any) -> Taken:
    prompts = [row.num_scheduled for row in batch.rows if row.start + row.num_scheduled <= row.spec.prompt_len]
    return Taken(len(batch.rows), len(prompts), sum(prompts))


class _TimedHandle:
    """A `step.StepHandle` that tells reading results from waiting for them."""

    def __init__(self, handle: Any, taken: Taken) -> None:
        self._handle, self._taken = handle, taken

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handle, name)

    def wait(self) -> Any:
        block = getattr(self._handle, "block", None)
        if block is None and (readback := getattr(self._handle, "readback", None)) is not None:
            block = readback.wait
        if block is not None:
            block()
        began = time.perf_counter()
        result = self._handle.wait()
        self._taken.read = time.perf_counter() - began
        return result
