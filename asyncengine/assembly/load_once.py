"""An engine's parts, loaded once for however many callers start it at the same time."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any

from asyncengine.config import EngineConfig, engine_config
from asyncengine.engine.frontend import Frontend
from asyncengine.engine.process import PROCESS, LoadAttempt
from asyncengine.engine.threads import begun
from asyncengine.errors import EngineClosed

Build = Callable[[], Frontend]


def loader_of(
    model: str | os.PathLike[str], config: EngineConfig | None, settings: Mapping[str, Any]
) -> Callable[[LoadAttempt], Frontend]:
    """The loader of `model`, for an attempt that may be given up. Raises `InvalidParameter` for an unknown setting."""
    from asyncengine.assembly.wiring import load_frontend

    return partial(load_frontend, model, engine_config(config, settings))


class LoadOnce:
    """A load that the first caller begins, on a thread of its own, and `close` gives up. Thread-safe."""

    def __init__(self, build: Build, attempt: LoadAttempt | None = None) -> None:
        self._build = build
        self._attempt = attempt or LoadAttempt()
        self._lock = threading.Lock()
        self._outcome: Future[Frontend] | None = None
        self._loaded: Frontend | None = None
        self._born = PROCESS.generation
        """The process in which it was begun."""
        self.closed = False

    @property
    def is_elsewhere(self) -> bool:
        """Whether it was begun in a process that this one was forked from."""
        return self._outcome is not None and self._born != PROCESS.generation

    def described(self, frontend: Frontend | None) -> str:
        """The engine in a few words, for its `repr`; `frontend`: the one that is served. Raises nothing."""
        if frontend is None:
            begun = self._outcome is not None and not (self._outcome.done() and self._loaded is None)
            state = "closed" if self.closed else "loading" if begun else "not loaded"
            return f"{self._attempt.model!r}: {state}"
        asleep, info = getattr(frontend.loop, "asleep", None), frontend.info
        state = "awake" if asleep is None else asleep.state
        if frontend.loop.failure is not None:
            state = "dead"
        elif self.closed or frontend.client.closing:
            state = "closed"
        return f"{info.name!r}: {state}, {info.dtype} on {info.device}"

    def check_process(self) -> None:
        """Raises `WrongProcess` if it `is_elsewhere`."""
        if self.is_elsewhere:
            PROCESS.check_unforked(self._born)

    def begin(self) -> Future[Frontend]:
        """The front end, now or later. A failure is not kept: the next caller tries again. Raises `EngineClosed`."""
        with self._lock:
            if self.closed:
                raise EngineClosed("the engine is closed; make a new one")
            outcome = self._outcome
            if outcome is None or (outcome.done() and outcome.exception() is not None):
                self._born = PROCESS.generation
                outcome = self._outcome = begun(self._load, "asyncengine-start")
            return outcome

    def _load(self) -> Frontend:
        frontend = self._build()
        with self._lock:
            if self.closed:
                frontend.discard()
                raise EngineClosed("the engine was closed while it loaded")
            self._loaded = frontend
        return frontend

    def close(self) -> Frontend | None:
        """Load no more. Returns a front end that was loaded and not closed yet, which the caller discards."""
        with self._lock:
            loaded, self._loaded, self.closed = self._loaded, None, True
        self._attempt.give_up()
        return loaded
