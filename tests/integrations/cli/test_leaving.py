"""The end of a command: at once, but not before all is said and done."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest

from asyncengine.integrations.cli.main import main

_END = """
import atexit, sys, threading
from asyncengine.integrations.cli import main as command

class Module:
    def __del__(self):
        print("taken apart")

def ended(argv):
    {main}
    sys.stdout.write("said")
    return 3

sys.modules["slow to take apart"] = Module()
atexit.register(lambda: sys.stdout.write(", done"))
command.main = ended
command.script()
"""
_THREAD = """threading.Thread(
        target=lambda: (threading.main_thread().join(), sys.stdout.write(", waited for"))
    ).start()"""


def run(main: str) -> subprocess.CompletedProcess[str]:
    program = _END.format(main=main)
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)


def test_modules_are_not_taken_apart() -> None:
    """Printed text arrives, functions that were registered for the exit have run, and the code is the command's."""
    found = run("pass")
    assert (found.stdout, found.stderr, found.returncode) == ("said, done", "", 3)


def test_threads_that_were_to_be_waited_for_are() -> None:
    found = run(_THREAD)
    assert found.stdout.startswith("said, waited for, done")
    assert (found.stderr, found.returncode) == ("", 3)


def test_a_command_stays_until_all_kernels_of_a_first_start_are_there(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    waited = []
    monkeypatch.setattr("asyncengine.kernels.elsewhere.elsewhere", [SimpleNamespace(wait=lambda: waited.append(True))])
    assert main(["fit", "demo"]) == 0
    assert waited == [True]
    assert "compiling" not in capsys.readouterr().err  # it is no terminal
    assert main(["fit", "/no/such/model"]) == 2
    assert waited == [True]
