"""Kernels of a first load, compiled by several processes beside the reading of weights.

numba compiles under one lock for a whole process, so threads do not help. Processes of our own (`compile_worker`) are
given the names of kernels; each puts the code into the cache on disk, where this process finds it when it calls them.
What a kernel calls by address comes back as a name for the next free process, so that only what Python calls has to be
known beforehand. Those that a first answer needs come first, and a load waits for no others: a call of one of the
others, before it is compiled, waits for that one (`wait_for`). All of this only saves time: a kernel that is not in the
cache afterwards is compiled here.

A process ends with the pipe that its names come by, so that none outlives the program, however that ends. The user's
main module is not imported in them. Where no process can be started (frozen programs, sandboxes), none is.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Self

from asyncengine.kernels.cache_folder import is_first_time
from asyncengine.kernels.elsewhere import elsewhere

# A process that compiles (`compile_worker`), as the program sees it: started, spoken to, ended.

_START = (
    "import json, sys, types; sys.path[:] = json.loads(sys.argv[1]); "
    "package = sys.modules['asyncengine'] = types.ModuleType('asyncengine'); package.__path__ = [sys.argv[2]]; "
    "from asyncengine.kernels.compile_worker import main; main()"
)
"""With the package that the program itself runs, wherever that was imported from."""
_PACKAGE = str(Path(__file__).parents[1])


class CompilerProcess:
    """One process. Names go in by line and answers come out (`compile_worker` says which)."""

    def __init__(self) -> None:
        """Raises `OSError` where no process can be started."""
        paths = json.dumps([os.path.abspath(path) for path in sys.path])
        self._program = subprocess.Popen(
            [sys.executable, "-P", "-c", _START, paths, _PACKAGE], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, encoding="utf-8", creationflags=getattr(subprocess, "CREATE_NO_WINDOW", 0),
        )  # fmt: skip

    @property
    def ended(self) -> bool:
        return self._program.returncode is not None

    def ask(self, line: str) -> None:
        """Raises `OSError` if it is gone."""
        assert self._program.stdin is not None
        self._program.stdin.write(f"{line}\n")
        self._program.stdin.flush()

    def hear(self) -> str:
        """The next line; empty if it is gone."""
        assert self._program.stdout is not None
        return self._program.stdout.readline().strip()

    def kill(self) -> None:
        """Kill it without waiting for what it compiles. Any thread may call this."""
        self._program.kill()

    def end(self) -> None:
        """Kill it, and wait until it is gone."""
        self.kill()
        self._program.wait()
        for pipe in (self._program.stdin, self._program.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):  # what was written last went nowhere
                pipe.close()


def can_start() -> bool:
    """Whether `sys.executable` is a Python interpreter, which can run a module: a frozen program, or one that embeds
    Python, is not."""
    return not getattr(sys, "frozen", False) and Path(sys.executable or "").stem.lower().startswith("python")


logger = logging.getLogger("asyncengine")

MOST_PROCESSES = 4
"""More win little: kernels that take long wait for each other, and each process holds an interpreter with numba."""
_PATIENCE = 120.0
"""Seconds in which one kernel should be compiled, or a process begin."""
_WANTED, _CALLED, _NEEDED, _LATER = range(4)
"""Ranks of kernels, compiled in this order: one that a step waits for; one that another kernel calls by address, which
takes longer than its callers; those that Python calls; those that a first answer does without."""

loaded_names: set[str] = set()
"""Names of kernels that this process has read or compiled, for any model."""

Progress = Callable[[str, int], None]
"""Called with the name of a kernel that has been compiled, and with how many are known to be needed."""


class _State(Enum):
    WAITING = "waiting"
    WORKING = "working"
    KEPT = "kept"
    FAILED = "failed"


@dataclass(eq=False)
class _Task:
    """A kernel to compile. `later`: a first answer does without it."""

    name: str
    rank: int
    later: bool
    state: _State = _State.WAITING

    @property
    def done(self) -> bool:
        return self.state in (_State.KEPT, _State.FAILED)


class CompileAhead:
    """Compiles kernels by up to `most` processes; with fewer than two it does nothing."""

    def __init__(self, most: int) -> None:
        self._most = min(most, MOST_PROCESSES)
        self._changed = threading.Condition()
        self._tasks: dict[str, _Task] = {}
        self._done: list[_Task] = []
        self._alive = 0
        self._names_known = self._closed = False
        self._threads: list[threading.Thread] = []
        self._folder: Any = None
        self._names: Sequence[str] = ()
        self._later_names: Sequence[str] = ()
        self.processes: list[CompilerProcess] = []
        self.kept: Sequence[str] = ()
        """The names of kernels that Python calls, once they and those that they call are in the cache: all of them, or
        in a first load those that a first answer needs; else none."""
        self.patience = _PATIENCE
        """Seconds without any progress after which callers wait no longer."""

    @classmethod
    def for_engine(cls, num_threads: int | None, device: str, backend: str) -> Self:
        """For an engine of these settings (`num_threads` None: all CPUs). If nothing was ever compiled on this machine
        the processes start now: torch is not imported yet, which takes as long as they take to start."""
        ahead, compiles = cls(num_threads or usable_cpus()), _may_be_cpu(device) and backend != "torch"
        if compiles and ahead._most >= 2 and can_start() and is_first_time(os.environ, sys.platform):
            ahead._open()
        return ahead

    @property
    def left(self) -> Sequence[str]:
        """The names that no process compiles or has compiled."""
        with self._changed:
            return [] if self._alive else [name for name in (*self._names, *self._later_names) if name not in self.kept]

    def limit(self, most: int) -> None:
        """Limit the number of processes, to none with 0, once it is known."""
        self._most = min(most, MOST_PROCESSES)
        if self._most < 2:
            self.close()

    def start(self, names: Sequence[str], later: Sequence[str] = ()) -> None:
        """Have these compiled, "module:function:(types)" each, unless they all are in the cache; `later`: those that
        are called after a first answer, if at all. Returns at once."""
        self._names, self._later_names = names, later
        if names and loaded_names.issuperset((*names, *later)):  # of an earlier model
            self.kept = [*names, *later]
            return
        if not names or self._most < 2 or not can_start():
            return
        from asyncengine.kernels.cpu.cache import folder_here

        self._folder = folder_here()
        if not self._folder.writable:
            return
        if self._folder.find(self._mark()) is not None:
            self.kept = [*names, *later]
            return
        with self._changed:
            for name in names:
                self._add(name, _NEEDED)
            for name in later:
                self._add(name, _LATER)
            self._names_known = True
            self._changed.notify_all()
        self._open()
        with self._changed:
            # once all processes have ended, none is left to take this out of the list again
            if self._alive and not self._closed:
                elsewhere.append(self)

    def _mark(self) -> str:
        """The name of a file in the cache that says that all of these kernels are there."""
        names = repr((sorted(self._names), sorted(self._later_names)))
        return f"first_load-{hashlib.sha256(names.encode()).hexdigest()[:16]}"

    def finish(self, report: Progress) -> None:
        """Wait until all that a first answer needs are compiled, no process is left, or none gets on within
        `patience` seconds. The others are compiled in the background. What `report` raises ends the waiting."""
        if not self._names_known:
            self.close()
        reported: set[str] = set()
        while (name := self._next_done(reported)) is not None:
            reported.add(name)
            report(name, len(self._needed))
        with self._changed:
            if self._names_known and not self._closed and all(task.state is _State.KEPT for task in self._needed):
                self.kept = self.kept or self._names
        self._keep_mark()

    def _keep_mark(self) -> None:
        """Once all are in the cache, later loads need not look for them."""
        with self._changed:
            whole = self._names_known and all(task.state is _State.KEPT for task in self._tasks.values())
        if whole:
            self._folder.keep(self._mark(), b"")

    @property
    def _needed(self) -> list[_Task]:
        return [task for task in self._tasks.values() if not task.later]

    def wait_for(self, module: str, types: str) -> bool:
        """Wait while a function of this module, of arguments "(int64, uint16)", is compiled or about to be: it is next.
        False if there is none, or if no process makes progress."""
        waited = False
        with self._changed:
            while wanted := [task for task in self._tasks.values() if not task.done and _is_of(task, module, types)]:
                for task in wanted:
                    task.rank = _WANTED
                if not self._alive or self._closed or not self._changed.wait(self.patience):
                    return False
                waited = True
        return waited

    def wait(self) -> None:
        """Wait until the last of them is compiled, or until no process makes progress."""
        for thread in list(self._threads):
            thread.join(self.patience)

    def close(self) -> None:
        """End the processes, whatever they are doing. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            for process in self.processes:
                process.kill()
        for thread in self._threads:
            thread.join()
        self._threads = []

    def _open(self) -> None:
        """Processes until there are as many as may be."""
        for index in range(len(self._threads), self._most):
            with self._changed:
                if self._closed:
                    return
                self._alive += 1
            thread = threading.Thread(target=self._serve, name=f"asyncengine-compile-{index}", daemon=True)
            thread.start()
            self._threads.append(thread)

    def _add(self, name: str, rank: int, *, later: bool | None = None) -> None:
        """The lock is held. A kernel that was to come later becomes a needed one if one of those calls it."""
        later = rank == _LATER if later is None else later
        task = self._tasks.get(name)
        if task is None:
            self._tasks[name] = _Task(name, rank, later)
        elif task.later and not later:
            task.rank, task.later = min(rank, task.rank), False
        self._changed.notify_all()

    def _next(self) -> _Task | None:
        """Take the waiting kernel of the lowest rank; None once there will be no more."""
        with self._changed:
            while not self._closed:
                waiting = [other for other in self._tasks.values() if other.state is _State.WAITING]
                working = [other for other in self._tasks.values() if other.state is _State.WORKING]
                task = min(waiting, key=lambda other: other.rank, default=None)
                # a needed kernel at work may name callees that are needed, too: those go before the later ones
                if task is not None and (task.rank < _LATER or all(other.later for other in working)):
                    task.state = _State.WORKING
                    return task
                if self._names_known and not waiting and not working:
                    return None
                self._changed.wait()
            return None

    def _next_done(self, reported: set[str]) -> str | None:
        """The name of a needed kernel that is not `reported` yet; None once all are, or when no process is left."""
        with self._changed:
            while True:
                done = [task.name for task in self._done if not task.later and task.name not in reported]
                if done:
                    return done[0]
                if not self._alive or all(task.done for task in self._needed):
                    return None
                if not self._changed.wait(self.patience):
                    logger.debug("processes that compile kernels are not waited for any longer")
                    return None

    def _serve(self) -> None:
        """Run one process."""
        process = None
        try:
            with self._changed:
                if self._closed:
                    return
                process = CompilerProcess()
                self.processes.append(process)
            if process.hear() == "ready":  # it can compile; else it never will
                self._talk(process)
        except OSError as error:
            logger.debug("a process that compiles kernels is gone: %s", error)
        finally:
            if process is not None:
                process.end()
            self._leave()

    def _talk(self, process: CompilerProcess) -> None:
        while (task := self._next()) is not None:
            answer = ""
            try:
                process.ask(f"{'?' if task.later else ''}{task.name}")
                while (answer := process.hear())[:1] in ("+", "?"):
                    with self._changed:
                        later = task.later or answer[0] == "?"
                        self._add(answer[1:], _LATER if later else _CALLED, later=later)
            finally:  # also if the process is gone: callers wait for this task
                with self._changed:
                    task.state = _State.KEPT if answer == "=" else _State.FAILED
                    self._done.append(task)
                    self._changed.notify_all()
            if not answer:
                return

    def _leave(self) -> None:
        with self._changed:
            self._alive -= 1
            if not self._alive and self in elsewhere:
                elsewhere.remove(self)
            self._changed.notify_all()
        self._keep_mark()


def _is_of(task: _Task, module: str, types: str) -> bool:
    where, _, signature = task.name.split(":")
    return where == module and signature.removeprefix("void") == types


def usable_cpus() -> int:
    """CPUs that this process may run on, or what the program's environment allows of them."""
    # containers and taskset allow fewer than the machine has
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    allowed = os.environ.get("OMP_NUM_THREADS", "")
    return min(available, int(allowed)) if allowed.isdecimal() else available


def _may_be_cpu(device: str) -> bool:
    """Whether `EngineConfig.device` may turn out to be a CPU, as far as can be seen without torch."""
    if device != "auto":
        return device == "cpu"
    gpus = ("/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg")
    return sys.platform != "win32" and not any(map(os.path.exists, gpus))


def read_kept(names: Sequence[str]) -> bool:
    """Read kernels out of the cache (`calls.compile_named`; one that is gone is compiled). False without
    names, or if one cannot be compiled: then a call of it raises the error."""
    if not names:
        return False
    from asyncengine.kernels.cpu.calls import compile_named

    try:
        for name in (name for name in names if name not in loaded_names):
            compile_named(name)
            loaded_names.add(name)
    except Exception:
        logger.debug("kernels are not read ahead", exc_info=True)
        return False
    return True
