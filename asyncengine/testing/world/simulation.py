"""Running code in a world. Its seams are the names of modules, which are exchanged while the world runs.

Production code says `threading.Lock()`, `queue.SimpleQueue()` and `time.monotonic()` by the names of these modules, and
never imports from them what makes or reads such things (`tests/worlds/test_world.py` holds that). So exchanging the
names decides what the code gets, and costs the code itself nothing.
"""

from __future__ import annotations

import asyncio
import asyncio.base_events
import concurrent.futures._base
import concurrent.futures.thread
import gc
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from heapq import heappop
from math import inf
from typing import Any
from unittest.mock import patch

import anyio
import anyio.to_thread

import asyncengine
from asyncengine.engine import device_thread
from asyncengine.engine.process import FrozenHeap
from asyncengine.testing.world.kernel import Strand, World
from asyncengine.testing.world.primitives import VirtualLock, virtual_modules


class VirtualTask(asyncio.Task[Any]):
    """A task whose place in a set is the same in every run: anyio and asyncio cancel tasks in a set's order."""

    def __init__(self, *args: Any, number: int, **kwargs: Any) -> None:
        self._number = number
        super().__init__(*args, **kwargs)

    def __hash__(self) -> int:
        return self._number


class VirtualLoop(asyncio.BaseEventLoop):
    """An event loop in a world. Real loops run ready callbacks in order; this one may take any first (`shuffled`),
    which asyncio does not: code that still works does not rely on the order."""

    _ready: deque[asyncio.Handle]
    _scheduled: list[asyncio.TimerHandle]
    _stopping: bool

    def __init__(self, world: World, *, shuffled: bool, delay: float) -> None:
        """`delay`: most seconds that a call from another thread is on its way."""
        super().__init__()
        self._world = world
        self._shuffled = shuffled
        self._delay = delay
        self._strand: Strand | None = None
        self._arriving: deque[tuple[float, asyncio.Handle]] = deque()
        """Calls from other threads with the moment at which they are here, in the order in which they were made."""
        self.set_task_factory(lambda loop, work, **more: VirtualTask(work, loop=loop, number=world.number(), **more))
        self.set_exception_handler(
            lambda loop, context: world.complain(str(context.get("message")), context.get("exception"))
        )

    def time(self) -> float:
        return self._world.now

    def create_future(self) -> asyncio.Future[Any]:
        self._world.pause()  # where code without locks looks, makes a future and looks again, another thread may come
        return super().create_future()

    def call_soon_threadsafe(self, callback: Callable[..., object], *args: Any, **more: Any) -> asyncio.Handle:  # type: ignore[override]
        world = self._world
        world.pause()
        self._check_closed()  # type: ignore[attr-defined]
        handle = asyncio.Handle(callback, args, self, **more)
        late = world.rng.random() ** 4 * self._delay if world.rng.random() < 0.5 else 0.0
        at = max(world.now + late, self._arriving[-1][0] if self._arriving else 0.0)
        self._arriving.append((at, handle))
        if self._strand is not None:
            world.set_alarm(self._strand, at)
        world.pause()
        return handle

    def run_forever(self) -> None:
        self._strand = self._world.current
        try:
            super().run_forever()
        finally:
            self._strand = None

    def close(self) -> None:
        self._arriving.clear()
        super().close()

    def _run_once(self) -> None:
        """Run the ready callbacks, or wait until there is one."""
        ready, world, timers = self._ready, self._world, self._scheduled
        self._collect()
        if not ready and not self._stopping:
            until = min(timers[0].when() if timers else inf, self._arriving[0][0] if self._arriving else inf)
            if until > world.now:
                world.block(until)
            self._collect()
        for _ in range(len(ready)):
            if self._shuffled and len(ready) > 1:
                ready.rotate(-int(world.rng.random() * len(ready)))
            handle = ready.popleft()
            if not handle.cancelled():
                handle._run()
            del handle
            world.pause()

    def _collect(self) -> None:
        """Move due timers and arrived calls to the ready callbacks."""
        now, timers = self._world.now, self._scheduled
        while self._arriving and self._arriving[0][0] <= now:
            self._ready.append(self._arriving.popleft()[1])
        while timers and (timers[0].cancelled() or timers[0].when() <= now):
            timer = heappop(timers)
            timer._scheduled = False  # type: ignore[attr-defined]
            if not timer.cancelled():
                self._ready.append(timer)


LIBRARIES = (concurrent.futures._base, concurrent.futures.thread, asyncio.base_events)
"""Modules of the standard library that make threads and locks for the engine."""


def simulate(world: World, work: Callable[[], object], *, shuffled: bool = False, delay: float = 0.0) -> None:
    """Do `work` as the first thread of `world`. The engine's code that its threads run has virtual threads, locks,
    queues, clocks and loops; other threads of the process have real ones.

    Make engines within `work`: the locks of one that was made before are real, and a thread that waits for a real lock
    stops the world. `shuffled`: loops run ready callbacks in any order, not in asyncio's. `delay`: most seconds that a
    call from another thread is on its way to a loop. Raises what `work` raises, and `Stuck`; then see
    `world.complaints`.
    """
    with _orderly_garbage(), _exchanged(world, lambda: VirtualLoop(world, shuffled=shuffled, delay=delay)):
        world.run(work)


@contextmanager
def _exchanged(world: World, new_loop: Callable[[], asyncio.AbstractEventLoop]) -> Iterator[None]:
    for name in asyncengine.__all__:
        getattr(asyncengine, name)  # of a module that is first imported later, nothing would be exchanged
    ours = [
        module
        for name, module in sorted(sys.modules.items())
        if name.startswith("asyncengine.") and not name.startswith("asyncengine.testing.world")
    ]
    with ExitStack() as stack:

        def exchange(owner: Any, name: str, virtual: Any) -> None:
            stack.enter_context(patch.object(owner, name, virtual))

        for name, virtual in virtual_modules(world).items():
            for module in (*ours, *LIBRARIES):
                if vars(module).get(name) is sys.modules[name]:
                    exchange(module, name, virtual)
        exchange(concurrent.futures.thread, "_global_shutdown_lock", VirtualLock(world, reentrant=True))
        exchange(device_thread, "HEAP", FrozenHeap())  # threads that are unwound do not tell it that they end
        stack.callback(sys.setswitchinterval, sys.getswitchinterval())
        exchange(device_thread, "INTERPRETER", device_thread.SwitchInterval())
        exchange(device_thread.INTERPRETER, "_lock", VirtualLock(world))
        exchange(asyncio.events, "new_event_loop", world.either(new_loop, asyncio.events.new_event_loop))
        exchange(anyio.to_thread, "run_sync", world.either(_on_a_thread, anyio.to_thread.run_sync))
        yield


@contextmanager
def _orderly_garbage() -> Iterator[None]:
    """Within, garbage in cycles is collected at no moment that the seed does not know; after it, what was there before
    is not looked through."""
    enabled = gc.isenabled()
    gc.disable()
    gc.freeze()
    try:
        yield
    finally:
        gc.collect()
        gc.unfreeze()
        if enabled:
            gc.enable()


async def _on_a_thread(work: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """`anyio.to_thread.run_sync`, by a virtual thread."""
    with anyio.CancelScope(shield=True):
        return await asyncio.get_running_loop().run_in_executor(None, partial(work, *args))
