"""Memory of a process with all that it started, and of the machine. Linux."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

_TICK = 0.05
"""Seconds between two looks."""


def available() -> int:
    """Bytes that can be taken without swapping."""
    for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/meminfo has no MemAvailable")


def session_members(leader: int) -> list[int]:
    """Processes of the session that `leader` leads: itself and what it started."""
    found = []
    for entry in sorted(Path("/proc").glob("[0-9]*")):
        try:
            fields = (entry / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == leader:
            found.append(int(entry.name))
    return found


def proportional(leader: int) -> int:
    """PSS in bytes of a session: what it shares with others is counted in parts, so a mapped file counts once."""
    total = 0
    for process in session_members(leader):
        try:
            rollup = Path(f"/proc/{process}/smaps_rollup").read_text(encoding="utf-8")
        except OSError:
            continue
        total += next((int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Pss:")), 0) * 1024
    return total


class Peak:
    """Largest PSS of a session while the block runs, looked at twenty times a second."""

    def __init__(self, leader: int) -> None:
        self.bytes = 0
        self._leader = leader
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def _watch(self) -> None:
        while not self._over.is_set():
            self.bytes = max(self.bytes, proportional(self._leader))
            time.sleep(_TICK)

    def __enter__(self) -> Peak:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


def affinity() -> int:
    return len(os.sched_getaffinity(0))
