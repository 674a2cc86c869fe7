"""Kernels of a first load, compiled by several processes beside the reading of weights.

numba compiles under one lock for a whole process, so threads do not help. Processes of our own (`compile_process`) are
given the names of kernels; each puts the code into the cache on disk, where this process finds it when it calls them.
What a kernel calls by address comes back as a name for the next free process, so that only what Python calls has to be
known beforehand. Those that a first answer needs come first, and a load waits for no others: whoever calls one of the
others before it is there waits for that one (`wait_for`). All of this only saves time: whatever is not in the cache
afterwards is compiled here.

A process ends with the pipe that its names come by, so that none outlives the program, however that ends. The user's
main module is not imported in them. Where no process can be started (frozen programs, sandboxes), none is.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from asyncengine.kernels.cache_folder import is_first_time
from asyncengine.kernels.compile_process import CompilerProcess, CompilerProcesses, can_start
from asyncengine.kernels.elsewhere import elsewhere

logger = logging.getLogger("asyncengine")

MOST_PROCESSES = 4
"""More win little: kernels that take long wait for each other, and each process holds an interpreter with numba."""
_PATIENCE = 120.0
"""Seconds in which one kernel should be compiled, or a process begin."""


def written(function: str, kind: str = "uint16", *, by_address: bool = False) -> str:
    """The name of "module:function" in `kernels.cpu`, as Python calls it, or kernels do `by_address`, with the types
    that it is written with. Its source is read: nothing is imported. `kind`: that of the numbers."""
    module, name = function.split(":")
    try:
        source = (Path(__file__).parent / "cpu" / f"{module}.py").read_text(encoding="utf-8")
    except OSError:  # a frozen program, whose kernels are imported by whoever asks for names
        texts = getattr(import_module(f"asyncengine.kernels.cpu.{module}"), name).py_func.__annotations__.values()
    else:
        original = re.search(rf"^{name} = with_gil\((\w+)\)$", source, re.MULTILINE)
        found = re.search(rf"^def {original[1] if original else name}\((.*?)\) ->", source, re.MULTILINE | re.DOTALL)
        assert found is not None, f"there is no {function}"
        texts = re.findall(r": ([\w.]+)", found[1])
    known = {"int": "int64", "np.float32": "float32", "np.generic": kind, "Any": kind}
    types = ", ".join(known[each] for each in texts if each != "None")
    return f"asyncengine.kernels.cpu.{function}:{'void' if by_address else ''}({types})"


_BY_ALL = (
    ("calls:_run", True),
    ("team_loops:help_along", False),
    ("team_loops:change", False),
    ("team_loops:make", False),
)
"""Kernels that every model calls, whatever its layers, and those of a team of threads; whether by address."""
_BY_MOST = (
    ("attention_write:_prepare_units", True),
    ("sampling:_choose_at_once", False),
    ("activation:_gate_part", True),
    ("gather:copy_few_rows", False),
)
"""Kernels that most models call: compiled until the model is known, which is after torch is imported."""

had: set[str] = set()
"""Names of kernels that this process has read or compiled, whatever model they were for."""

Progress = Callable[[str, int], None]
"""Called with the name of a kernel that has been compiled, and with how many are known to be needed."""


class CompileAhead:
    """Compiles kernels by up to `most` processes; fewer than two: none, and nothing is done."""

    def __init__(self, most: int) -> None:
        self._most = min(most, MOST_PROCESSES)
        self._changed = threading.Condition()
        self._waiting: deque[str] = deque()
        self._later: deque[str] = deque()
        """Kernels that a first answer does without: compiled last, and no load waits for them."""
        self._known: dict[str, bool] = {}
        """Each name, and whether somebody is done with it."""
        self._guesses: list[str] = []
        """Kernels that were added before the model was known."""
        self._needed = 0
        self._done: deque[str] = deque()
        self._working = self._working_later = self._failed = self._alive = 0
        self._named = self._closed = self._broken = False
        self.processes = CompilerProcesses()
        self._threads: list[threading.Thread] = []
        self._folder: Any = None
        self._names: Sequence[str] = ()
        self._others: Sequence[str] = ()
        self.kept: Sequence[str] = ()
        """The names of kernels that Python calls, once they and those that they call are in the cache: all of them, or
        in a first load those that a first answer needs; else none."""
        self.patience = _PATIENCE
        """Seconds without any progress after which nobody waits any longer."""

    @property
    def left(self) -> Sequence[str]:
        """The names that no process compiles or has compiled."""
        with self._changed:
            return [] if self._alive else [name for name in (*self._names, *self._others) if name not in self.kept]

    def expect(self, *, first_time: bool = False, float32: bool = False) -> None:
        """Start the processes at once if nothing has been compiled on this machine by this version: names will come,
        and a process takes a second until it can compile. Meanwhile it compiles what any model needs. `first_time`: by
        no version, which can be seen before torch and numba are imported; then also what most models need, whose
        numbers are bfloat16 unless `float32` says otherwise."""
        if first_time:
            begin = self._most >= 2 and can_start() and is_first_time(os.environ, sys.platform)
        else:
            begin = self._can_start() and self._folder.is_new and self._folder.writable
        if begin:
            names, by_all = first_names(float32=float32, most=first_time), first_names(most=False)
            for name in reversed(names):
                self._add(name)
            self._guesses += [name for name in names if name not in by_all]
            # while torch is imported the program itself is at work
            self._open(max(1, self._most - 1) if first_time else self._most)

    def limit(self, most: int) -> None:
        """Limit the number of processes, to none with 0, once it is known."""
        self._most = min(most, MOST_PROCESSES)
        if self._most < 2:
            self.close()

    def start(self, names: Sequence[str], later: Sequence[str] = ()) -> None:
        """Have these compiled, "module:function:(types)" each, unless they all are in the cache; `later`: those that
        are called after a first answer, if at all. Returns at once."""
        self._names, self._others = names, later
        if names and had.issuperset((*names, *later)):  # of an earlier model
            self.kept = [*names, *later]
            return
        if not names or not self._can_start() or not self._folder.writable:
            return
        if self._folder.find(self._mark("first_load")) is not None:
            self.kept = [*names, *later]
            return
        left = _listed(self._folder.find(self._mark("first_answer")))
        if left is None:
            self._drop_guesses(names)
            for name in reversed(names):
                self._add(name)
        else:  # of a load whose program ended before the others were compiled
            self.kept = names
            later = left
            self._most = 1  # nobody is kept waiting
        for name in later:
            self._add(name, later=True)
        with self._changed:
            self._named = True
            self._changed.notify_all()
        self._open(self._most)
        with self._changed:
            if self._alive and not self._closed:
                elsewhere.append(self)

    def _mark(self, what: str) -> str:
        """The name of a file in the cache that says so of these kernels."""
        names = repr((sorted(self._names), sorted(self._others)))
        return f"{what}-{hashlib.sha256(names.encode()).hexdigest()[:16]}"

    def _can_start(self) -> bool:
        if self._most < 2 or not can_start():
            return False
        from asyncengine.kernels.cpu.cache import folder_here

        self._folder = folder_here()
        return True

    def finish(self, report: Progress) -> None:
        """Wait until all that a first answer needs are compiled, or nobody is left to do it, or gets on. The others are
        compiled behind the program's back. What `report` raises ends the waiting."""
        if not self._named:
            self.close()
        while (name := self._next_done()) is not None:
            report(name, self._needed)
        with self._changed:
            whole = self._named and not (self._failed or self._waiting or self._working or self._closed)
            known = list(self._known)
        if whole and not self.kept:
            self.kept = self._names
            if not self._keep_mark():
                self._folder.keep(self._mark("first_answer"), json.dumps(known).encode())

    def _keep_mark(self) -> bool:
        """Once all are in the cache, later loads need not look for them."""
        with self._changed:
            left = self._waiting or self._later or self._working or self._working_later
            whole = self._named and not (left or self._failed or self._broken or self._closed)
        if whole:
            self._folder.keep(self._mark("first_load"), b"")
        return bool(whole)

    def wait_for(self, module: str, types: str) -> bool:
        """Wait while a function of this module, of arguments "(int64, uint16)", is compiled or about to be: it is next.
        False: there is none, or nobody gets on."""
        waited = False
        with self._changed:
            while wanted := [name for name, done in self._known.items() if not done and _is_of(name, module, types)]:
                for name in wanted:
                    for names in (self._waiting, self._later):
                        if name in names:
                            names.remove(name)
                            names.appendleft(name)
                if not self._alive or self._closed or not self._changed.wait(self.patience):
                    return False
                waited = True
        return waited

    def wait(self) -> None:
        """Wait until the last of them is compiled, or nobody gets on."""
        for thread in list(self._threads):
            thread.join(self.patience)

    def close(self) -> None:
        """End the processes, whatever they are doing. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            for process in reversed(self.processes.all):
                process.kill()
        for thread in self._threads:
            thread.join()
        self._threads = []

    def _open(self, most: int) -> None:
        """Processes until there are so many."""
        for index in range(len(self._threads), most):
            with self._changed:
                if self._closed:
                    return
                self._alive += 1
            thread = threading.Thread(target=self._serve, name=f"asyncengine-compile-{index}", daemon=True)
            thread.start()
            self._threads.append(thread)

    def _add(self, name: str, *, later: bool = False) -> None:
        with self._changed:
            if not later and name in self._later:  # a kernel that rarely calls it was compiled before it was asked for
                self._later.remove(name)
                del self._known[name]
            if name not in self._known:
                self._known[name] = False
                if later:
                    self._later.append(name)
                else:  # what was found on the way takes longer than what is called from Python
                    self._needed += 1
                    self._waiting.appendleft(name)
                self._changed.notify_all()

    def _drop_guesses(self, names: Sequence[str]) -> None:
        """Drop guessed kernels that nobody has begun and that are not among `names`. A kernel that calls one of them
        will name it."""
        with self._changed:
            for name in set(self._guesses).difference(names).intersection(self._waiting):
                self._waiting.remove(name)
                del self._known[name]
                self._needed -= 1

    def _next(self) -> tuple[str, bool] | None:
        """(a name that nobody has taken, whether it may come later); None: there will be none."""
        with self._changed:
            while not self._closed:
                if self._waiting:
                    self._working += 1
                    return self._waiting.popleft(), False
                if self._named and not self._working:  # else whoever is at work may find more
                    if self._later:
                        self._working_later += 1
                        return self._later.popleft(), True
                    if not self._working_later:
                        return None
                self._changed.wait()
            return None

    def _next_done(self) -> str | None:
        """The name of the next kernel that has been compiled; None: all are, or no process is left."""
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
            with self._changed:
                if self._closed:
                    return
                process = self.processes.open(forks=self._most - 1, later=bool(self.kept))
            if process.becomes_ready():
                self._talk(process)
        except OSError as error:
            logger.debug("a process that compiles kernels is gone: %s", error)
        finally:
            if process is not None:
                self._end(process)
            self._leave()

    def _end(self, process: CompilerProcess) -> None:
        with self._changed:  # the first is waited for by us, and only the first waits for its forks
            forks = [] if not process.is_first else [each for each in self.processes.all if not each.is_first]
            self._changed.wait_for(lambda: self._closed or all(fork.ended for fork in forks), self.patience)
        process.end()

    def _leave(self) -> None:
        with self._changed:
            self._alive -= 1
            last = not self._alive
            if last:
                self.processes.close_spare()
                if self in elsewhere:
                    elsewhere.remove(self)
            self._changed.notify_all()
        if last:
            self._keep_mark()

    def _talk(self, process: CompilerProcess) -> None:
        while (found := self._next()) is not None:
            name, later = found
            answer = ""
            try:
                process.ask(f"{'?' if later else ''}{name}")
                while (answer := process.hear())[:1] in ("+", "?"):
                    self._add(answer[1:], later=later or answer[0] == "?")
            finally:
                with self._changed:
                    self._known[name] = True
                    if later:
                        self._working_later -= 1
                        self._broken |= not answer
                    else:
                        self._working -= 1
                        self._failed += answer != "="
                        self._done.append(name)
                    self._changed.notify_all()
            if not answer:
                return


def first_names(*, float32: bool = False, most: bool = True) -> list[str]:
    """Names of kernels that are compiled before the model is known: what every model calls, and `most` do, the longest
    first, as the others can be shared out."""
    first, *rest = _BY_ALL
    others = _BY_MOST if most else ()
    kind = "float32" if float32 else "uint16"
    return [written(name, kind, by_address=by_address) for name, by_address in (first, *others[:1], *rest, *others[1:])]


def _listed(kept: bytes | None) -> list[str] | None:
    """The names in a file of the cache; None: it is no such file."""
    try:
        found = json.loads(kept or b"null")
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, list) and all(isinstance(name, str) for name in found) else None


def _is_of(name: str, module: str, types: str) -> bool:
    where, _, signature = name.split(":")
    return where == module and signature.removeprefix("void") == types


def usable_cpus() -> int:
    """CPUs that this process may run on, or what the program's environment allows of them."""
    # containers and taskset allow fewer than the machine has
    here = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    allowed = os.environ.get("OMP_NUM_THREADS", "")
    return min(here, int(allowed)) if allowed.isdecimal() else here


def may_be_cpu(device: str) -> bool:
    """Whether `EngineConfig.device` may turn out to be a CPU, as far as can be seen without torch."""
    if device != "auto":
        return device == "cpu"
    gpus = ("/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg")
    return sys.platform != "win32" and not any(map(os.path.exists, gpus))
