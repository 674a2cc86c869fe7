"""The process that compiles kernels for another one (`compile_ahead`): names come in by line, code goes to the cache.

It says "ready", then of each name it is given: "+other" for each function that the kernel calls by address, which is
left to the asking program ("?other": one that it rarely calls), and last "=" once the code is kept, or "-". No caller
waits for "?name": from then on this process gives way to all others. It ends with its input, and on Linux with the
thread that started it: at once, whatever it is doing.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import os
import queue
import signal
import sys
import threading
import types
from typing import TextIO

_PR_SET_PDEATHSIG = 1
_LIFETIME = 600.0
"""Seconds after which it ends in any case: no model's kernels take as long."""


def main() -> None:
    """Serve standard input and output, with nothing else coming that way."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the program, which then closes the input
    if sys.platform == "linux":
        # the compiler holds the interpreter's lock for seconds, in which no thread here hears of the input's end
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    names, answers = os.fdopen(os.dup(0), encoding="utf-8"), os.fdopen(os.dup(1), "w", encoding="utf-8")
    # the program reads standard output: a library's print must not look like an answer
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)
    faulthandler.dump_traceback_later(_LIFETIME, exit=True)
    gc.disable()  # what a compiler leaves behind is looked through again and again: a tenth of the time
    os.environ["NUMBA_DISABLE_ERROR_MESSAGE_HIGHLIGHTING"] = "1"  # of errors that only tell it what else to try
    sys.modules["torch"] = _Absent("torch")
    sys.modules["scipy"] = None  # type: ignore[assignment]  # numba looks for its BLAS, which no kernel uses
    serve(names, answers)


class _Absent(types.ModuleType):
    """Stands for torch, which takes twice as long to import as all else here: kernels are compiled for types of their
    own, and their modules only name some of torch's at the beginning. Nothing of it can be called."""

    def __getattr__(self, name: str) -> _Absent:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Absent(f"{self.__name__}.{name}")


def serve(names: TextIO, answers: TextIO) -> None:
    """Compile each name that comes by line, and answer it; ends with the process."""
    from asyncengine.kernels.cpu.calls import compile_named
    from asyncengine.kernels.elsewhere import called_apart

    arrived: queue.SimpleQueue[str] = queue.SimpleQueue()

    def read() -> None:
        for line in names:
            arrived.put(line.strip())
        os._exit(0)  # not sys.exit: the main thread may be in a compilation, whose result has no reader any more

    def say(text: str) -> None:
        print(text, file=answers, flush=True)

    threading.Thread(target=read, name="asyncengine-names", daemon=True).start()
    called_apart.set(lambda name, rare: say(f"{'?' if rare else '+'}{name}"))
    say("ready")
    while True:
        name = arrived.get()
        if name.startswith("?") and hasattr(os, "setpriority"):
            os.setpriority(os.PRIO_PROCESS, 0, 19)
        try:
            compile_named(name.removeprefix("?"))
        except Exception:  # the program compiles the kernel again when it calls it, and raises the error
            say("-")
        else:
            say("=")
