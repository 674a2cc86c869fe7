"""What a command does first on a machine where nothing was compiled yet."""

import subprocess
import sys

import pytest

_PROGRAM = """
import os, sys
from asyncengine.kernels.compile_ahead import CompileAhead
from asyncengine.cli.main import main
def expect(self, *, first_time=False, **_):
    if first_time:
        print("torch" in sys.modules, flush=True)
        os._exit(0)
CompileAhead.expect = expect
main(sys.argv[1:])
"""


@pytest.mark.parametrize("command", [("generate", "demo", "hi"), ("embed", "demo-embed")], ids=["generate", "embed"])
def test_compilers_start_before_torch_is_imported(command: tuple[str, ...]) -> None:
    found = subprocess.run(
        [sys.executable, "-c", _PROGRAM, *command],
        input="hi\n",
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (found.stdout, found.stderr) == ("False\n", "")
