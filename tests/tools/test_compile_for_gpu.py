"""The compiler's verdict on kernels, without a GPU, where the interpreter has none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

KERNELS = """
import torch
import triton
import triton.language as tl

@triton.jit
def good(x, size: tl.constexpr):
    tl.store(x + tl.arange(0, size), 1.0)

@triton.jit
def reshaped(x, count, size: tl.constexpr):
    place = count + 1
    if count > 2:
        place = tl.arange(0, size)
    tl.store(x + place, 1.0)

@triton.jit
def large(x, size: tl.constexpr):
    line = tl.arange(0, size)
    tile = tl.load(x + line[:, None] * size + line[None, :])
    tl.store(x + line[:, None] * size + line[None, :], tl.trans(tile))

def test_all():
    x = torch.zeros(64 * 64)
    good[(1,)](x, 16)
    reshaped[(1,)](x, 3, 16)
    large[(1,)](x, 64)
    assert x.sum() == -1, "nothing has run"
"""


def test_says_what_the_compiler_refuses(tmp_path: Path) -> None:
    (tmp_path / "test_own.py").write_text(KERNELS)
    root = Path(__file__).parents[2]
    command = [sys.executable, "-m", "tools.compile_for_gpu", str(tmp_path), "--shared", "3", "--noconftest"]
    done = subprocess.run(
        command,
        check=False,
        cwd=root,
        capture_output=True,
        text=True,
        env={**os.environ, "TRITON_CACHE_DIR": str(tmp_path / "own")},
    )
    assert done.returncode == 1, done.stderr
    assert "good: 1 forms" in done.stdout
    assert "refused: reshaped: " in done.stderr
    assert "refused: large: 16 KiB of shared memory of 3" in done.stderr
