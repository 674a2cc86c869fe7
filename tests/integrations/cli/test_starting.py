"""Start and end of a command: Ctrl-C while it starts, what it imports and when, and what an end waits for. Signals are
sent when a certain module is about to be imported, so that no test is timed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest

from asyncengine.integrations.cli.main import main

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
