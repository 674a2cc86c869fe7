"""Engines shared by a whole process: many cheap handles, one loaded model.

Frameworks construct model objects all the time (LangChain's `configurable_fields` makes one for every call), so a
handle costs nothing until it is first used, and equal specifications share one hosted engine. It stays for a while
after its last handle, for programs that make a model object in every call, and closes then.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import weakref
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

from asyncengine.async_engine import AsyncEngine
from asyncengine.checks import MAX_SECONDS, as_number
from asyncengine.config import EngineConfig
from asyncengine.engine.clock import Clock, MonotonicClock
from asyncengine.engine.process import PROCESS
from asyncengine.errors import EngineClosed
from asyncengine.sync_engine import Engine

logger = logging.getLogger("asyncengine")

Spec = tuple[str, EngineConfig]
KEEP_ALIVE = 60.0
"""Seconds that an engine stays after its last handle, unless that handle says otherwise."""
SOON = 600.0
"""Seconds after an engine was let go in which loading the same again is worth a warning."""
_REPEATED = (
    "%s is loaded again, %.0f s after its last handle or model object was dropped: keep one for as long as you use the "
    "model, or give it a longer keep_alive"
)


@dataclass(slots=True, eq=False)
class _Shared:
    """One engine, how many handles it has, and until when it is kept without any."""

    spec: Spec
    handles: int = 0
    until: float | None = None
    """Reading of the registry's clock; None: it has handles."""
    loading: Future[AsyncEngine] | None = None

    @property
    def usable(self) -> bool:
        """It is loaded, and takes requests."""
        loading = self.loading
        return loading is not None and loading.done() and loading.exception() is None and loading.result().alive

    @property
    def ended(self) -> bool:
        """It was not loaded, could not be, has died, or was closed by a caller who got it from a handle."""
        return self.loading is None or (self.loading.done() and not self.usable)


def _start_closing(loading: Future[AsyncEngine]) -> None:
    if loading.exception() is None:
        loading.result().core.client.start_closing(drain=False, timeout=None)


