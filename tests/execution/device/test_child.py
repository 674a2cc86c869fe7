"""The end of a process of ours: in silence where its parent is gone, with its last words otherwise."""

from __future__ import annotations

import os
import socket
from typing import NoReturn

import pytest

from asyncengine.execution.device import child

GONE = BaseExceptionGroup("tasks", [ExceptionGroup("one", [BrokenPipeError()]), ValueError("of the same moment")])


def _said(ours: socket.socket) -> bytes:
    try:
        return ours.recv(9999)
    except BlockingIOError:
        return b""


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (EOFError(), 0, ""),
        (GONE, 0, ""),
        (ValueError("a reason"), 1, "ValueError('a reason')\nTraceback"),
        (ExceptionGroup("tasks", [ValueError("a reason")]), 1, "ExceptionGroup('tasks', [ValueError('a reason')])\n"),
    ],
)
def test_last_words(error: BaseException, code: int, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def exit_(status: int) -> NoReturn:
        raise SystemExit(status)

    def work() -> None:
        raise error

    monkeypatch.setattr(os, "_exit", exit_)
    monkeypatch.setattr(child, "_end_with", lambda *_: None)
    ours, theirs = socket.socketpair()
    with ours:
        with pytest.raises(SystemExit) as ended:
            child.run(work, os.getpid(), theirs.detach())
        assert ended.value.code == code
        ours.setblocking(False)
        said = _said(ours).decode()
        assert said.startswith(words) if words else not said
