"""Trying a grammar in a process of its own, where what cannot be checked beforehand may crash.

`check_limits` bounds what makes llguidance recurse as far as it can be read off: nesting, and chains of rules and
references. A text of up to `SMALL` characters cannot overflow a stack of `STACK_BYTES` even where it cannot (a level
takes 3 kB for 6 characters of Lark). Everything else is tried first. A schema reaches it as rules of ours, which do not
nest, and with no bound of a number, the one way found to crash it with a few characters.
"""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path

from asyncengine.errors import GrammarError, GrammarTimeout, GrammarTooLarge
from asyncengine.grammar import trial_worker
from asyncengine.grammar.outlines_core_backend import START_TIMEOUT, Process
from asyncengine.grammar.outlines_core_worker import READY
from asyncengine.grammar.spec import Grammar

STACK_BYTES = 64 << 20
"""Stack of a thread that compiles: llguidance recurses, and a chain of references as long as `check_limits` allows
overflows the half megabyte that some systems give a thread. Only what is used takes memory."""
SMALL = 16 << 10
"""Characters that cannot nest deeply enough to overflow it."""
MEMORY = 3 << 30
"""Address space of the process."""


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
        if ready != READY:
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
