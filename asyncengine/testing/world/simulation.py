"""Running code in a world. Its seams are the names of modules, which are exchanged while the world runs.

Production code says `threading.Lock()`, `queue.SimpleQueue()` and `time.monotonic()` by the names of these modules, and
never imports from them what makes or reads such things (`tests/worlds/test_world.py` holds that). So whoever exchanges
the names decides what the code gets, and the code itself pays nothing.
"""

from __future__ import annotations

import asyncio
import asyncio.base_events
import concurrent.futures._base
import concurrent.futures.thread
import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import anyio
import anyio.to_thread

import asyncengine
from asyncengine.engine import device_thread
from asyncengine.engine.frozen_heap import FrozenHeap
from asyncengine.testing.world.kernel import World
from asyncengine.testing.world.loop import VirtualLoop
from asyncengine.testing.world.primitives import VirtualLock, virtual_modules

LIBRARIES = (concurrent.futures._base, concurrent.futures.thread, asyncio.base_events)
"""Modules of the standard library that make threads and locks for the engine."""


def simulate(world: World, work: Callable[[], object], *, shuffled: bool = False, delay: float = 0.0) -> None:
    """Do `work` as the first thread of `world`. Whatever of the engine's code its threads run has virtual threads,
    locks, queues, clocks and loops; other threads of the process have real ones.

    Make engines within `work`: the locks of one that was made before are real, and whoever waits for a real lock stops
    the world. `shuffled`: loops run what is ready in any order, not in asyncio's. `delay`: most seconds that a call
    from another thread is on its way to a loop. Raises what `work` raises, and `Stuck`; then see `world.complaints`.
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
