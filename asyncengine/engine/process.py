"""State of the whole process: whether it is a fork, which load of a model comes next, and what its collector looks at.

All are process-wide on purpose. Loading changes what all threads of a process share: transformers swaps
functions of its own and of torch while it reads weights (tying, initialisation, the default dtype) and puts back what
it found, so that two loads at once leave the swapped ones behind for good; and its lazy modules are not whole until
their first import has ended. A fork copies memory but no threads: what an engine computes with is not there in the
child.
"""

from __future__ import annotations

import atexit
import gc
import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from asyncengine.errors import EngineClosed, WrongProcess
from asyncengine.progress import OnProgress

EXIT_PATIENCE = 10.0
"""Seconds that the program's end waits for threads that may be inside torch."""
_FORKED = (
    "this process was forked from one that had loaded an engine, whose threads and locks a fork does not copy: start "
    'processes by spawning (multiprocessing.get_context("spawn")), or fork before the first engine is loaded'
)


class Process:
    """This process's generation in a chain of forks, and its queue of model loads."""

    def __init__(self) -> None:
        self.generation = 0
        """The number of forks between the process that imported this and the present one."""
        self.make_room: Callable[[], bool] = lambda: False
        """Closes engines that are kept without a user (`shared`), and waits for their end. False: there were none."""
        self._loaded_in: int | None = None
        self._changed = threading.Condition()
        self.line: deque[LoadAttempt] = deque()
        """Loads that have their turn or wait for it, in order."""
        self.is_ending = False
        """The program is exiting: loads are given up."""
        self._background: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
        if hasattr(os, "register_at_fork"):  # not on Windows, which has no forks either
            os.register_at_fork(after_in_child=self._forked)

    def _forked(self) -> None:
        self.generation += 1
        self._changed = threading.Condition()  # the thread that held the old lock is not in this process
        self.line = deque()

    def check_unforked(self, born: int) -> None:
        """Raises `WrongProcess` for what was made in `generation` `born`, if that was before a fork."""
        if born != self.generation:
            raise WrongProcess(_FORKED)

    def check_may_load(self) -> None:
        """Raises `WrongProcess` if a process that this one was forked from has loaded an engine."""
        if self._loaded_in is not None:
            self.check_unforked(self._loaded_in)

    @contextmanager
    def turn(self, attempt: LoadAttempt) -> Iterator[None]:
        """Wait for the loads that came before, then load within the block. Blocks this thread.

        Raises `WrongProcess`, and `EngineClosed` if the attempt is given up while it waits.
        """
        self.check_may_load()
        self._loaded_in = self.generation
        with self._changed:
            self.line.append(attempt)
            try:
                self._changed.wait_for(lambda: self.line[0] is attempt or attempt.is_over)
            except BaseException:
                self._leave(attempt)
                raise
        try:
            attempt.check()
            yield
        finally:
            with self._changed:
                self._leave(attempt)

    def _leave(self, attempt: LoadAttempt) -> None:
        self.line.remove(attempt)
        self._changed.notify_all()

    def waits_at_exit_for(self, thread: threading.Thread) -> None:
        """Have the program's end wait for a daemon thread that may be inside torch: an interpreter that takes itself
        apart under such a thread aborts the process (Python 3.13 and older end it amid C++, `std::terminate`)."""
        if not self._background:
            # All finalizers have their turn at the exit by when the first is made: here, so that it is after our wait.
            weakref.finalize(thread, int)
            atexit.unregister(self._wait_at_exit)
            atexit.register(self._wait_at_exit)
        self._background.add(thread)

    def _wait_at_exit(self) -> None:
        """Have all loads end at their next stage, and wait for them."""
        self.is_ending = True
        self.wake()
        latest = time.monotonic() + EXIT_PATIENCE
        for thread in [*self._background]:
            if thread.is_alive():
                thread.join(max(0.0, latest - time.monotonic()))
        if getattr(sys, "last_type", None) is KeyboardInterrupt and not hasattr(sys, "ps1"):
            # CPython ends with an interrupt's status only if no text was executed after it; those threads did that
            with suppress(KeyboardInterrupt):
                exec("raise KeyboardInterrupt")

    def wake(self) -> None:
        """Have the waiting loads check again whether it is their turn."""
        with self._changed:
            self._changed.notify_all()


PROCESS = Process()


class LoadAttempt:
    """One try to load an engine, which may be given up from any thread."""

    def __init__(self, model: str = "", on_progress: OnProgress | None = None) -> None:
        self.model = model
        """The model's name, as it was given."""
        self.on_progress = on_progress
        self.given_up = False

    def give_up(self) -> None:
        """Give up the load: leave the line, or end at the next stage of loading. Idempotent."""
        if not self.given_up:
            self.given_up = True
            PROCESS.wake()

    @property
    def is_over(self) -> bool:
        return self.given_up or PROCESS.is_ending

    def check(self) -> None:
        """Raises `EngineClosed` once it is given up, or the program is being left."""
        if self.is_over:
            raise EngineClosed("the engine was closed while it loaded")


class FrozenHeap:
    """Freezes the objects that exist while engines serve.

    A program that has imported torch and loaded a model has half a million objects that stay. Going through them took
    0.3 s on the host of an H200, once in some 60,000 tokens, and every stream waited. `gc.freeze` puts them out of the
    collector's sight, as vLLM's engine does after loading. Garbage in cycles among them is collected when an engine has
    closed. A program that has frozen its objects itself is left alone, from the first time that an engine finds it so:
    finding out means counting them, a tenth of a second for a million.
    """

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
        """An engine has ended: `close` frees its objects, which are collected then."""
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
