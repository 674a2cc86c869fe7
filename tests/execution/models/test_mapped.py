"""Pages of weight files are given back part by part, and read again if anybody asks."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from asyncengine.execution.models.mapped import MappedFiles, OpenFiles, own_weights

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads what a process has mapped")
ROWS, WIDTH = 1024, 1024
FILE = "model.safetensors"


@pytest.fixture
def weight(tmp_path: Path) -> torch.Tensor:
    """float32 [ROWS, WIDTH] that lives in a mapped file: every number says its place."""
    file = tmp_path / FILE
    save_file({"weight": torch.arange(ROWS * WIDTH, dtype=torch.float32).view(ROWS, WIDTH)}, file)
    with safe_open(file, framework="pt") as tensors:  # type: ignore[no-untyped-call]
        found: torch.Tensor = tensors.get_tensor("weight")
    return found


def resident_kib(tensor: torch.Tensor) -> int:
    """KiB of the file under `tensor` that count as this process's memory."""
    inside = False
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        if "-" in line.split(maxsplit=1)[0]:
            begin, end = (int(bound, 16) for bound in line.split(maxsplit=1)[0].split("-"))
            inside = begin <= tensor.data_ptr() < end
        elif inside and line.startswith("Rss:"):
            return int(line.split()[1])
    raise AssertionError


def test_parts_are_given_back_and_read_again(weight: torch.Tensor, tmp_path: Path) -> None:
    files = MappedFiles([tmp_path / FILE])
    assert files.holds(weight)
    total = float(weight.double().sum())
    whole = resident_kib(weight)
    assert whole >= ROWS * WIDTH * 4 // 1024
    for part in weight.split(ROWS // 4)[:3]:
        before = resident_kib(weight)
        files.release(part)
        assert before - resident_kib(weight) >= part.nbytes // 1024 - 8  # whole pages only
    assert float(weight.double().sum()) == total
    files.release(weight)
    assert resident_kib(weight) <= 8
    assert float(weight.double().sum()) == total


def test_what_is_not_a_files_own_stays(weight: torch.Tensor, tmp_path: Path) -> None:
    files = MappedFiles([tmp_path / FILE])
    other = torch.ones(ROWS, WIDTH)
    before = resident_kib(weight) if float(weight.sum()) else 0
    files.release(other)
    files.release(weight[:, : WIDTH // 2])  # rows of others lie between
    assert bool((other == 1).all())
    assert resident_kib(weight) == before


def test_owned_weights_leave_the_file(weight: torch.Tensor, tmp_path: Path) -> None:
    layer, expected = torch.nn.Linear(WIDTH, ROWS, bias=False), weight.clone()
    layer.weight = torch.nn.Parameter(weight, requires_grad=False)
    files = MappedFiles([tmp_path / FILE])
    own_weights(layer, files)
    assert not files.holds(layer.weight.data)
    assert torch.equal(layer.weight, expected)


def test_a_file_behind_a_link_is_known_by_its_path(tmp_path: Path) -> None:
    """A hub's cache has such links, to files whose names say nothing."""
    save_file({"weight": torch.arange(ROWS * WIDTH, dtype=torch.float32)}, tmp_path / "a1b2")
    link = tmp_path / FILE
    link.symlink_to(tmp_path / "a1b2")
    opened = OpenFiles()
    weight = opened.read(link, "weight")
    assert float(weight[-1]) == ROWS * WIDTH - 1
    assert MappedFiles([link]).holds(weight)
    before = resident_kib(weight) if float(weight.sum()) else 0
    opened.release(weight)
    assert resident_kib(weight) < before // 10
