"""Engines shared by a whole process: many cheap handles, one loaded model.

Frameworks construct model objects all the time (LangChain's `configurable_fields` makes one for every call), so a
handle costs nothing until it is first used, and equal specifications share one hosted engine, which closes with its
last handle.
"""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from asyncengine.async_engine import AsyncEngine
from asyncengine.config import EngineConfig
from asyncengine.errors import EngineClosed
from asyncengine.sync_engine import Engine

Spec = tuple[str, EngineConfig]


@dataclass(slots=True, eq=False)
class _Shared:
    """One engine and how many handles keep it."""

    spec: Spec
    handles: int = 0
    loading: Future[AsyncEngine] | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)

    def load(self) -> Future[AsyncEngine]:
        """The engine, or the attempt to load it. The first caller starts a thread that loads; a failure is not kept:
        the next caller tries again."""
        with self.lock:
            if self.loading is None or (self.loading.done() and not _usable(self.loading)):
                self.loading = Future()
                self.loading.set_running_or_notify_cancel()  # one impatient caller must not cancel it for all
                threading.Thread(target=self._load, args=(self.loading,), name="asyncengine-load", daemon=True).start()
            return self.loading

    def _load(self, outcome: Future[AsyncEngine]) -> None:
        from asyncengine.engine.wiring import load_frontend

        model, config = self.spec
        engine = AsyncEngine(lambda: load_frontend(model, config), hosted=True)
        try:
            engine.start_blocking()
        except BaseException as error:
            outcome.set_exception(error)
        else:
            outcome.set_result(engine)

    def close(self) -> None:
        """Close the engine if it was ever loaded; without waiting for it, for this may run in a finalizer."""
        with self.lock:
            loading, self.loading = self.loading, None
        if loading is not None:
            loading.add_done_callback(_start_closing)


def _usable(loading: Future[AsyncEngine]) -> bool:
    return loading.exception() is None and loading.result().alive


def _start_closing(loading: Future[AsyncEngine]) -> None:
    if loading.exception() is None:
        loading.result().core.start_closing(drain=False, timeout=None)


class _Registry:
    """Shared engines of this process, by specification."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # reentrant: a dropped handle is released by whoever collects it
        self._engines: dict[Spec, _Shared] = {}
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._forked)

    def _forked(self) -> None:
        """The handles are there in the child, the engines are not: each loads anew, if it may (see `process`)."""
        self._lock = threading.RLock()
        for shared in self._engines.values():
            shared.loading, shared.lock = None, threading.Lock()

    def acquire(self, spec: Spec) -> _Shared:
        with self._lock:
            shared = self._engines.setdefault(spec, _Shared(spec))
            shared.handles += 1
            return shared

    def release(self, shared: _Shared) -> None:
        with self._lock:
            shared.handles -= 1
            if shared.handles:
                return
            if self._engines.get(shared.spec) is shared:
                del self._engines[shared.spec]
        shared.close()


class EngineHandle:
    """A share in a process-wide engine. Give it back with `close`, or by dropping it."""

    def __init__(self, registry: _Registry, spec: Spec) -> None:
        self.spec = spec
        self._shared = registry.acquire(spec)
        self._release = weakref.finalize(self, registry.release, self._shared)
        self._release.atexit = False  # every hosted engine closes itself at exit, and waits for its last step

    @property
    def loaded(self) -> bool:
        """True if the engine is in memory now (using the handle loads it)."""
        loading = self._shared.loading
        return loading is not None and loading.done() and _usable(loading)

    @property
    def closed(self) -> bool:
        return not self._release.alive

    async def aget(self) -> AsyncEngine:
        """The engine, loading it on first use. Any loop may ask. Raises what loading raises, and `EngineClosed`."""
        self._check_open()
        return await asyncio.wrap_future(self._shared.load())

    def get(self) -> Engine:
        """The same engine, blocking."""
        self._check_open()
        return Engine(self._shared.load().result())

    def close(self) -> None:
        """Give up this share. The engine closes with its last handle. Idempotent."""
        self._release()

    def _check_open(self) -> None:
        if self.closed:
            raise EngineClosed("this handle is closed")


_REGISTRY = _Registry()  # process-wide on purpose: sharing across the whole process is what it is for


def shared_engine(
    model: str | os.PathLike[str], *, config: EngineConfig | None = None, **settings: Any
) -> EngineHandle:
    """A handle on the process-wide engine for this model and configuration. Cheap: loads on first use.

    Raises `InvalidParameter` for an unknown setting.
    """
    from asyncengine.engine.wiring import engine_config, resolve_model

    return EngineHandle(_REGISTRY, (resolve_model(model), engine_config(config, settings)))
