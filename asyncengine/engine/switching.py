"""The interpreter's switch interval, shortened while an engine serves.

A step's kernels let go of the lock, and so does a thread that waits. Whoever wants it back from a thread that runs
Python without pause gets it after the switch interval: 5 ms, several times a step, which is longer than many a step.
The interval is the process's: it is shortened while a device thread lives, and set back by the last one that ends.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class SwitchInterval:
    """Keeps the interpreter's switch interval at the shortest that anybody within `shortened` asked for."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._wanted: list[float] = []
        self._before = self._set = sys.getswitchinterval()

    @contextmanager
    def shortened(self, seconds: float | None) -> Iterator[None]:
        """Within, the interval is `seconds` at most. None: it is left alone."""
        if seconds is None:
            yield
            return
        with self._lock:
            if not self._wanted:
                self._before = self._set = sys.getswitchinterval()
            self._wanted.append(seconds)
            self._apply()
        try:
            yield
        finally:
            with self._lock:
                self._wanted.remove(seconds)
                self._apply()

    def forget(self) -> None:
        """In a fork: who wanted it is in another process."""
        self._lock, self._wanted = threading.Lock(), []
        self._apply()

    def _apply(self) -> None:
        if sys.getswitchinterval() != self._set:  # somebody else has changed it since: theirs stands
            return
        sys.setswitchinterval(min([self._before, *self._wanted]))
        self._set = sys.getswitchinterval()


INTERPRETER = SwitchInterval()
"""There is one interval for all engines of a process."""
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=INTERPRETER.forget)
