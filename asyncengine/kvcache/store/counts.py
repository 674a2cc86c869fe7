"""Figures of a durable prefix cache."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StoreCounts:
    """Figures of a durable prefix cache, since the start. All 0: there is none."""

    records: int = 0
    """Records that can be found now."""
    bytes_read: int = 0
    bytes_written: int = 0
    damaged: int = 0
    """Records that were not what they had to be, and not used."""
    failures: int = 0
    """Reads and writes that an operating system refused."""
