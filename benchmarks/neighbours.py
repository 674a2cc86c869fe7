"""Foreign work beside what is measured: processes, or threads of this program, that only count."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from types import TracebackType

_COUNT = "count = 0\nwhile True:\n    count += 1"
_SETTLE = 0.3
"""Seconds until the kernel has spread them over the cores."""


class Neighbours:
    """Within, so many processes (or `threads` of this one) are always busy."""

    def __init__(self, processes: int, threads: int = 0) -> None:
        self._wanted, self._threads = processes, threads
        self._processes: list[subprocess.Popen[bytes]] = []
        self._counting: list[threading.Thread] = []
        self._ended = threading.Event()

    def __enter__(self) -> Neighbours:
        self._ended.clear()
        # sessions of their own: the kernel's autogroup gives each the share of a program, as strangers have
        self._processes = [
            subprocess.Popen([sys.executable, "-c", _COUNT], start_new_session=True) for _ in range(self._wanted)
        ]
        self._counting = [threading.Thread(target=self._count, daemon=True) for _ in range(self._threads)]
        for thread in self._counting:
            thread.start()
        if self._wanted or self._threads:
            time.sleep(_SETTLE)
        return self

    def _count(self) -> None:
        count = 0
        while not self._ended.is_set():
            for _ in range(10_000):
                count += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        for process in self._processes:
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
        for thread in self._counting:
            thread.join()
