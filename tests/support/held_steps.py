"""A real engine stopped behind a number of steps, so that what a test needs to be still running is still running.

Whoever reads a first chunk and acts on it races the engine, which goes on meanwhile on threads of its own; on a slow
machine the answer is complete before the test has had its turn. So the engine is held from before the request.
"""

from __future__ import annotations

import threading
from typing import Any

from support.fake_engine import PATIENCE

from asyncengine import AsyncEngine
from asyncengine.step import Batch


class HeldSteps:
    """A gate that lets `after` more steps of `engine` pass. The one behind them waits for `release`, on the device
    thread: the engine's loop goes on, and what the earlier steps made is delivered."""

    def __init__(self, engine: AsyncEngine, after: int = 0) -> None:
        self._executor: Any = engine.core.loop.runner.executor  # type: ignore[attr-defined]
        self._launch = self._executor.launch
        self._passing = after
        self._go = threading.Event()
        self.reached = threading.Event()
        """Set when a step waits."""
        self._executor.launch = self._held

    def release(self) -> None:
        self._executor.launch = self._launch
        self._go.set()

    def __enter__(self) -> HeldSteps:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def _held(self, batch: Batch) -> Any:
        if self._passing:
            self._passing -= 1
        else:
            self.reached.set()
            assert self._go.wait(PATIENCE), "nobody lets the step go"
        return self._launch(batch)
