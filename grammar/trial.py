"""Trying a grammar in a process of its own, where what cannot be checked beforehand may crash.

`check_limits` bounds what makes llguidance recurse as far as it can be read off: nesting, and chains of rules and
references. A text of up to `SMALL` characters cannot overflow a stack of `STACK_BYTES` even where it cannot (a level
takes 3 kB for 6 characters of Lark). Everything else is tried first. A schema reaches it as rules of ours, which do not
nest, and with no bound of a number, the one way found to crash it with a few characters.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

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
START = 10.0
"""Seconds that a trial may take beyond those of the processor that it has: starting takes 0.2 s."""
TIMED_OUT = (-9, -24)
"""SIGKILL and SIGXCPU."""
THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


class Trial:
    """Tries grammars, each in a process that ends with it. Thread-safe."""

    def __init__(self, memory_limit: int = MEMORY) -> None:
        self._memory_limit = memory_limit
        self._running: set[subprocess.Popen[bytes]] = set()
        self._closed = False

    def __call__(self, text: str, timeout: float) -> None:
        """Raise `GrammarError` if `text`, a grammar as the library takes it, kills the process, `GrammarTooLarge` if it
        needs too much memory, `GrammarTimeout` after `timeout` seconds."""
        if not sys.executable:
            raise GrammarError("grammar", "this compiles in a Python process, but sys.executable is not set")
        # the stack is smaller than that of the engine's own thread that compiles
        options = (self._memory_limit, STACK_BYTES * 3 // 4, int(timeout) + 1)
        with subprocess.Popen(
            [sys.executable, "-P", str(Path(trial_worker.__file__).resolve()), *map(str, options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            # the stacks of threads count as address space
            env={**os.environ, **dict.fromkeys(THREAD_VARIABLES, "1"), "PYTHONPATH": os.pathsep.join(sys.path)},
            start_new_session=True,  # the terminal's Ctrl-C and hang-up are not for it
        ) as process:
            self._running.add(process)
            try:
                if self._closed:
                    process.kill()
                process.communicate(text.encode(), timeout + START)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            finally:
                process.kill()
                self._running.discard(process)
        if self._closed:
            raise GrammarError("grammar", "the engine is closed")
        code = process.returncode
        if code in TIMED_OUT:
            raise GrammarTimeout("grammar", f"was not compiled within {timeout:g} s")
        if code == trial_worker.OUT_OF_MEMORY:
            raise GrammarTooLarge("grammar", f"needs more than {self._memory_limit >> 20:,} MiB to compile")
        if code:
            fate = f"signal {-code}" if code < 0 else f"exit status {code}"
            raise GrammarError("grammar", f"crashes the grammar library (tried in a process apart: {fate})")

    def close(self) -> None:
        """End the processes. A trial in progress fails with `GrammarError`. Idempotent."""
        self._closed = True
        for process in list(self._running):
            process.kill()


def known_safe(grammar: Grammar) -> bool:
    """It passed `check_limits`, and that saw everything which could make the library recurse deeply. Of a schema the
    library sees flat rules."""
    return grammar.kind in ("choice", "json_schema") or len(grammar.text) <= SMALL