class _Registry:
    """Shared engines of this process, by specification."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or MonotonicClock()
        self._lock = threading.RLock()  # reentrant: a dropped handle is released on the thread that collects it
        self._engines: dict[Spec, _Shared] = {}
        self._let_go: dict[Spec, float] = {}
        """Clock readings at which engines were closed of late, for want of a handle."""
        self._warned = False
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._forked)

    def _forked(self) -> None:
        """Forget the engines in a forked child: each handle loads anew, if it may (see `process`)."""
        self._lock = threading.RLock()
        for shared in self._engines.values():
            shared.loading = None

    def acquire(self, spec: Spec) -> _Shared:
        with self._lock:
            shared = self._engines.setdefault(spec, _Shared(spec))
            shared.handles, shared.until = shared.handles + 1, None
            return shared

    def release(self, shared: _Shared, keep_alive: float) -> None:
        """Take back a handle. After the last one the engine stays for `keep_alive` seconds, or closes. This waits for
        neither, as it may run in a finalizer."""
        with self._lock:
            shared.handles -= 1
            if shared.handles:
                return
            shared.until = self._clock.now() + keep_alive
            if keep_alive and not shared.ended:
                return
            loading = self._forget(shared)
        loading.add_done_callback(_start_closing)

    def load(self, shared: _Shared) -> Future[AsyncEngine]:
        """The engine, or the attempt to load it. The first caller starts a thread that loads; a failure is not kept:
        the next caller tries again."""
        with self._lock:
            if shared.loading is not None and not shared.ended:
                return shared.loading
            outcome = shared.loading = Future()
            outcome.set_running_or_notify_cancel()  # one impatient caller must not cancel it for the others
            ago = self._clock.now() - self._let_go.get(shared.spec, -SOON)
            repeats, self._warned = ago < SOON and not self._warned, self._warned or ago < SOON
        if repeats:
            logger.warning(_REPEATED, shared.spec[0], ago)
        threading.Thread(target=self._load, args=(shared, outcome), name="asyncengine-load", daemon=True).start()
        return outcome

    def _load(self, shared: _Shared, outcome: Future[AsyncEngine]) -> None:
        engine = AsyncEngine._unstarted(*shared.spec, {}, hosted=True)
        try:
            engine.start_blocking()
        except BaseException as error:
            outcome.set_exception(error)
            self._expire(shared)
        else:
            engine.core.loop.on_tick = partial(self._expire, shared)
            outcome.set_result(engine)

    def _expire(self, shared: _Shared) -> None:
        """Close an engine whose time without a handle is over. Its own loop calls this now and then, and at its end."""
        with self._lock:
            if shared.until is None or not (shared.ended or self._clock.now() >= shared.until):
                return
            loading = self._forget(shared)
        loading.add_done_callback(_start_closing)

    def make_room(self) -> bool:
        """Close the engines that are kept without a handle, and wait for their end. False: there were none."""
        with self._lock:
            kept = [shared for shared in self._engines.values() if shared.until is not None and shared.usable]
            loaded = [self._forget(shared) for shared in kept]
        for loading in loaded:
            loading.result().close_blocking()
        return bool(kept)

    def _forget(self, shared: _Shared) -> Future[AsyncEngine]:
        """Take an engine out of the table. Returns its loading future, to be closed without the lock."""
        if self._engines.get(shared.spec) is shared:
            del self._engines[shared.spec]
        now = self._clock.now()
        self._let_go = {spec: then for spec, then in self._let_go.items() if now - then < SOON}
        if not shared.ended:
            self._let_go[shared.spec] = now
        loading, shared.loading, shared.until = shared.loading, None, None
        return loading or Future()  # a future that is never set, so no callback runs


class EngineHandle:
    """A share in a process-wide engine. Give it back with `close`, or by dropping it."""

    def __init__(self, registry: _Registry, spec: Spec, keep_alive: float) -> None:
        self.spec = spec
        self._registry = registry
        self._shared = registry.acquire(spec)
        self._release = weakref.finalize(self, registry.release, self._shared, keep_alive)
        self._release.atexit = False  # every hosted engine closes itself at exit, and waits for its last step

    @property
    def name(self) -> str:
        """The model's path or hub id, or the name of a bundled one."""
        from asyncengine.demo import bundled_name

        return bundled_name(self.spec[0]) or self.spec[0]

    @property
    def loaded(self) -> bool:
        """True if the engine is in memory now (using the handle loads it)."""
        return self._shared.usable

    @property
    def closed(self) -> bool:
        return not self._release.alive

    async def aget(self) -> AsyncEngine:
        """The engine, loading it on first use. Any loop may ask. Raises what loading raises, and `EngineClosed`."""
        self._check_open()
        return await asyncio.wrap_future(self._registry.load(self._shared))

    def get(self) -> Engine:
        """The engine as `aget` gives it, for blocking calls."""
        self._check_open()
        return Engine(self._registry.load(self._shared).result())

    def close(self) -> None:
        """Give up this share. The engine closes `keep_alive` seconds after its last handle. Idempotent."""
        self._release()

    def _check_open(self) -> None:
        if self.closed:
            raise EngineClosed("this handle is closed")


_REGISTRY = _Registry()  # process-wide on purpose: sharing across the whole process is what it is for
PROCESS.make_room = _REGISTRY.make_room


def shared_engine(
    model: str | os.PathLike[str], *, config: EngineConfig | None = None, keep_alive: float | None = None,
    **settings: Any,
) -> EngineHandle:  # fmt: skip
    """A handle on the process-wide engine for this model and configuration. Cheap: loads on first use.

    `keep_alive`: seconds that the engine stays loaded if this is its last handle (None: a minute), unless another
    handle is made; 0 closes it with the handle. It goes earlier where another model lacks the memory to be loaded.

    Raises `InvalidParameter` for an unknown setting, and a `keep_alive` that is no number of seconds.
    """
    from asyncengine.config import engine_config
    from asyncengine.demo import resolve_model

    patience = KEEP_ALIVE if keep_alive is None else as_number("keep_alive", keep_alive, 0.0, MAX_SECONDS)
    return EngineHandle(_REGISTRY, (resolve_model(model), engine_config(config, settings)), patience)
