"""Each fault test may leave no thread of the engine's behind."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def no_thread_left() -> Iterator[None]:
    yield
    deadline = time.monotonic() + 5
    while names := [t.name for t in threading.enumerate() if t.name.startswith("asyncengine")]:
        if time.monotonic() > deadline:
            raise AssertionError(f"threads left behind: {names}")
        time.sleep(0.001)
