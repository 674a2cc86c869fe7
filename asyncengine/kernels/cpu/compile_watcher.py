"""The watcher of compilations on this thread: one that waits for a kernel, or has other processes compile its parts."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar

Watcher = Callable[[str, int], None]
"""Called with a kernel's name before it is compiled, and with how many kernels there are at most."""

watcher: ContextVar[Watcher | None] = ContextVar("asyncengine_kernel_watcher", default=None)

CalledApart = Callable[[str, bool], None]
"""Called with the name of a function that a kernel calls by address, and with whether it does so rarely."""

called_apart: ContextVar[CalledApart | None] = ContextVar("asyncengine_kernels_called_apart", default=None)
"""Set: functions called by address (`calls`) are not compiled here."""
