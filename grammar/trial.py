"""Trying a grammar in a process of its own, where what cannot be checked beforehand may crash.

`check_limits` bounds what makes llguidance recurse as far as it can be read off: nesting, and chains of rules and
references. A text of up to `SMALL` characters cannot overflow a stack of `STACK_BYTES` even where it cannot (a level
takes 3 kB for 6 characters of Lark). Everything else is tried first. A schema reaches it as rules of ours, which do not
nest, and with no bound of a number, the one way found to crash it with a few characters.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import IO, BinaryIO, cast

from asyncengine.errors import GrammarError, GrammarTimeout, GrammarTooLarge
from asyncengine.grammar import trial_worker
from asyncengine.grammar.spec import Grammar

STACK_BYTES = 64 << 20
"""Stack of a thread that compiles: llguidance recurses, and a chain of references as long as `check_limits` allows
overflows the half megabyte that some systems give a thread. Only what is used takes memory."""
SMALL = 16 << 10
"""Characters that cannot nest deeply enough to overflow it."""
MEMORY = 3 << 30
"""Address space of the process."""
START_TIMEOUT = 60.0
"""Seconds to start the process; it takes 0.2 s."""
THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


class Trial:
    """The process, started at first use. Thread-safe; grammars are tried one after the other."""

    def __init__(self, memory_limit: int = MEMORY) -> None:
        self._memory_limit = memory_limit
        self._turn = threading.Lock()
        self._process: Process | None = None
        self._closed = threading.Event()

    def __call__(self, text: str, timeout: float) -> None:
        """Raise `GrammarError` if `text`, a grammar as the library takes it, kills the process, `GrammarTooLarge` if it
        needs too much memory, `GrammarTimeout` after `timeout` seconds."""
        with self._turn:
            process = self._started()
            try:
                answer = process.ask(timeout, text.encode())
            finally:
                if not process.idle:
                    process.end()
                    self._process = None
        if answer == trial_worker.TRIED:
            return
        if process.expired:
            raise GrammarTimeout("grammar", f"was not compiled within {timeout:g} s")
        if answer == trial_worker.MEMORY:
            raise GrammarTooLarge("grammar", f"needs more than {self._memory_limit >> 20:,} MiB to compile")
        if self._closed.is_set():
            raise GrammarError("grammar", "the engine is closed")
        raise GrammarError("grammar", f"crashes the grammar library (tried in a process apart: {process.fate()})")

    def _started(self) -> Process:
        if self._closed.is_set():
            raise GrammarError("grammar", "the engine is closed")
        process = self._process
        if process is not None and process.alive():
            return process
        if process is not None:
            process.end()
        self._process = process = Process(Path(trial_worker.__file__))
        if self._closed.is_set():  # closed meanwhile: `close` may not have seen it
            process.kill()
        options = {"path": sys.path, "memory_limit": self._memory_limit, "stack_bytes": STACK_BYTES * 3 // 4}
        ready = process.ask(START_TIMEOUT, json.dumps(options).encode())
        if ready != trial_worker.READY:
            process.end()
            self._process = None
            said = ready.decode("utf-8", "replace") if ready else process.fate()
            raise GrammarError("grammar", f"the process in which large grammars are tried did not start: {said}")
        return process

    def close(self) -> None:
        """End the process. A trial in progress fails with `GrammarError`. Idempotent."""
        self._closed.set()
        if (process := self._process) is not None:
            process.kill()
        with self._turn:
            if self._process is not None:
                self._process.end()
                self._process = None


def known_safe(grammar: Grammar) -> bool:
    """It passed `check_limits`, and that saw everything which could make the library recurse deeply. Of a schema the
    library sees flat rules."""
    return grammar.kind in ("choice", "json_schema") or len(grammar.text) <= SMALL


class Process:
    """One process that tries grammars, running `script`. Used by one thread at a time, but for `kill`."""

    def __init__(self, script: Path) -> None:
        if not sys.executable:
            raise GrammarError("grammar", "this compiles in a Python process, but sys.executable is not set")
        self._popen = subprocess.Popen(
            [sys.executable, "-P", str(script.resolve())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, **dict.fromkeys(THREAD_VARIABLES, "1")},  # their stacks count as address space
            start_new_session=True,  # the terminal's Ctrl-C and hang-up are not for it
        )
        self._end = weakref.finalize(self, _end, self._popen)
        self.idle = False
        """It has answered everything it was asked."""
        self.expired = False
        """It was killed for taking too long."""

    def ask(self, timeout: float, *frames: bytes) -> bytes | None:
        """Its answer to the frames, None if it ended or was killed after `timeout` seconds."""
        self.idle = False
        answer = None
        stdin, stdout = cast(BinaryIO, self._popen.stdin), cast(BinaryIO, self._popen.stdout)
        timer = threading.Timer(timeout, self._expire)
        timer.start()
        try:
            for frame in frames:
                trial_worker.write_frame(stdin, frame)
            answer = trial_worker.read_frame(stdout)
        except OSError:  # it has ended
            pass
        finally:
            timer.cancel()
            timer.join()
        self.idle = answer is not None
        return answer

    def alive(self) -> bool:
        return not self.expired and self._popen.poll() is None

    def _expire(self) -> None:
        self.expired = True
        self.kill()

    def kill(self) -> None:
        self._popen.kill()

    def end(self) -> None:
        """Kill it and wait for that; nothing of it is left behind. Happens by itself when the object is dropped."""
        self._end()

    def fate(self) -> str:
        """The way in which it ended; only after `end`."""
        code = self._popen.returncode
        return f"signal {-code}" if code < 0 else f"exit status {code}"


def _end(popen: subprocess.Popen[bytes]) -> None:
    popen.kill()
    popen.wait()
    for stream in (popen.stdin, popen.stdout):
        with contextlib.suppress(OSError):  # what was not written has no reader
            cast(IO[bytes], stream).close()
