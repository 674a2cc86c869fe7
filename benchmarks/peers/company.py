"""Share of the machine that others take while something is measured. Linux."""

from __future__ import annotations

import os
import time
from pathlib import Path

from benchmarks.neighbours import Neighbours
from benchmarks.peers.memory import session_members

_BUSY = (0, 1, 2, 5, 6, 7)
"""user, nice, system, irq, softirq, steal: the last is what the machine under a virtual one gave to others."""


def busy() -> float:
    """Seconds of all cores together in which they were at work, since the machine started."""
    fields = Path("/proc/stat").read_text(encoding="utf-8").splitlines()[0].split()[1:]
    return sum(int(fields[place]) for place in _BUSY) / os.sysconf("SC_CLK_TCK")


def own(leader: int) -> float:
    """Seconds of processor time that a session has taken, with its children that have ended."""
    total = 0
    for process in session_members(leader):
        try:
            fields = Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        except OSError:
            continue
        total += sum(map(int, fields[11:15]))
    return total / os.sysconf("SC_CLK_TCK")


class Company:
    """Within, `beside` neighbours are busy; after it, `share`: how many cores all but the session of `leader` took in
    it on average, beyond what neighbours could have."""

    def __init__(self, leader: int, beside: int = 0) -> None:
        self.share = 0.0
        self._leader, self._beside = leader, beside
        self._neighbours = Neighbours(beside)

    def __enter__(self) -> Company:
        self._neighbours.__enter__()
        self._began, self._busy, self._own = time.monotonic(), busy(), own(self._leader)
        return self

    def __exit__(self, *_: object) -> None:
        others = busy() - self._busy - (own(self._leader) - self._own)
        self._neighbours.__exit__(None, None, None)
        self.share = max(0.0, others / max(1e-9, time.monotonic() - self._began) - self._beside)
