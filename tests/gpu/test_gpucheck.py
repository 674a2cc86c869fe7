"""`python -m tools.gpucheck` as a user runs it, where there is a GPU."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or importlib.util.find_spec("flashinfer") is None,
    reason="needs an NVIDIA GPU and asyncengine[cuda]",
)


@pytest.mark.slow
def test_everything_passes(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    command = [sys.executable, "-m", "tools.gpucheck", "--quick", "--out", str(file)]
    run = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    report = json.loads(file.read_text(encoding="utf-8"))
    failed = [f"{check['name']}: {check['detail']}" for check in report["checks"] if check["status"] == "fail"]
    assert not failed, run.stdout
    assert run.returncode == 0
    assert report["complete"]
