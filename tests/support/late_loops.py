"""A plugin that makes the tests' own event loop late, by command: `python -m pytest -p support.late_loops`.

An engine of its own thread goes on while the test that left it waits for its turn; on a fast machine with busy cores
an answer that "is still being written" has then ended. Each turn of the main thread's loop begins `LATE_BY` seconds
late (0.02), so such a race is lost nearly every time instead of once in fifty runs.
"""

from __future__ import annotations

import asyncio.base_events
import os
import threading
import time
from typing import Any

LATE_BY = float(os.environ.get("LATE_BY", "0.02"))

_run_once: Any = asyncio.base_events.BaseEventLoop._run_once  # type: ignore[attr-defined]


def late(loop: asyncio.base_events.BaseEventLoop) -> None:
    if threading.current_thread() is threading.main_thread():
        time.sleep(LATE_BY)
    _run_once(loop)


asyncio.base_events.BaseEventLoop._run_once = late  # type: ignore[attr-defined]
