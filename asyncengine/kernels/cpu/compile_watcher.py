"""Who hears that a kernel is being compiled: whoever waits for it on this thread, such as a progress bar."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar

Watcher = Callable[[str, int], None]
"""Called with a kernel's name before it is compiled, and with how many kernels there are at most."""

watcher: ContextVar[Watcher | None] = ContextVar("asyncengine_kernel_watcher", default=None)
