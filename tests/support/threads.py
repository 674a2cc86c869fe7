"""A check that tests leave no thread of the engine's behind."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_new_engine_thread(patience: float = 60.0) -> Iterator[None]:
    """Engine threads that start inside must have ended `patience` seconds after. Others' shared engines may live on."""
    before = set(threading.enumerate())
    yield
    deadline = time.monotonic() + patience
    while names := [t.name for t in threading.enumerate() if t.name.startswith("asyncengine") and t not in before]:
        if time.monotonic() > deadline:
            raise AssertionError(f"threads left behind: {names}")
        time.sleep(0.001)
