"""Running out of memory ends one request; an engine where it ends more is found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from asyncengine.execution.models.memory import caches
from asyncengine.execution.runner import building, model_runner, parts
from asyncengine.step import FinishedStep, StepResult
from tools.gpucheck import memory
from tools.gpucheck.families import families, make_checkpoint
from tools.gpucheck.report import CheckFailed
from tools.gpucheck.session import Session, Settings

CPU = Settings("cpu", "torch", quick=True, seed=4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(families()[0].make(True), tmp_path_factory.mktemp("memory") / "model", torch.bfloat16, 4)


def test_a_sound_engine_passes(tmp_path: Path) -> None:
    session = Session(CPU, tmp_path)
    memory.run(session)
    assert [(check.name, check.status) for check in session.report.checks] == [
        ("more KV memory than there is", "pass"), ("a step that does not fit", "pass"),
    ]  # fmt: skip
    assert "5 others went on" in session.report.checks[1].detail


@pytest.mark.filterwarnings("ignore")
async def test_an_engine_that_dies_of_it_is_found(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "is_out_of_memory", lambda _: False)
    with pytest.raises(CheckFailed, match="ended with EngineDead"):
        await memory.step_too_large(CPU, folder)


async def test_others_that_end_with_it_are_found(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A runner that gives up a whole step instead of halving it."""
    launch = model_runner.ModelRunner.launch

    def all_or_nothing(self: Any, batch: Any) -> Any:
        rows = len(batch.rows)
        if rows > 1 and any(row.tokens[0] == memory.MARK for row in batch.rows):
            errors = dict.fromkeys(range(rows), "no memory")
            return FinishedStep(StepResult(batch.step, [-1] * rows, errors=errors))
        return launch(self, batch)

    monkeypatch.setattr(model_runner.ModelRunner, "launch", all_or_nothing)
    with pytest.raises(CheckFailed, match="others ended with it"):
        await memory.step_too_large(CPU, folder)


async def test_kv_memory_that_is_granted_for_nothing_is_found(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(building, "free_bytes", lambda _: 2**62)
    monkeypatch.setattr(caches, "num_pages_for", lambda *_: 64)
    with pytest.raises(CheckFailed, match="were granted"):
        await memory.too_much_kv(CPU, folder)
