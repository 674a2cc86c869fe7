"""The running background compiler of this process, for callers that are about to call a kernel, or to leave.

Imports neither torch nor numba.
"""

from __future__ import annotations

from typing import Protocol


class Elsewhere(Protocol):
    def wait_for(self, module: str, types: str) -> bool:
        """Called before a kernel is compiled in this process: its module, and its arguments' types, "(int64, uint16)".
        True: it was waited for, and may be in the cache now."""

    def wait(self) -> None:
        """Until nothing is left to be compiled, or nobody gets on."""


elsewhere: list[Elsewhere] = []
"""Background compilers of this process; empty as a rule."""
