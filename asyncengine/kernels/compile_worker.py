"""The process that compiles kernels for another one (`compile_ahead`): names come in by line, code goes to the cache.

It says "ready", then of each name it is given: "+other" for each function that the kernel calls by address, which is
left to whoever asks ("?other": one that it rarely calls), and last "=" once the code is kept, or "-". What comes as
"?name" nobody waits for: from then on it gives way to all other programs. It ends with its input, and on Linux with the
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
from collections.abc import Iterable, Iterator
from typing import TextIO

_PR_SET_PDEATHSIG = 1
_LIFETIME = 600.0
"""Seconds after which it ends in any case. Nobody's kernels take so long."""


def main() -> None:
    """Serve standard input and output, with nothing else coming that way."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the program, which then closes the input
    _die_with_parent()
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)
    faulthandler.dump_traceback_later(_LIFETIME, exit=True)
    gc.disable()  # what a compiler leaves behind is looked through again and again: a tenth of the time
    os.environ["NUMBA_DISABLE_ERROR_MESSAGE_HIGHLIGHTING"] = "1"  # of errors that only tell it what else to try
    sys.modules["torch"] = _Absent("torch")
    sys.modules["scipy"] = None  # type: ignore[assignment]  # numba looks for its BLAS, which no kernel uses
    if sys.argv[3:] == ["later"]:
        _give_way()
    serve(_lines(sys.stdin), answers)
    os._exit(0)


class _Absent(types.ModuleType):
    """Stands for torch, which takes twice as long to import as all else here: kernels are compiled for types of their
    own, and their modules only name some of torch's at the beginning. Nothing of it can be called."""

    def __getattr__(self, name: str) -> _Absent:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Absent(f"{self.__name__}.{name}")


def _die_with_parent() -> None:
    """The compiler holds the interpreter's lock for seconds, in which nobody here hears of the input's end."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _give_way() -> None:
    """To all other programs, and the one that started it, for good."""
    if hasattr(os, "setpriority"):
        os.setpriority(os.PRIO_PROCESS, 0, 19)


def _lines(source: TextIO) -> Iterator[str]:
    """Lines as they come. Once there are no more the process ends: nobody wants what it is doing."""
    arrived: queue.SimpleQueue[str] = queue.SimpleQueue()

    def read() -> None:
        for line in source:
            arrived.put(line)
        os._exit(0)

    threading.Thread(target=read, name="asyncengine-names", daemon=True).start()
    while True:
        yield arrived.get()


def serve(names: Iterable[str], answers: TextIO) -> None:
    """Compile what `names` say, and answer."""
    from asyncengine.kernels.cpu.calls import compile_named
    from asyncengine.kernels.cpu.compile_watcher import called_apart
    from asyncengine.kernels.cpu.remembering import remember

    remember()

    def say(text: str) -> None:
        answers.write(f"{text}\n")
        answers.flush()

    token = called_apart.set(lambda name, rare: say(f"{'?' if rare else '+'}{name}"))
    try:
        say("ready")
        for line in names:
            if line[:1] == "?":
                _give_way()
            try:
                compile_named(line.strip().removeprefix("?"))
            except Exception:  # whoever calls the kernel compiles it again, and says what is wrong
                say("-")
            else:
                say("=")
    finally:
        called_apart.reset(token)
