"""Launches that wait are found wherever they do, and the engine goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.fake_gpu import fake_gpu
from support.long import LONG

from asyncengine.execution.runner.model_runner import ModelRunner
from tools.gpucheck.families import make_checkpoint, text_config
from tools.gpucheck.report import CheckFailed
from tools.gpucheck.session import Settings
from tools.gpucheck.waiting import KINDS, check_kind

GPU = Settings("cpu", "flashinfer", quick=True, seed=2)


class Switch:
    """A stand-in for torch's own mode."""

    def __init__(self) -> None:
        self.on = False
        self.turned = 0

    def __call__(self, on: bool) -> None:
        assert on != self.on
        self.on, self.turned = on, self.turned + 1


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(
        text_config(), tmp_path_factory.mktemp("waiting") / "m", torch.bfloat16, 1, tokenizer=True
    )  # fmt: skip


@pytest.mark.parametrize("kind", KINDS if LONG else [*KINDS][::3])
async def test_launches_that_do_not_wait_pass(kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_gpu(monkeypatch)
    switch = Switch()
    found = await check_kind(GPU, folder, kind, switch)
    assert found.endswith("launches")
    assert switch.turned == 2 * int(found.split()[0])
    assert not switch.on


async def test_one_that_waits_is_found_and_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_gpu(monkeypatch)
    switch = Switch()
    keep = ModelRunner._keep

    def then_wait(self: ModelRunner, *arguments: Any) -> None:
        if switch.on and switch.turned == 5:
            raise RuntimeError("called a synchronizing CUDA operation")
        keep(self, *arguments)

    monkeypatch.setattr(ModelRunner, "_keep", then_wait)
    with pytest.raises(CheckFailed, match=r"1 of \d+ launches wait for the device, first in model_runner.py, line"):
        await check_kind(GPU, folder, "greedy", switch)
