"""The checks of a model over two GPUs are skipped by name where there is one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tools.gpucheck import ranks
from tools.gpucheck.session import Section, Session, Settings


def test_one_gpu_is_too_few(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    report = Session(Settings("cuda:0"), tmp_path).run([Section("ranks", "a model over two GPUs", 9, ranks.run)])
    assert [(check.status, check.detail[:12]) for check in report.checks] == [("skip", "needs 2 GPUs")]
