"""The opt-in backend: outlines_core's automata for patterns, choices and a closed subset of JSON schema.

A mask is a copied row, and the way to the nearest end is known exactly. The price is compiling: every state of the
automaton is tried with every token, 40 ms to a minute at 150,000 tokens where llguidance takes 2 ms. So it happens in
a process of its own (`outlines_core_worker`), which is given the vocabulary once and is killed when a pattern takes
too long.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, BinaryIO, cast

import numpy as np

from asyncengine.errors import GrammarError, GrammarImpossible, GrammarTimeout, GrammarTooLarge, GrammarUnsupported
from asyncengine.grammar import outlines_core_worker as worker
from asyncengine.grammar.canonical import parse_json
from asyncengine.grammar.formats import keep_enforced
from asyncengine.grammar.json_subset import schema_pattern
from asyncengine.grammar.outlines_core_template import OutlinesCoreTemplate
from asyncengine.grammar.patterns import checked_pattern, choice_pattern, hint

if TYPE_CHECKING:
    from asyncengine.grammar.spec import Grammar

START_TIMEOUT = 60.0
"""Seconds to start the process and hand it the vocabulary; it takes 0.2 s, and half a second at 150,000 tokens."""
CODE = len(worker.READY)
THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


class OutlinesCoreBackend:
    """Compiles grammars for one vocabulary. Thread-safe; compilations happen one after the other.

    `token_bytes[i]` are the bytes of token i (`TokenTable.token_bytes`); ids in `special_ids`, ids without bytes and
    ids from `len(token_bytes)` up to `vocab_size`, the width of the model's logits, are never allowed. Characters from
    U+100000 on (private use, plane 16) are never allowed either. `memory_limit` bounds the process that compiles
    (address space; on Unix), `max_index_bytes` what it may hand back.

    No process runs before the first `compile`; `close` ends it. Dropping the backend ends it too.
    """

    name = "outlines_core"

    def __init__(
        self,
        token_bytes: Sequence[bytes],
        eos_ids: Sequence[int],
        special_ids: Collection[int],
        vocab_size: int,
        *,
        memory_limit: int = 2 << 30,
        max_index_bytes: int = 64 << 20,
    ) -> None:
        self.eos_ids = tuple(dict.fromkeys(i for i in eos_ids if 0 <= i < vocab_size))
        self.vocab_size = vocab_size
        self.memory_limit = memory_limit
        self.max_index_bytes = max_index_bytes
        hidden = {*special_ids, *self.eos_ids}
        spelled = [b"" if i in hidden else data for i, data in enumerate(token_bytes[:vocab_size])]
        self._lengths = np.array([len(data) for data in spelled], np.int32).tobytes()
        self._data = b"".join(spelled)
        self._turn = threading.Lock()
        self._process: Process | None = None
        self._closed = threading.Event()

    def compile(self, grammar: Grammar, timeout: float) -> OutlinesCoreTemplate:
        """Blocking: for a worker thread. Takes `timeout` seconds at most, its turn included; starting the process,
        which the first compilation and the one after a killed one must do, has a limit of its own.

        Raises `GrammarUnsupported`, `GrammarTooLarge` (memory or size), `GrammarTimeout`, `GrammarImpossible`, and
        `GrammarError` for a malformed pattern or a closed backend.
        """
        deadline = time.monotonic() + timeout
        pattern = pattern_of(grammar)
        if not self._turn.acquire(timeout=max(0.0, timeout)):
            raise _timed_out(timeout)
        try:
            began = time.monotonic()
            process = self._started()
            left = deadline - began  # starting it is not counted
            if left <= 0:
                raise _timed_out(timeout)
            data = process.ask(left, pattern.encode())
            if data is None:
                self._end(process)
                raise self._broken(process, timeout)
        except BaseException:
            # Whatever it is (Ctrl-C in the midst of a frame), only a process that has answered is used again.
            if self._process is not None and not self._process.idle:
                self._end(self._process)
            raise
        finally:
            self._turn.release()
        if data[:CODE] == worker.INVALID:
            raise GrammarError("grammar", f"outlines_core refuses the pattern: {data[CODE:].decode()}{hint(pattern)}")
        return self._template(data)

    def close(self) -> None:
        """End the process. A compilation in progress fails with `GrammarError`; so do later ones. Idempotent."""
        self._closed.set()
        if (process := self._process) is not None:
            process.kill()
        with self._turn:
            if self._process is not None:
                self._end(self._process)

    def _started(self) -> Process:
        """The process, ready for a pattern."""
        if self._closed.is_set():
            raise GrammarError("grammar", "the outlines_core backend is closed")
        process = self._process
        if process is not None and process.alive():
            return process
        if process is not None:
            self._end(process)
        self._process = process = Process(Path(worker.__file__))
        if self._closed.is_set():  # closed meanwhile: `close` may not have seen it
            self._end(process)
            raise GrammarError("grammar", "the outlines_core backend is closed")
        options = {"path": sys.path, "memory_limit": self.memory_limit, "max_index_bytes": self.max_index_bytes}
        ready = process.ask(START_TIMEOUT, json.dumps(options).encode(), self._lengths, self._data)
        if ready is None or ready[:CODE] != worker.READY:
            self._end(process)
            said = ready[CODE:].decode() if ready else process.fate()
            if self._closed.is_set():
                raise GrammarError("grammar", "the outlines_core backend was closed")
            raise GrammarError("grammar", f"the process in which outlines_core compiles did not start: {said}")
        return process

    def _end(self, process: Process) -> None:
        process.end()
        if self._process is process:
            self._process = None

    def _broken(self, process: Process, timeout: float) -> GrammarError:
        """Why there was no answer."""
        if self._closed.is_set():
            return GrammarError("grammar", "the outlines_core backend was closed")
        if process.expired:
            return _timed_out(timeout)
        return self._over_memory(f" (the process that compiled it ended: {process.fate()})")

    def _over_memory(self, detail: str = "") -> GrammarTooLarge:
        limit = f"{self.memory_limit / (1 << 20):,.0f} MiB"
        return GrammarTooLarge("grammar", f"needs more than memory_limit={limit} to compile with outlines_core{detail}")

    def _template(self, data: bytes) -> OutlinesCoreTemplate:
        code = data[:CODE]
        if code == worker.TABLES:
            return OutlinesCoreTemplate(data, self.eos_ids, self.vocab_size)
        if code == worker.IMPOSSIBLE:
            raise GrammarImpossible("grammar", "this model's tokens cannot spell any complete output for it")
        if code == worker.TOO_LARGE:
            limit = f"{self.max_index_bytes / (1 << 20):,.0f} MiB"
            raise GrammarTooLarge("grammar", f"its outlines_core index exceeds max_index_bytes={limit}; use llguidance")
        if code == worker.MEMORY:
            raise self._over_memory()
        raise GrammarError("grammar", "outlines_core's process gave an answer nobody knows")


class Process:
    """One process that compiles, running `script`. Used by one thread at a time, but for `kill`."""

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
                worker.write_frame(stdin, frame)
            answer = worker.read_frame(stdout)
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


def pattern_of(grammar: Grammar) -> str:
    """The grammar as one pattern in the syntax of Rust's `regex`. Raises `GrammarUnsupported` and `GrammarError`."""
    if grammar.kind == "regex":
        return checked_pattern(grammar.text)
    if grammar.kind == "choice":
        return choice_pattern(parse_json(grammar.text))
    if grammar.kind == "json_schema":
        schema = parse_json(grammar.text)
        keep_enforced(schema, grammar.formats == "strict")
        return schema_pattern(schema, grammar.whitespace)
    raise GrammarUnsupported("grammar", [(grammar.kind, "")], "outlines_core knows no such grammars: use llguidance")


def _timed_out(timeout: float) -> GrammarTimeout:
    return GrammarTimeout("grammar", f"outlines_core did not compile it within {timeout:g} s; use llguidance")
