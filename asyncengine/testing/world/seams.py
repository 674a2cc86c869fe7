"""The seams between an engine and its world: names of modules, exchanged while a world runs.

Production code says `threading.Lock()`, `queue.SimpleQueue()` and `time.monotonic()` by the names of these modules, and
never imports from them what makes or reads such things (`tests/fuzz/test_world.py` holds that). So whoever exchanges
the names decides what the code gets, and the code itself pays nothing.
"""

from __future__ import annotations

import asyncio
import asyncio.base_events
import concurrent.futures._base
import concurrent.futures.thread
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import anyio
import anyio.to_thread

from asyncengine.testing.world.kernel import World
from asyncengine.testing.world.primitives import VirtualLock, virtual_modules

LIBRARIES = (concurrent.futures._base, concurrent.futures.thread, asyncio.base_events)
"""Modules of the standard library that make threads and locks for the engine."""


@contextmanager
def exchanged(world: World, new_loop: Callable[[], asyncio.AbstractEventLoop]) -> Iterator[None]:
    """Within, threads of the world that run the engine's code get virtual threads, locks, queues, clocks and loops;
    other threads of the process get the real ones."""
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
        exchange(asyncio.events, "new_event_loop", world.either(new_loop, asyncio.events.new_event_loop))
        exchange(anyio.to_thread, "run_sync", world.either(_on_a_thread, anyio.to_thread.run_sync))
        yield


async def _on_a_thread(work: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """`anyio.to_thread.run_sync`, by a virtual thread."""
    with anyio.CancelScope(shield=True):
        return await asyncio.get_running_loop().run_in_executor(None, partial(work, *args))


def engine_files() -> set[str]:
    """Files of the code between callers and scheduler, which several threads run at once."""
    packages = ("asyncengine.engine.", "asyncengine.grammar.service", "asyncengine.stream", "asyncengine.async_engine")
    return {
        str(module.__file__) for name, module in sys.modules.items() if name.startswith(packages) and module.__file__
    }
