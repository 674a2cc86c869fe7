"""A program on a pseudo-terminal, driven by what it prints: no pauses, only deadlines."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from types import TracebackType
from typing import Self

CTRL_C, CTRL_D = "\x03", "\x04"
PATIENCE = 120.0
"""Seconds for anything to appear, on a busy machine. Only a failing test waits that long."""


def _take_terminal() -> None:
    """Takes the terminal in the child. Tests may run in the background, where shells have Ctrl-C ignored for good."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


class Terminal:
    """`asyncengine ARGUMENTS` with a controlling terminal of its own, so that Ctrl-C is a real one."""

    def __init__(self, *arguments: str, start: tuple[str, ...] = ("-m", "asyncengine")) -> None:
        self._fd, child = pty.openpty()
        fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 110, 0, 0))
        environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "", "NO_COLOR": ""}
        self.process = subprocess.Popen(
            [sys.executable, *start, *arguments],
            stdin=child,
            stdout=child,
            stderr=child,
            env={name: value for name, value in environment.items() if value},
            start_new_session=True,
            preexec_fn=_take_terminal,  # noqa: PLW1509  # no thread holds a lock here
        )
        os.close(child)
        self.output = ""
        self._seen = 0

    def expect(self, text: str) -> str:
        """Wait until `text` appears after what was expected before; everything up to its end."""
        deadline = time.monotonic() + PATIENCE
        while (at := self.output.find(text, self._seen)) < 0:
            assert self._read(deadline), f"the program ended before it printed {text!r}:\n{self.output}"
        begin, self._seen = self._seen, at + len(text)
        return self.output[begin : self._seen]

    def send(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def interrupt_prompt(self, text: str) -> None:
        """Ctrl-C at a prompt, and again if `text` does not follow.

        CPython's readline does not notice a signal that comes between the prompt and the wait for a key; it stays
        pending, so that the next Ctrl-C raises one KeyboardInterrupt for both.
        """
        for _ in range(int(PATIENCE / 10)):
            self.send(CTRL_C)
            deadline = time.monotonic() + 10
            while self.output.find(text, self._seen) < 0 and time.monotonic() < deadline:
                if select.select([self._fd], [], [], 0.1)[0]:
                    self._read(deadline)
            if self.output.find(text, self._seen) >= 0:
                break
        self.expect(text)

    def end(self) -> int:
        """Reads to the end of the output, and returns the exit code."""
        deadline = time.monotonic() + PATIENCE
        while self._read(deadline):
            pass
        return self.process.wait(PATIENCE)

    def _read(self, deadline: float) -> bool:
        """More output, if there is any before the program ends."""
        ready, _, _ = select.select([self._fd], [], [], max(0.0, deadline - time.monotonic()))
        assert ready, f"not within {PATIENCE:.0f} s:\n{self.output}"
        try:
            data = os.read(self._fd, 65536)
        except OSError:  # Linux: the last process has closed the terminal
            return False
        self.output += data.decode(errors="replace")
        return bool(data)

    def assert_clean(self) -> None:
        """No traceback, the cursor is visible, and nobody of the program's session is left."""
        assert "Traceback" not in self.output, self.output
        assert self.output.rfind("\x1b[?25l") <= self.output.rfind("\x1b[?25h"), "the cursor was left hidden"
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:  # those that it started end when they hear of its end
            try:
                os.killpg(self.process.pid, 0)
            except ProcessLookupError:
                return
            time.sleep(0.01)
        raise AssertionError("a process of the program is still there")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self._fd)
