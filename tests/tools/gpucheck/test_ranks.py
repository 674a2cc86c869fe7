"""The checks of a model over two GPUs, on two processes of a CPU; where there is one GPU, they are skipped by name."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

from asyncengine.device import collective_gather
from asyncengine.engine import rank_wiring
from tools.gpucheck import ranks
from tools.gpucheck.families import Family, families
from tools.gpucheck.greedy import check_family
from tools.gpucheck.session import Section, Session, Settings

LLAMA: Family = next(family for family in families() if family.name == "llama")


def test_one_gpu_is_too_few(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    report = Session(Settings("cuda:0"), tmp_path).run([Section("ranks", "a model over two GPUs", 9, ranks.run)])
    assert [(check.status, check.detail[:12]) for check in report.checks] == [("skip", "needs 2 GPUs")]


@pytest.mark.skipif(collective_gather.missing("gloo") is not None, reason=str(collective_gather.missing("gloo")))
def test_two_processes_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_wiring, "_ON_CPU", "gloo")
    session = Session(Settings("cpu", "torch", quick=True, seed=5), tmp_path)
    found = asyncio.run(check_family(session, LLAMA, "float32", 4, tensor_parallel=2))
    assert found.startswith("32 tokens the same")
