"""The processes that compile (`compile_worker`), as the program sees them: started, spoken to, ended.

On Linux all but the first are forks of it, which saves each the half second in which numba is imported, and what the
first has found out about the functions that all kernels share. A fork is the child of the first process and ends with
it; its pipes are made before the first one starts, which inherits them.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

_START = (
    "import json, sys, types; sys.path[:] = json.loads(sys.argv[1]); "
    "package = sys.modules['asyncengine'] = types.ModuleType('asyncengine'); package.__path__ = [sys.argv[2]]; "
    "from asyncengine.kernels.compile_worker import main; main()"
)
"""With the package that the program itself runs, wherever that was imported from."""
_PACKAGE = str(Path(__file__).parents[1])
FORKS = sys.platform == "linux"
"""Elsewhere a process does not end with the one that it is a fork of, or libraries do not survive it."""
_MOMENT = 1.0
"""Seconds in which a process that was killed should be gone."""


class CompilerProcess:
    """One of them. Names go in by line and answers come out (`compile_worker` says which)."""

    def __init__(self, names: int, answers: int, program: subprocess.Popen[bytes] | None = None) -> None:
        """Descriptors to write and read, which it closes. `program`: None of a fork, which tells its own number."""
        self._names, self._program = names, program
        self.pid = 0 if program is None else program.pid
        """Its number, as the system has it; of a fork, 0 until it is ready."""
        self._answers = os.fdopen(answers, encoding="utf-8")
        self._writing = threading.Lock()
        """Held while writing: a number that was closed may be another file's by then."""
        self.ended = False

    @property
    def is_first(self) -> bool:
        """Others may be its forks."""
        return self._program is not None

    def becomes_ready(self) -> bool:
        """Blocks until it can compile. False: it never will."""
        said = self.hear().split()
        if said[:1] != ["ready"]:
            return False
        self.pid = int(said[1]) if said[1:] else self.pid
        return True

    def ask(self, line: str) -> None:
        """Write a line, in one piece: any thread may. Raises `OSError` if it is gone."""
        with self._writing:
            os.write(self._names, f"{line}\n".encode())

    def hear(self) -> str:
        """The next line; empty if it is gone."""
        return self._answers.readline().strip()

    def kill(self) -> None:
        """At once, whatever it is doing. Any thread may."""
        if self._program is not None:
            self._program.kill()
        elif self.pid and not self.ended:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def close_names(self) -> None:
        """No name comes any more: it ends by itself. Idempotent."""
        with self._writing:
            if self._names >= 0:
                os.close(self._names)
            self._names = -1

    def end(self) -> None:
        """Kill it and wait until it is gone; of a fork that was never made, until the first one is.
        Idempotent."""
        if self.ended:
            return
        self.kill()
        self.close_names()
        while self.hear():
            pass
        self._answers.close()
        if self._program is not None:
            self._program.wait()
        elif self.pid:
            self._wait_for_fork()
        self.ended = True

    def _wait_for_fork(self) -> None:
        """Its pipes are closed a moment before it is gone. If the first process ended meanwhile, what is left of the
        fork would be a child of whatever runs as process 1, which in a container may be this program."""
        until = time.monotonic() + _MOMENT
        with contextlib.suppress(ProcessLookupError):
            while time.monotonic() < until:
                os.kill(self.pid, 0)
                time.sleep(0.001)


class CompilerProcesses:
    """The compiler processes of one `CompileAhead`, in the order in which they were opened. Not safe for threads."""

    def __init__(self) -> None:
        self.all: list[CompilerProcess] = []
        self._spare: list[tuple[int, int]] = []
        """Our ends of pipes that the first process holds the other ends of, for its forks."""

    def open(self, *, forks: int, later: bool) -> CompilerProcess:
        """One more. `forks`: how many more may be wanted, of the first one; `later`: it is to give way to all others.
        Raises `OSError`."""
        if self._spare:
            process = CompilerProcess(*self._spare.pop(0))
            try:
                self.all[0].ask("&")
            except OSError:
                process.end()
                raise
        else:
            process = self._start(forks if FORKS and not self.all else 0, later)
        self.all.append(process)
        return process

    def _start(self, forks: int, later: bool) -> CompilerProcess:
        theirs: list[tuple[int, int]] = []
        for _ in range(forks):
            names, ours = os.pipe()
            answers, answering = os.pipe()
            self._spare.append((ours, answers))
            theirs.append((names, answering))
        inherited = [each for pair in theirs for each in pair]
        paths = json.dumps([os.path.abspath(path) for path in sys.path])
        pairs = [f"{names},{answering}" for names, answering in theirs]
        try:
            program = subprocess.Popen(
                [sys.executable, "-P", "-c", _START, paths, _PACKAGE, "later" if later else "now", *pairs],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                pass_fds=inherited,
                creationflags=getattr(subprocess, "CREATE_NO_WINDOW", 0),
            )
        except OSError:
            self.close_spare()
            raise
        finally:
            for each in inherited:
                os.close(each)
        assert program.stdin is not None
        assert program.stdout is not None
        with program.stdin as stdin, program.stdout as stdout:
            return CompilerProcess(os.dup(stdin.fileno()), os.dup(stdout.fileno()), program)

    def close_spare(self) -> None:
        """Close the spare descriptors: no further fork is wanted."""
        for pair in self._spare:
            for each in pair:
                os.close(each)
        self._spare.clear()


def can_start() -> bool:
    """Is the program that runs here Python as such, which can be asked to run a module? No frozen program is, and
    nothing that only has Python inside."""
    return not getattr(sys, "frozen", False) and Path(sys.executable or "").stem.lower().startswith("python")
