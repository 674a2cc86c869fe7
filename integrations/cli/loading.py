"""Opening an engine for one command: off the main thread, so that Ctrl-C works while torch is imported."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from typing import TypeVar

from asyncengine import AsyncEngine, Engine, EngineConfig, shared_engine
from asyncengine.engine.threads import begun
from asyncengine.integrations.cli.inputs import check_adapters

T = TypeVar("T")

for _name, _value in (("TRANSFORMERS_VERBOSITY", "error"), ("TOKENIZERS_PARALLELISM", "false")):
    os.environ.setdefault(_name, _value)  # before transformers is imported: a command prints its own messages


@contextlib.contextmanager
def open_engine(model: str, config: EngineConfig) -> Iterator[Engine]:
    """A loaded engine on a thread of its own, closed at the block's end. Raises the errors of loading."""
    check_paths(model, config)
    with _no_collections():
        handle = shared_engine(model, config=config, keep_alive=0)
        with _saying_so("importing torch") as watched:
            # Begun before torch is imported, as a first load compiles kernels meanwhile. From here on this thread
            # imports nothing: a Ctrl-C that comes while it waits for the import lock may be lost, and leave it locked.
            loading = on_thread(handle.get)
            if watched:
                on_thread(lambda: importlib.import_module("torch")).result()
        engine = loading.result()
    try:
        yield engine
    finally:
        engine.close()
        handle.close()


@contextlib.asynccontextmanager
async def open_async_engine(model: str, config: EngineConfig, *, hosted: bool = True) -> AsyncIterator[AsyncEngine]:
    """The same for a coroutine. Cancelling it while it loads a hosted engine leaves at once."""
    check_paths(model, config)
    if not hosted:
        async with await AsyncEngine.from_pretrained(model, config=config) as engine:
            yield engine
        return
    with _no_collections():
        handle = shared_engine(model, config=config, keep_alive=0)
        engine = await handle.aget()
    try:
        yield engine
    finally:
        await engine.aclose()
        handle.close()


def on_thread(work: Callable[[], T]) -> Future[T]:
    """Run `work` on a daemon thread, which an interrupted program can exit without waiting for."""
    return begun(work, "asyncengine-import")


def check_paths(model: str, config: EngineConfig) -> None:
    """Refuse wrong paths at once, as importing torch takes seconds. Hub ids are checked when the model is loaded."""
    from asyncengine.demo import resolve_model
    from asyncengine.execution.models.checkpoint import open_configured

    path = resolve_model(model)
    if os.path.exists(path) or path.startswith((".", "~", os.sep)):
        open_configured(path, config)
    check_adapters(config)


@contextlib.contextmanager
def _no_collections() -> Iterator[None]:
    """Collect no garbage in the block, and never visit its objects later (`gc.freeze`). Objects of imports and loading
    stay: visiting them all, again and again while they grow, takes a fifth of a start."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if before:
            gc.enable()


@contextlib.contextmanager
def _saying_so(text: str) -> Iterator[bool]:
    """Show `text` until the loader's progress bar appears, seconds later. Yields whether stderr is a terminal."""
    if not sys.stderr.isatty():
        yield False
        return
    from rich.console import Console

    with Console(stderr=True).status(text):
        yield True
