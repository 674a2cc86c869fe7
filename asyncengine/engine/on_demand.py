"""Models that are in memory only while they are used: loaded at their first use, closed when no request needs them or
when another model needs their memory."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from asyncengine.errors import EngineClosed, OutOfMemory, WrongLoop

if TYPE_CHECKING:
    from asyncengine.async_engine import AsyncEngine


@dataclass(slots=True, eq=False)
class OnDemandModel:
    """One model: how it is loaded, what it takes, and who uses it now."""

    name: str
    load: Callable[[], Awaitable[AsyncEngine]]
    keep_alive: float
    """Seconds that it stays without a user; infinite: for ever."""
    task: str = "auto"
    """The engine's task, as far as it is known without loading it."""
    size: int = 0
    """Bytes that it takes of the budget while it is loaded."""
    taken: int = 0
    """Bytes that it has taken of the budget."""
    engine: AsyncEngine | None = None
    users: int = 0
    waiting: int = 0
    """Callers that wait for it to be loaded."""
    last_used: float = 0.0
    loading: asyncio.Task[None] | None = None
    unloading: asyncio.Task[None] | None = None
    timer: asyncio.TimerHandle | None = None
    asked: float | None = None
    """Seconds in place of `keep_alive`, until it is closed."""

    @property
    def usable(self) -> bool:
        """It is loaded, takes requests, and is not about to be closed."""
        return self.engine is not None and self.unloading is None and self.engine.alive

    @property
    def idle(self) -> bool:
        """It is loaded and no caller uses or waits for it."""
        return self.engine is not None and self.unloading is None and not (self.users or self.waiting)


class OnDemand:
    """Loads models when they are needed and closes them when they are not. It belongs to the loop that made it.

    Where the budget has no room for another model, the idle one that was used least recently goes, or else the busy one
    whose last use began first: it takes no more users, is closed when those it has are done, and callers that ask for
    it meanwhile wait for its next load. So models that do not fit together take turns, and none waits for ever. Without
    a budget the idle ones go when a load runs out of memory.
    """

    def __init__(self, models: Iterable[OnDemandModel], budget: int | None = None) -> None:
        self.models = {model.name: model for model in models}
        self._budget = math.inf if budget is None else budget
        self._room = asyncio.Lock()  # one model looks for room at a time, in the order in which they were asked for
        self._change = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._closed = False

    async def acquire(self, name: str) -> AsyncEngine:
        """The engine, loading it if need be; it stays until `release`. Cancelling the call leaves at once.

        Raises what loading raises, which is not kept: the next caller tries again. `EngineClosed` after `aclose`,
        `WrongLoop` on another loop.
        """
        if asyncio.get_running_loop() is not self._loop:
            raise WrongLoop("models that are loaded on demand are used on the event loop that made their group")
        model = self.models[name]
        model.waiting += 1  # keeps the model from being unloaded between its load and its use
        try:
            while not model.usable:
                if self._closed:
                    raise EngineClosed("the models are closed")
                if model.loading is None:
                    model.loading = asyncio.create_task(self._load(model), name=f"load {name}")
                loading = model.loading
                await asyncio.wait((loading,))  # not the task itself: one who leaves must not cancel it for all
                if loading.cancelled():
                    raise EngineClosed("the models were closed while this one loaded")
                loading.result()
            model.users, model.last_used = model.users + 1, self._loop.time()
            assert model.engine is not None
            return model.engine
        finally:
            model.waiting -= 1
            self._settle(model)

    def release(self, name: str) -> None:
        """End one use of an engine."""
        self.models[name].users -= 1
        self._settle(self.models[name])

    async def unload(self, name: str) -> None:
        """Close an engine, if it is loaded, when those who use it are done; callers that ask for it meanwhile wait for
        its next load. Cancelling the call leaves at once."""
        model = self.models[name]
        if model.loading is not None:
            await asyncio.wait((model.loading,))
        if model.engine is not None:
            await self._unload(model)

    async def aclose(self) -> dict[str, AsyncEngine]:
        """Load nothing more. Returns the engines that are loaded, for the caller to close. Idempotent."""
        self._closed = True
        for model in self.models.values():
            self._stop_timer(model)
        tasks = [task for model in self.models.values() for task in (model.loading, model.unloading) if task]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        return self.loaded

    @property
    def loaded(self) -> dict[str, AsyncEngine]:
        """Engines that are in memory now."""
        return {name: model.engine for name, model in self.models.items() if model.engine is not None}

    # ---------------------------------------------------------------- loading

    async def _load(self, model: OnDemandModel) -> None:
        try:
            if model.engine is not None:  # it has died, or is on its way out
                await self._unload(model)
            async with self._room:
                await self._make_room(model)
            if model.waiting:
                model.engine = await self._load_where_memory_is(model)
                model.task = model.engine.info.task
        finally:
            if model.engine is None:
                model.taken = 0
            model.loading = None
            self._settle(model)

    async def _make_room(self, model: OnDemandModel) -> None:
        """Take the model's bytes of the budget once others have given them back, or no caller waits any more."""
        while model.waiting and sum(other.taken for other in self.models.values()) + model.size > self._budget:
            candidates = self._closable()
            if candidates:
                await self._unload(min(candidates, key=lambda other: (other.users > 0, other.last_used)))
            else:  # others are being loaded or closed
                await self._change.wait()
        model.taken = model.size

    async def _load_where_memory_is(self, model: OnDemandModel) -> AsyncEngine:
        while True:
            try:
                return await model.load()
            except OutOfMemory:
                idle = [other for other in self._closable() if not other.users]
                if not idle:
                    raise
            await self._unload(min(idle, key=lambda other: other.last_used))  # here the error holds no memory any more

    def _closable(self) -> list[OnDemandModel]:
        """Models that may be closed; not one that a caller has waited for and is about to use."""
        return [one for one in self.models.values() if one.engine and one.unloading is None and not one.waiting]

    # ---------------------------------------------------------------- unloading

    async def _unload(self, model: OnDemandModel) -> None:
        await asyncio.wait((self._start_unloading(model),))

    def _start_unloading(self, model: OnDemandModel) -> asyncio.Task[None]:
        if model.unloading is None:
            model.unloading = asyncio.create_task(self._close(model), name=f"unload {model.name}")
        return model.unloading

    async def _close(self, model: OnDemandModel) -> None:
        try:
            while model.users:
                await self._change.wait()
            assert model.engine is not None
            await model.engine.aclose(drain=True)  # callers may use the engine without `acquire`
            model.engine, model.taken, model.asked = None, 0, None
        finally:
            model.unloading = None
            self._settle(model)

    def _settle(self, model: OnDemandModel) -> None:
        """Wake those that wait for a change, and start the model's countdown once no caller needs it."""
        self._change.set()
        self._change.clear()  # all who waited are woken
        self._stop_timer(model)
        patience = model.keep_alive if model.asked is None else model.asked
        if model.idle and not self._closed and patience < math.inf:
            model.timer = self._loop.call_later(patience, self._start_unloading, model)

    def _stop_timer(self, model: OnDemandModel) -> None:
        if model.timer is not None:
            model.timer.cancel()
            model.timer = None
