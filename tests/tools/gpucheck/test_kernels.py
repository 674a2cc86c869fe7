"""The comparison of kernels passes what is right and finds what is wrong. Beneath: fake kernels, or torch."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.fake_flashinfer import FakeFlashInfer, FakeMemory
from support.fake_gpu import Again

from asyncengine.execution.attention.base import AttentionBackend
from asyncengine.execution.attention.flashinfer import FlashInferBackend
from asyncengine.execution.attention.torch_paged import TorchPagedBackend
from tools.gpucheck import kernels
from tools.gpucheck.kernels import Case, cases, check_case
from tools.gpucheck.report import CheckFailed
from tools.gpucheck.session import Session, Settings

CPU = torch.device("cpu")
CASES = {case.name: case for case in cases()}


def fake(case: Case, kind: type[FlashInferBackend] = FlashInferBackend, **changes: Any) -> FlashInferBackend:
    memory = FakeMemory()
    options: dict[str, Any] = {"max_rows": 64, "max_pages_per_row": 400, "kv_dtype": case.stored, **changes}
    pages = 1 + 6 * -(-400 // case.page_size)
    return kind(
        case.layers, pages, case.page_size, case.dtype, CPU, flashinfer=FakeFlashInfer(memory), memory=memory, **options
    )  # fmt: skip


def on_torch(case: Case) -> AttentionBackend:
    return TorchPagedBackend(case.layers, 1 + 6 * -(-400 // case.page_size), case.page_size, case.dtype, CPU)


def check(case: Case, make: Callable[[Case], AttentionBackend] = fake, capture: Any = lambda: Again) -> str:
    return check_case(case, make, CPU, 3, capture)


@pytest.mark.parametrize("name", ["group of 7, 64 dimensions", "window and soft cap beside soft cap", "float16"])
def test_right_kernels_pass(name: str) -> None:
    assert "tolerance" in check(CASES[name])


def test_right_kernels_pass_with_small_pages_and_eight_bits() -> None:
    check(replace(CASES["8-bit keys and values"], page_size=5))


def test_the_torch_backend_passes_without_graphs() -> None:
    assert "largest error" in check(CASES["window"], on_torch, None)


@pytest.mark.parametrize("change", [{"scale": 0.11}, {"window": 31}, {"softcap": 5.0}])
def test_a_layer_computed_with_other_numbers_fails(change: dict[str, Any]) -> None:
    case = CASES["group of 2, 64 dimensions"]
    wrong = (replace(case.layers[0], **change),)
    with pytest.raises(CheckFailed, match="from the torch backend in prompts"):
        check(case, lambda asked: on_torch(replace(asked, layers=wrong)), None)


class Mixing(FlashInferBackend):
    """Wrong in one kind of step each."""

    def attend(self, layer: int, query: torch.Tensor) -> torch.Tensor:
        found = super().attend(layer, query)
        if self._wrong(query):
            found = found.clone()
            found[0] = found[-1] if len(found) > 1 else -found[0]
        return found

    def _wrong(self, query: torch.Tensor) -> bool:
        return False


class WrongPrompts(Mixing):
    def _wrong(self, query: torch.Tensor) -> bool:
        return self._wrappers is self._prefill


class WrongDecodes(Mixing):
    def _wrong(self, query: torch.Tensor) -> bool:
        return self._wrappers is self._decode


class WrongGraphs(Mixing):
    def _wrong(self, query: torch.Tensor) -> bool:
        return self._wrappers not in (self._decode, self._prefill)


class WildPadding(FlashInferBackend):
    def attend(self, layer: int, query: torch.Tensor) -> torch.Tensor:
        found = super().attend(layer, query).clone()
        if self._wrappers not in (self._decode, self._prefill):
            found[-1] = float("nan")
        return found


@pytest.mark.parametrize(
    ("kind", "told"),
    [(WrongPrompts, "prompts"), (WrongDecodes, "decodes"), (WrongGraphs, "graphs"), (WildPadding, "not finite")],
)
def test_each_path_is_looked_at(kind: type[FlashInferBackend], told: str) -> None:
    with pytest.raises(CheckFailed, match=told) as caught:
        check(CASES["group of 2, 64 dimensions"], lambda case: fake(case, kind))
    others = {"prompts", "decodes", "graphs"} - {told}
    assert not any(f"{other} by" in str(caught.value) for other in others)


def test_compiling_goes_on_in_the_background(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its section waits as long as it has time, that of the kernels too, and tells what failed."""
    go = threading.Event()

    def slow() -> None:
        assert go.wait(30)

    def broken() -> None:
        raise RuntimeError("no nvcc")

    for name, value in (("flashinfer_missing", lambda: None), ("load_flashinfer", lambda: None)):
        monkeypatch.setattr(kernels, name, value)
    monkeypatch.setattr(kernels, "modules", lambda *_: [slow, slow])
    clock = [0.0]
    session = Session(Settings("cpu", seconds=60.0), tmp_path, (said := []).append, lambda: clock[0])
    clock[0] = 60.0
    kernels.run_compile(session)
    assert len(session.compiling) == 2
    with pytest.raises(CheckFailed, match="0 failed, 2 not built yet"):
        kernels.compiled(session)
    clock[0] = 0.0
    go.set()
    assert kernels.compiled(session) == "2 modules"
    assert sum("built a module" in line for line in said) == 2
    monkeypatch.setattr(kernels, "modules", lambda *_: [broken, slow])
    kernels.run_compile(session)
    with pytest.raises(CheckFailed, match=r"1 failed, 0 not built yet, of 2; .*no nvcc"):
        kernels.compiled(session)
