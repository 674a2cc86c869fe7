"""Kernels of a first load, compiled by several processes beside the reading of weights.

numba compiles under one lock for a whole process, so threads do not help. Processes of our own (`compile_worker`) are
given the names of kernels; each puts the code into the cache on disk, where this process finds it when it calls them.
What a kernel calls by address comes back as a name for the next free process, so that only what Python calls has to be
known beforehand. All of this only saves time: whatever is not in the cache afterwards is compiled here.

A process ends with the pipe that its names come by, so that none outlives the program, however that ends. The user's
main module is not imported in them. Where no process can be started (frozen programs, sandboxes), none is.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

logger = logging.getLogger("asyncengine")

MOST_PROCESSES = 4
"""More win little: kernels that take long wait for each other, and each process holds an interpreter with numba."""
_PATIENCE = 120.0
"""Seconds in which one kernel should be compiled, or a process begin."""
_START = (
    "import json, sys, types; sys.path[:] = json.loads(sys.argv[1]); "
    "package = sys.modules['asyncengine'] = types.ModuleType('asyncengine'); package.__path__ = [sys.argv[2]]; "
    "from asyncengine.kernels.compile_worker import main; main()"
)
"""Without what the package itself imports, which is everything but kernels."""
_PACKAGE = str(Path(__file__).parents[1])

Told = Callable[[str, int], None]
"""Called with the name of a kernel that has been compiled, and with how many are known to be needed."""


class CompileAhead:
    """Compiles kernels by up to `most` processes; fewer than two: none, and nothing is done."""

    def __init__(self, most: int) -> None:
        self._most = min(most, MOST_PROCESSES)
        self._changed = threading.Condition()
        self._waiting: deque[str] = deque()
        self._rare: deque[str] = deque()
        """What most programs never call: compiled last, and nobody waits for it."""
        self._known: dict[str, None] = {}
        self._done: deque[str] = deque()
        self._working = self._failed = self._alive = 0
        self._named = self._closed = False
        self._processes: list[subprocess.Popen[str]] = []
        self._threads: list[threading.Thread] = []
        self._folder: Any = None
        self._mark = ""
        self.kept: Sequence[str] = ()
        """The names of all kernels that Python calls, once all of them and those that they call are in the cache; else
        none."""
        self._names: Sequence[str] = ()
        self.patience = _PATIENCE
        """Seconds without any progress after which `finish` waits no longer."""

    def expect(self) -> None:
        """Start the processes at once if nothing at all has been compiled on this machine: names will come, and a
        process takes a second until it can compile."""
        if self._can_start() and self._folder.is_new and self._folder.writable:
            self._open_all()

    def start(self, names: Sequence[str]) -> None:
        """Have these compiled, "module:function:(types)" each, unless they all are in the cache. Returns at once."""
        if not names or not self._can_start() or not self._folder.writable:
            return
        self._mark = f"first_load-{hashlib.sha256(repr(sorted(names)).encode()).hexdigest()[:16]}"
        if self._folder.find(self._mark) is not None:
            self.kept = names
            return
        self._names = names
        for name in reversed(names):
            self._add(name)
        with self._changed:
            self._named = True
            self._changed.notify_all()
        self._open_all()

    def _can_start(self) -> bool:
        if self._most < 2 or not can_start():
            return False
        from asyncengine.kernels.cpu.cache import folder_here

        self._folder = folder_here()
        return True

    def finish(self, told: Told) -> None:
        """Wait until all are compiled, or nobody is left to do it, or gets on. What `told` raises ends the waiting."""
        if not self._named:
            self.close()
        while (name := self._next_done()) is not None:
            told(name, len(self._known))
        if self._named and not self._failed and self._alive:
            self._folder.keep(self._mark, b"")
            self.kept = self._names

    def close(self) -> None:
        """End the processes, whatever they are doing. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            for process in self._processes:
                process.kill()
        for thread in self._threads:
            thread.join()
        self._threads = []

    def _open_all(self) -> None:
        for index in range(len(self._threads), self._most):
            self._alive += 1
            thread = threading.Thread(target=self._serve, name=f"asyncengine-compile-{index}", daemon=True)
            thread.start()
            self._threads.append(thread)

    def _add(self, name: str, *, rare: bool = False) -> None:
        with self._changed:
            if name not in self._known:
                self._known[name] = None
                if rare:
                    self._rare.append(name)
                else:  # what was found on the way takes longer than what is called from Python
                    self._waiting.appendleft(name)
                self._changed.notify_all()

    def _next(self) -> tuple[str, bool] | None:
        """(a name that nobody has taken, whether it is rarely called); None: there will be none."""
        with self._changed:
            while not self._closed:
                if self._waiting:
                    self._working += 1
                    return self._waiting.popleft(), False
                if self._named and not self._working:  # else whoever is at work may find more
                    return (self._rare.popleft(), True) if self._rare else None
                self._changed.wait()
            return None

    def _next_done(self) -> str | None:
        """What has been compiled since; None: all of it, or nobody is left."""
        with self._changed:
            while not self._done and self._alive and (self._waiting or self._working):
                if not self._changed.wait(self.patience):
                    logger.debug("processes that compile kernels are not waited for any longer")
                    self._failed += 1
                    return None
            return self._done.popleft() if self._done else None

    def _serve(self) -> None:
        """Run one process."""
        process = None
        try:
            process = self._open()
            if process is not None:
                self._talk(process)
        except OSError as error:
            logger.debug("a process that compiles kernels is gone: %s", error)
        finally:
            if process is not None:
                process.kill()
                process.communicate()
            with self._changed:
                self._alive -= 1
                self._changed.notify_all()

    def _open(self) -> subprocess.Popen[str] | None:
        with self._changed:
            if self._closed:
                return None
            paths = [os.path.abspath(path) for path in sys.path]
            process = subprocess.Popen(
                [sys.executable, "-P", "-c", _START, json.dumps(paths), _PACKAGE],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                encoding="utf-8",
                creationflags=getattr(subprocess, "CREATE_NO_WINDOW", 0),
            )
            self._processes.append(process)
            return process

    def _talk(self, process: subprocess.Popen[str]) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        if process.stdout.readline().strip() != "ready":
            return
        while (found := self._next()) is not None:
            name, rare = found
            answer = ""
            try:
                process.stdin.write(f"{name}\n")
                process.stdin.flush()
                while (answer := process.stdout.readline().strip())[:1] in ("+", "?"):
                    self._add(answer[1:], rare=rare or answer[0] == "?")
            finally:
                with self._changed:
                    if not rare:
                        self._working -= 1
                        self._failed += answer != "="
                        self._done.append(name)
                    self._changed.notify_all()
            if not answer:
                return


def can_start() -> bool:
    """Is the program that runs here Python as such, which can be asked to run a module? No frozen program is, and
    nothing that only has Python inside."""
    return not getattr(sys, "frozen", False) and Path(sys.executable or "").stem.lower().startswith("python")
