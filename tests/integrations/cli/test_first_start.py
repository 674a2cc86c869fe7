"""The start of a command on a machine where nothing was compiled yet."""

import subprocess
import sys

import pytest

_PROGRAM = """
import os, sys
from asyncengine.kernels.compile_ahead import CompileAhead
from asyncengine.integrations.cli.main import main
def for_engine(*_):
    print("torch" in sys.modules, flush=True)
    os._exit(0)
CompileAhead.for_engine = for_engine
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


_IMPORTS = """
import builtins, sys, threading
from types import SimpleNamespace
from asyncengine import EngineConfig
from asyncengine.integrations.cli import loading
late, begun = [], []
known, on_thread = builtins.__import__, loading.on_thread
def noted(*arguments, **named):
    before = set(sys.modules)
    found = known(*arguments, **named)
    if begun and threading.current_thread() is threading.main_thread():
        late.extend(name for name in set(sys.modules) - before if name.startswith("rich"))
    return found
def begin(work):
    begun.append(True)
    return on_thread(work)
builtins.__import__, loading.on_thread = noted, begin
sys.stderr.isatty = lambda: True
engine = SimpleNamespace(close=lambda: None)
loading.shared_engine = lambda *_, **__: SimpleNamespace(get=lambda: engine, close=lambda: None)
with loading.open_engine("demo", EngineConfig()) as found:
    print(found is engine, len(begun) > 1, late)
"""


def test_the_main_thread_imports_nothing_beside_others() -> None:
    """A Ctrl-C within such an import was lost now and then, with the lock that all imports wait for."""
    found = subprocess.run([sys.executable, "-c", _IMPORTS], capture_output=True, text=True, timeout=120, check=False)
    assert found.stdout == "True True []\n", found.stderr
