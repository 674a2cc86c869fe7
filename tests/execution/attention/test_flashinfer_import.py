"""FlashInfer runs `ninja`, which lies beside this Python's program: it must be found whoever started that."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import ModuleType

import pytest

from asyncengine.execution.attention import flashinfer as backend

FOUND = ModuleType("flashinfer")


@pytest.fixture
def scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """This Python's folder of programs, empty. Nothing is on the path."""
    folder = tmp_path / "scripts"
    folder.mkdir()
    monkeypatch.setattr(backend.sysconfig, "get_path", lambda name: str(folder) if name == "scripts" else None)
    monkeypatch.setenv("PATH", str(tmp_path / "elsewhere"))
    monkeypatch.setitem(sys.modules, "flashinfer", FOUND)
    return folder


def program(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "ninja").write_text("#!/bin/sh\n")
    (folder / "ninja").chmod(0o755)


def test_ninja_of_this_python_is_found(scripts: Path, tmp_path: Path) -> None:
    program(scripts)
    for _ in range(2):
        assert backend.load_flashinfer() is FOUND
    assert os.environ["PATH"] == f"{tmp_path / 'elsewhere'}{os.pathsep}{scripts}", "at the end, and once"
