"""A process that compiles (`compile_worker`), as the program sees it: started, spoken to, ended."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

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
            [sys.executable, "-P", "-c", _START, paths, _PACKAGE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            encoding="utf-8",
            creationflags=getattr(subprocess, "CREATE_NO_WINDOW", 0),
        )

    @property
    def pid(self) -> int:
        return self._program.pid

    @property
    def ended(self) -> bool:
        return self._program.returncode is not None

    def becomes_ready(self) -> bool:
        """Blocks until it can compile. False: it never will."""
        return self.hear() == "ready"

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
        """At once, whatever it is doing. Any thread may."""
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
    """Is the program that runs here Python as such, which can be asked to run a module? No frozen program is, and
    nothing that only has Python inside."""
    return not getattr(sys, "frozen", False) and Path(sys.executable or "").stem.lower().startswith("python")
