"""Standard streams as they come: full, closed, gone, without Unicode. At most one line on stderr, and an exit code."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest
from support.data import cases_of

from asyncengine import SyncTokenStream
from asyncengine.integrations.cli.chat import _stopped_by_ctrl_c
from asyncengine.integrations.cli.main import main

ROWS: dict[str, Any] = cases_of(__file__)

SNOW = ("generate", "demo", "Tromsø: ", "--regex", "ø☃", "--max-tokens", "12", "--num-threads", "1",
        "--kv-cache-memory", "4MiB")  # fmt: skip
FULL = Path("/dev/full")


class Ascii(io.TextIOWrapper):
    def __init__(self) -> None:
        super().__init__(io.BytesIO(), encoding="ascii", errors="strict")

    def text(self) -> str:
        self.flush()
        buffer = self.buffer
        assert isinstance(buffer, io.BytesIO)
        return buffer.getvalue().decode("ascii")


def test_what_the_encoding_lacks_is_a_question_mark_and_escaped_in_json(monkeypatch: pytest.MonkeyPatch) -> None:
    for flags, expected in (((), "??\n"), (("--n", "2"), "[0] ??\n[1] ??\n")):
        out = Ascii()
        monkeypatch.setattr(sys, "stdout", out)
        assert main([*SNOW, *flags]) == 0
        assert out.text() == expected
    out = Ascii()
    monkeypatch.setattr(sys, "stdout", out)
    assert main([*SNOW, "--json"]) == 0
    assert json.loads(out.text())["text"] == "ø☃"


@pytest.mark.skipif(not FULL.exists(), reason="needs /dev/full")
def test_a_full_disk_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for flags in ((), ("--json",), ("--n", "2")):
        with FULL.open("w", encoding="utf-8") as out:
            monkeypatch.setattr(sys, "stdout", out)
            assert main([*SNOW, *flags]) == 1
        shown = capsys.readouterr().err
        assert "No space left" in shown
        assert shown.count("\n") == 1


def test_a_reader_that_left_is_told_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    read, write = os.pipe()
    os.close(read)
    with open(write, "w", encoding="utf-8") as out:
        monkeypatch.setattr(sys, "stdout", out)
        assert main(SNOW) == 1
    assert capsys.readouterr().err == ""


def test_a_closed_stdin_is_empty(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    assert main(["generate", "demo", "-"]) == 2
    assert "prompt: must not be empty" in capsys.readouterr().err
    monkeypatch.setattr(sys, "stdin", None)
    assert main(["chat", "demo", "--num-threads", "1", "--kv-cache-memory", "4MiB"]) == 0


def test_a_closed_stdout_is_said_before_any_work(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    assert main(SNOW) == 1
    assert "stdout is closed" in capsys.readouterr().err


def test_ctrl_c_that_was_ignored_when_we_started_stays_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with _stopped_by_ctrl_c(cast(SyncTokenStream, None)):
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


DRAWS = """
import sys, threading
from asyncengine.integrations.cli import main

def draw():
    while True:
        sys.stderr.write("\\x1b[?25l")
        sys.stderr.flush()

threading.Thread(target=draw, daemon=True).start()
sys.exit(main._interrupted())
"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs pseudo-terminals")
@pytest.mark.parametrize("piped", [False, True], ids=["terminal", "stdout in a pipe"])
def test_who_is_interrupted_while_a_thread_draws_leaves_the_cursor_visible(piped: bool) -> None:
    """The thread draws the bar of a load, which hides the cursor and cannot be stopped."""
    import pty

    ours, child = pty.openpty()
    stdout = subprocess.DEVNULL if piped else child
    process = subprocess.Popen([sys.executable, "-c", DRAWS], stdout=stdout, stderr=child)
    os.close(child)
    shown = b""
    with contextlib.suppress(OSError):  # Linux: the terminal is closed
        while data := os.read(ours, 65536):
            shown = shown[-100:] + data
    os.close(ours)
    assert process.wait(120) == 130
    assert shown.endswith(b"\x1b[?25hinterrupted\r\n")


PRINTS = """
import sys, types
sys.modules["asyncengine.integrations.cli.generate"] = types.SimpleNamespace(run=lambda args: print("x" * {size}) or 0)
from asyncengine.integrations.cli.main import main
sys.exit(main(["generate", "demo", "hi"]))
"""


@pytest.mark.skipif(not FULL.exists(), reason="needs /dev/full")
@pytest.mark.parametrize(("size", "shell", "code", "shown"), ROWS["the_way_out_of_a_real_process"])
def test_the_way_out_of_a_real_process(size: int, shell: str, code: int, shown: str) -> None:
    """The interpreter flushes once more at its end, and would say so. What is short fails there."""
    command = ["bash", "-c", shell, "bash", sys.executable, "-c", PRINTS.format(size=size)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stderr) == (code, shown)


@pytest.mark.skipif(sys.platform == "win32", reason="closes them as a shell does")
def test_what_is_opened_later_never_has_the_number_of_a_closed_stream() -> None:
    """An output file would otherwise get what libraries print to number 2."""
    opens = (
        "import os, sys; from asyncengine.integrations.cli.text import prepare_streams; prepare_streams(); "
        "print(os.open(os.devnull, os.O_RDONLY), sys.stdin.fileno(), sys.stderr.fileno(), sys.stderr.isatty())"
    )
    command = ["bash", "-c", '"$@" <&- 2>&-', "bash", sys.executable, "-c", opens]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=300, check=True)
    assert done.stdout.split() == ["3", "0", "2", "False"]
