"""Child processes that run a module of this package, and that never outlive this process.

They are new programs, not forks, and not `multiprocessing`'s, which would run the caller's main module again. A socket
joins each to its parent. It carries nothing but a failing child's error: its end tells either side that the other is
gone, however it died. A child inherits the CPU affinity and the memory policy of the thread that starts it.
"""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple, NoReturn

_START = (
    "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); "  # Ctrl-C is for the parent, which ends us
    "import importlib, json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "importlib.import_module(sys.argv[2]).main(*map(int, sys.argv[3:]))"
)
_MOMENT = 5.0
"""Seconds that a process gets to end by itself before it is killed."""
_LAST_WORDS = 4000
"""Most characters of an error that are sent to the parent."""


class Child(NamedTuple):
    """One process, as its parent knows it."""

    program: subprocess.Popen[bytes] | None
    """None: it runs on another machine."""
    life: socket.socket
    name: str = ""
    """Its name in messages if it runs on another machine."""

    def last_words(self) -> str:
        """The error that ended it, if it sent one; "" otherwise, and after a second if it is alive."""
        with suppress(OSError):
            self.life.settimeout(1.0)
            return self.life.recv(2**16).decode(errors="replace")
        return ""


def start_child(
    module: str, numbers: Sequence[int], descriptors: Sequence[int], env: Mapping[str, str] | None = None
) -> Child:
    """Start a process that calls `main(parent, life, *numbers, *descriptors)` of a module, which calls `run`. It
    inherits the descriptors, and `env` instead of this process's environment. Raises `OSError`."""
    life, its_life = socket.socketpair()
    with its_life:
        passed = its_life.fileno(), *descriptors
        arguments = os.getpid(), its_life.fileno(), *numbers, *descriptors
        paths = json.dumps([os.path.abspath(path) for path in sys.path])
        try:
            program = subprocess.Popen(
                [sys.executable, "-P", "-c", _START, paths, module, *map(str, arguments)],
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, pass_fds=passed, env=env,
            )  # fmt: skip
        except BaseException:
            life.close()
            raise
    return Child(program, life)


def end_children(children: Sequence[Child]) -> None:
    """End these processes at once, whatever they are doing, and wait until they are gone. Idempotent."""
    for child in children:
        with suppress(OSError):
            child.life.shutdown(socket.SHUT_RDWR)
    for child in children:
        if child.program is not None:
            try:
                child.program.wait(_MOMENT)
            except subprocess.TimeoutExpired:
                child.program.kill()
                child.program.wait()
        child.life.close()


def run(work: Callable[[], object], parent: int, life: int) -> NoReturn:
    """In the child: do `work` until the parent closes `life` or is gone. The process ends without cleaning up, since
    the system frees all that it has."""
    alive = socket.socket(fileno=life)
    threading.Thread(target=_end_with, args=(alive, parent), daemon=True).start()
    try:
        work()
    except BaseException as error:
        gone = BaseExceptionGroup("", [error]).subgroup((EOFError, ConnectionError))  # also within a group of errors
        if gone is None:
            text = f"{error!r}\n{traceback.format_exc()}"
            with suppress(OSError):
                alive.sendall(text[:_LAST_WORDS].encode())
            os._exit(1)
    os._exit(0)  # the work is done, or the parent is gone


def _end_with(alive: socket.socket, parent: int) -> None:
    """Exit when the parent closes its end of the socket, or is gone. The latter is watched by itself, since a fork of
    the parent may keep that end open."""
    poll = select.poll()
    poll.register(alive, select.POLLIN)
    with suppress(OSError, AttributeError):  # an old kernel, another system than Linux
        poll.register(os.pidfd_open(parent), select.POLLIN)
    poll.poll()
    os._exit(0)
