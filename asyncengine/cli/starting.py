"""Ctrl-C while a command starts. Imported before all else: Python is at imports for a third of a second, where an
interrupt would be a traceback from anywhere, or lost in a callback."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from types import FrameType

from asyncengine.cli.errors import INTERRUPTED


def _leave(signum: int, frame: FrameType | None) -> None:
    with contextlib.suppress(OSError):
        os.write(2, b"interrupted\n")
    os._exit(INTERRUPTED)


def interruptible() -> None:
    """From here on Ctrl-C raises `KeyboardInterrupt`, as ever, for there is something to put in order."""
    if signal.getsignal(signal.SIGINT) is _leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _is_command() -> bool:
    """Whether this process is `asyncengine` or `python -m asyncengine...`, and not a program that imports it."""
    first, given = sys.argv[0] if sys.argv else "", sys.orig_argv
    if first == "-m" and "-m" in given[:-1]:  # it is still being looked for
        return given[given.index("-m") + 1].split(".")[0] == "asyncengine"
    return os.path.splitext(os.path.basename(first))[0] == "asyncengine"


if _is_command() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, _leave)
