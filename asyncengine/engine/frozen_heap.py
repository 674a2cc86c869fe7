"""Python's collector of garbage, and what it need not look through while an engine serves.

A program that has imported torch and loaded a model has half a million objects that stay. Going through them took 0.3 s
on the host of an H200, once in some 60,000 tokens, and everybody waited. `gc.freeze` puts them out of the collector's
sight, as vLLM's engine does after loading. Garbage in cycles among them is collected when an engine has closed.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable


class FrozenHeap:
    """Freezes what there is while engines serve. A program that has frozen its objects itself is left alone, from the
    first time that an engine finds it so: finding out means counting them, a tenth of a second for a million."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._engines = 0
        self._ours = False
        self._theirs = False

    def begin(self) -> None:
        """An engine begins to serve."""
        with self._lock:
            if not self._engines:
                self._theirs = self._theirs or gc.get_freeze_count() > 0
                self._ours = not self._theirs
            self._engines += 1
            if self._ours:
                gc.freeze()

    def end(self, close: Callable[[], None]) -> None:
        """It serves no more: `close` lets go of what it had, which can be collected then."""
        if self._ours:
            gc.unfreeze()
        try:
            close()
        finally:
            with self._lock:
                self._engines -= 1
                if self._ours and self._engines:
                    gc.freeze()


HEAP = FrozenHeap()
"""There is one for all engines of a process."""
