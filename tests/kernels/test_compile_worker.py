"""Compiler processes end with the program that started them, even if that was killed and their input stays open."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

PROGRAM = """
import os, signal, sys
from asyncengine.kernels.compile_ahead import CompilerProcess

first, second = CompilerProcess(), CompilerProcess()
assert first.hear() == second.hear() == "ready"
if os.fork() == 0:  # holds the pipes of both open, so that neither hears of its input's end
    sys.stdin.read()
    os._exit(0)
print(first._program.pid, second._program.pid, flush=True)
signal.pause()
"""


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="other systems tell no process that its parent ended")
def test_compilers_end_with_a_program_that_is_killed() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as program:
        assert program.stdout is not None
        pids = [int(pid) for pid in program.stdout.readline().split()]
        assert len(pids) == 2
        assert all(map(is_running, pids))
        program.kill()
        until = time.monotonic() + 20
        while any(map(is_running, pids)) and time.monotonic() < until:
            time.sleep(0.05)
        assert not any(map(is_running, pids))
