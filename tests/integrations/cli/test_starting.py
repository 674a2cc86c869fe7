"""Ctrl-C while a command starts: sent when a certain module is about to be imported, so that no test is timed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

if sys.platform == "win32":
    pytest.skip("a process cannot send itself Ctrl-C there", allow_module_level=True)

PYPROJECT = tomllib.loads((Path(__file__).resolve().parents[3] / "pyproject.toml").read_text(encoding="utf-8"))
_HOOK = """
import os, signal, sys

class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == os.environ["INTERRUPT_AT"]:
            os.kill(os.getpid(), signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever runs the tests may have it ignored
sys.meta_path.insert(0, Interrupt())
"""


MODULE, SCRIPT = ("-m", "asyncengine"), ("-c", "from asyncengine.__main__ import script; script()")


@pytest.mark.parametrize(
    ("start", "at"),
    [
        (MODULE, "asyncengine.integrations.cli.main"),
        (SCRIPT, "asyncengine.config"),
        (SCRIPT, "asyncengine.execution.device.memory"),
    ],
)
def test_ctrl_c_ends_a_command_that_starts(start: tuple[str, str], at: str, tmp_path: Path) -> None:
    """Ctrl-C comes before the command line's first import, in the package's own, and while a command runs."""
    assert PYPROJECT["project"]["scripts"] == {"asyncengine": "asyncengine.__main__:script"}
    (tmp_path / "sitecustomize.py").write_text(_HOOK)
    paths = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, *start, "fit", "demo"], env={**os.environ, "PYTHONPATH": paths, "INTERRUPT_AT": at},
        stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.stdout, done.stderr, done.returncode) == ("", "interrupted\n", 130)


def test_programs_that_import_the_engine_keep_their_ctrl_c(tmp_path: Path) -> None:
    """So do programs that are called as the command is."""
    program = tmp_path / "asyncengine"
    begin = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    begin += "import asyncengine.integrations.cli.main, asyncengine.__main__; asyncengine.AsyncEngine; "
    program.write_text(begin + "print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)")
    for command in ([str(program)], ["-c", program.read_text(), "-m", "asyncengine"]):
        done = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=True)
        assert done.stdout == "True\n"


def test_ctrl_c_that_is_ignored_stays_ignored() -> None:
    """A shell starts commands in the background with Ctrl-C ignored."""
    done = subprocess.run(
        [sys.executable, "-m", "asyncengine", "--version"],
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN) and None,
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.startswith("asyncengine ")
