"""The comparison of kernels passes what is right and finds what is wrong. Beneath: fake kernels, or torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.fake_flashinfer import FakeFlashInfer, FakeMemory

from asyncengine.attention.base import AttentionBackend
from asyncengine.attention.flashinfer import FlashInferBackend
from asyncengine.attention.torch_paged import TorchPagedBackend
from tools.gpucheck.kernels import Case, cases, check_case, compile_all
from tools.gpucheck.report import CheckFailed

CPU = torch.device("cpu")
CASES = {case.name: case for case in cases()}


class Again:
    """A captured graph without a GPU: the work is done anew."""

    def __init__(self, work: Callable[[], torch.Tensor]) -> None:
        self.work = work
        self.output = work()

    def replay(self) -> None:
        self.output = self.work()


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


def test_cases_cover_what_kernels_are_chosen_by() -> None:
    layers = [(case, spec) for case in CASES.values() for spec in case.layers]
    assert {spec.key_dim for _, spec in layers} == {64, 128, 256}
    assert {spec.num_heads // spec.num_kv_heads for _, spec in layers} >= {1, 2, 4, 7, 8}
    assert {1, 16} <= {size for case in CASES.values() for size in case.page_sizes}
    assert any(spec.window and spec.softcap for _, spec in layers)
    assert {case.dtype for case in CASES.values()} == {torch.bfloat16, torch.float16}
    assert any(case.stored == torch.float8_e4m3fn for case in CASES.values())


def test_compiling_reports_the_first_failure() -> None:
    def broken() -> None:
        raise RuntimeError("no nvcc")

    assert compile_all([lambda: None, lambda: None]) == "2 sets of kernels"
    with pytest.raises(CheckFailed, match="1 of 2: RuntimeError: no nvcc"):
        compile_all([lambda: None, broken])
