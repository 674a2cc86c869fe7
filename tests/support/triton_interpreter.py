"""Triton's interpreter in less time: it patches its language once for a launch, not for every function that is called.

`triton.runtime.interpreter` goes through all names of `triton.language` whenever a kernel calls a function of its own,
finds them patched, and calls it: nearly half of the time of a test that interprets kernels.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any


def patch_once_a_launch() -> None:
    """Make the interpreter so, for the rest of the process. Idempotent."""
    import triton.language as tl
    from triton.runtime import interpreter

    patch = interpreter._patch_lang
    if hasattr(patch, "__wrapped__"):
        return
    patched: set[Any] = set()

    class Restored:
        """The handle that is called when a launch has ended; `scope`: the interpreter's own, where it has one."""

        def __init__(self, scope: Any) -> None:
            self._scope = scope

        def restore(self) -> None:
            patched.clear()
            if self._scope is not None:
                self._scope.restore()

    @functools.cache
    def languages(function: Callable[..., Any]) -> frozenset[Any]:
        return frozenset(
            value for value in function.__globals__.values() if inspect.ismodule(value) and value in (tl, tl.core)
        )

    @functools.wraps(patch)
    def once(function: Callable[..., Any]) -> Restored:
        missing = languages(function) - patched
        scope = patch(function) if missing else None
        patched.update(missing)
        return Restored(scope)

    interpreter._patch_lang = once
