"""A real engine stopped behind a number of steps, so that what a test needs to be still running is still running.

Whoever reads a first chunk and acts on it races the engine, which goes on meanwhile on threads of its own; on a slow
machine the answer is complete before the test has had its turn. So the engine is held from before the request.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from support.fake_engine import PATIENCE

from asyncengine import AsyncEngine
from asyncengine.engine.loop import EngineLoop
from asyncengine.scheduler.messages import Abort, Drain, Pause
from asyncengine.step import Batch


class HeldSteps:
    """A gate that lets `after` more steps of `engine` pass. The one behind them waits for `release`, on the device
    thread: the engine's loop goes on, and what the earlier steps made is delivered. `until_left`: the gate is open for
    good once a request is left or the engine is to pause or to close, of which its loop hears between steps."""

    def __init__(self, engine: AsyncEngine | EngineLoop, after: int = 0, *, until_left: bool = False) -> None:
        loop: Any = engine if isinstance(engine, EngineLoop) else engine.core.loop
        self._executor, self._inbox = loop.runner.executor, loop.inbox
        self._launch, self._post = self._executor.launch, self._inbox.post
        self._passing = after
        self._go = threading.Event()
        self.reached = threading.Event()
        """Set when a step waits."""
        self._executor.launch = self._held
        if until_left:
            self._inbox.post = self._posted

    def release(self) -> None:
        self._executor.launch, self._inbox.post = self._launch, self._post
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

    def _posted(self, *messages: Any) -> bool:
        taken: bool = self._post(*messages)  # before the next step begins, so that it is the last of what was left
        if any(isinstance(message, Abort | Drain | Pause) for message in messages):
            self.release()
        return taken


HOLD = (
    f"import sys; sys.path.insert(0, {str(Path(__file__).parents[1])!r});"
    "from support.held_steps import hold_every_engine; hold_every_engine();"
)
"""Beginning of a program none of whose engines comes to the end of an answer before that is left."""
HELD_COMMAND = ("-c", f"{HOLD} from asyncengine.__main__ import script; script()")
"""Arguments of Python, in place of `-m asyncengine`, for a command that begins so."""


def hold_every_engine() -> None:
    run = EngineLoop.run

    async def held(loop: EngineLoop) -> None:
        HeldSteps(loop, after=20, until_left=True)
        await run(loop)

    EngineLoop.run = held  # type: ignore[method-assign]
