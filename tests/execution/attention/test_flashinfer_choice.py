"""The backend that an engine gets, and what it says when it cannot have the one that was asked for."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.fake_flashinfer import FakeFlashInfer, FakeMemory
from support.reachable import tensors_in

from asyncengine.config import EngineConfig
from asyncengine.errors import InvalidParameter
from asyncengine.execution.attention import factory
from asyncengine.execution.attention.base import AttentionBackend, LayerSpec
from asyncengine.execution.attention.flashinfer import FlashInferBackend

LAYERS = [LayerSpec(index, 8, 4, 64, 64, 0.125) for index in range(2)]
CPU = torch.device("cpu")
CUDA = torch.device("cuda")


class Machine:
    """A machine that looks as if it had a GPU and FlashInfer; each part can be taken away."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.fake = FakeFlashInfer(FakeMemory())
        self.monkeypatch = monkeypatch
        self.made: list[FlashInferBackend] = []
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
        monkeypatch.setattr(factory.importlib.util, "find_spec", lambda name: object())
        monkeypatch.setattr(factory, "load_flashinfer", lambda: self.fake)
        monkeypatch.setattr(factory, "FlashInferBackend", self._flashinfer)
        monkeypatch.setattr(factory, "TorchPagedBackend", self._torch)

    def _flashinfer(self, layers: Any, pages: int, page_size: int, dtype: Any, device: Any, **more: Any) -> Any:
        self.options = more
        self.made.append(FlashInferBackend(layers, pages, page_size, dtype, CPU, memory=self.fake.memory, **more))
        return self.made[-1]

    def _torch(self, *args: Any) -> Any:
        return SimpleNamespace(name="torch", args=args)

    def make(self, layers: Any = None, dtype: torch.dtype = torch.bfloat16, **fields: Any) -> AttentionBackend:
        config = EngineConfig(max_num_seqs=4, **fields)
        return factory.make_backend(config, layers or LAYERS, 50, dtype, CUDA, 100)

    def without_gpu(self) -> None:
        self.monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def old_gpu(self) -> None:
        self.monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))

    def without_package(self) -> None:
        self.monkeypatch.setattr(factory.importlib.util, "find_spec", lambda name: None)

    def failing_import(self) -> None:
        def load() -> Any:
            raise PermissionError("/root/.cache/flashinfer")

        self.monkeypatch.setattr(factory, "load_flashinfer", load)

    def failing_kernels(self) -> None:
        def append(*args: Any, **kwargs: Any) -> None:
            raise RuntimeError("Could not find nvcc")

        self.monkeypatch.setattr(self.fake, "append_paged_kv_cache", append)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


def test_auto_takes_flashinfer_where_it_runs(machine: Machine) -> None:
    for choice in ("auto", "flashinfer"):
        machine.fake.calls.clear()
        backend = machine.make(attention_backend=choice)
        assert backend.name == "flashinfer"
        assert machine.fake.calls["decode"] == 1, "warmed up"
        assert machine.options["max_pages_per_row"] == 8, "100 tokens in pages of 16, and one more"
        assert machine.options["max_rows"] == 4
    assert machine.make(attention_backend="torch").name == "torch"


REASONS = {
    "without_gpu": "needs an NVIDIA GPU",
    "old_gpu": "older than compute capability 8.0",
    "without_package": r"pip install 'asyncengine\[cuda\]'",
    "failing_import": "importing flashinfer failed: PermissionError",
    "failing_kernels": "its kernels do not run: RuntimeError: Could not find nvcc",
}


@pytest.mark.parametrize("trouble", REASONS)
def test_otherwise_torch_with_a_word_or_an_error(
    trouble: str, machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    getattr(machine, trouble)()
    with caplog.at_level(logging.WARNING, "asyncengine"):
        assert machine.make().name == "torch"
    assert len(caplog.records) == 1
    assert "slower torch backend" in caplog.records[0].getMessage()
    with pytest.raises(InvalidParameter, match=REASONS[trouble]) as caught:
        machine.make(attention_backend="flashinfer")
    assert caught.value.field == "attention_backend"
    with pytest.raises(InvalidParameter, match=REASONS[trouble]) as caught:
        machine.make(kv_cache_dtype="fp8")
    assert caught.value.field == "kv_cache_dtype"
    for backend in machine.made:
        assert not any(kept.numel() for kept in tensors_in(backend)), "freed before the other pool is taken"
