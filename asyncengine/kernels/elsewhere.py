"""Listeners that are told before a kernel is compiled: the background compiler of this process, watchers of a thread.

Imports neither torch nor numba.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Protocol


class Elsewhere(Protocol):
    def wait_for(self, module: str, types: str) -> bool:
        """Called before a kernel is compiled in this process: its module, and its arguments' types, "(int64, uint16)".
        Return True if another process compiled it meanwhile, so that it may be in the cache."""

    def wait(self) -> None:
        """Wait until all kernels are compiled, or until no process makes progress."""


elsewhere: list[Elsewhere] = []
"""Background compilers of this process; empty as a rule."""


Watcher = Callable[[str, int], None]
"""Called with a kernel's name before it is compiled, and with how many kernels there are at most."""

watcher: ContextVar[Watcher | None] = ContextVar("asyncengine_kernel_watcher", default=None)

CalledApart = Callable[[str, bool], None]
"""Called with the name of a function that a kernel calls by address, and with whether it does so rarely."""

called_apart: ContextVar[CalledApart | None] = ContextVar("asyncengine_kernels_called_apart", default=None)
"""Set: functions called by address (`calls`) are not compiled here."""
