"""The process that compiles kernels for another one (`compile_process`): names come in by line, code goes to the cache.

It says "ready" and its number, then of each name it is given: "+other" for each function that the kernel calls by
address, which is left to whoever asks ("?other": one that it rarely calls), and last "=" once the code is kept, or "-".
What comes as "?name" nobody waits for: from then on it gives way to all other programs. At "&" it forks, and the fork
goes on with the next pair of pipes that it was started with. It ends with its input, and on Linux with the thread that
started it: at once, whatever it is doing.
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
import warnings
from typing import NoReturn

_PR_SET_PDEATHSIG = 1
_LIFETIME = 600.0
"""Seconds after which it ends in any case. Nobody's kernels take so long."""


def main() -> None:
    """Serve standard input and output, with nothing else coming that way."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the program, which then closes the input
    if hasattr(signal, "SIGCHLD"):
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how a fork ended
    _die_with_parent()
    program = _Program(os.dup(0), os.dup(1))
    _close_standard()
    _watch()
    gc.disable()  # what a compiler leaves behind is looked through again and again: a tenth of the time
    os.environ["NUMBA_DISABLE_ERROR_MESSAGE_HIGHLIGHTING"] = "1"  # of errors that only tell it what else to try
    sys.modules["torch"] = _Absent("torch")
    sys.modules["scipy"] = None  # type: ignore[assignment]  # numba looks for its BLAS, which no kernel uses
    if sys.argv[3:4] == ["later"]:
        _give_way()
    serve(program, [(int(names), int(answers)) for names, answers in (pair.split(",") for pair in sys.argv[4:])])


class _Program:
    """The one that this process compiles for. Once it says no more the process ends: nobody wants what it is doing."""

    def __init__(self, names: int, answers: int) -> None:
        self._names = os.fdopen(names, encoding="utf-8")
        self._answers = os.fdopen(answers, "w", encoding="utf-8")
        self._arrived: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._read, name="asyncengine-names", daemon=True).start()

    def _read(self) -> None:
        for line in self._names:
            self._arrived.put(line.strip())
        os._exit(0)

    def next(self) -> str:
        return self._arrived.get()

    def say(self, text: str) -> None:
        self._answers.write(f"{text}\n")
        self._answers.flush()

    def left_to_another(self) -> None:
        """Close everything that a fork does not share with its parent, whose reading thread it does not have."""
        self._answers.close()


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


def _close_standard() -> None:
    """Nothing else comes that way."""
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)


def _watch() -> None:
    faulthandler.dump_traceback_later(_LIFETIME, exit=True)


def serve(program: _Program, spare: list[tuple[int, int]]) -> NoReturn:
    """Compile what is named, and answer. `spare`: descriptors of names and answers for forks."""
    from asyncengine.kernels.cpu.calls import compile_named
    from asyncengine.kernels.cpu.compile_watcher import called_apart
    from asyncengine.kernels.cpu.remembering import remember

    remember()
    called_apart.set(lambda name, rare: program.say(f"{'?' if rare else '+'}{name}"))
    program.say(f"ready {os.getpid()}")
    while True:
        name = program.next()
        if name == "&":
            program = _fork(program, spare)
            continue
        if name.startswith("?"):
            _give_way()
        try:
            compile_named(name.removeprefix("?"))
        except Exception:  # whoever calls the kernel compiles it again, and says what is wrong
            program.say("-")
        else:
            program.say("=")


def _fork(program: _Program, spare: list[tuple[int, int]]) -> _Program:
    """Fork: the program that each of the two serves from now on. Nothing is being compiled, so no lock of a compiler
    is held."""
    names, answers = spare.pop(0)
    faulthandler.cancel_dump_traceback_later()  # a fork has not the thread that watches, and would wait for it
    with warnings.catch_warnings():  # of the thread that reads names: it holds nothing that a fork needs
        warnings.simplefilter("ignore")
        is_fork = os.fork() == 0
    if is_fork:
        _die_with_parent()
        program.left_to_another()
        for each in (descriptor for pair in spare for descriptor in pair):
            os.close(each)
        spare.clear()
        program = _Program(names, answers)
        program.say(f"ready {os.getpid()}")
    else:
        os.close(names)
        os.close(answers)
    _watch()
    return program
