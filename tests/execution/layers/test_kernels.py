"""Kernels of a GPU, those of FlashInfer from a fake module: where they are offered, and what they give."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.fake_flashinfer import FakeFlashInfer, FakeMemory
from support.layer_options import CPU

from asyncengine.execution.layers import kernels as kernels_module
from asyncengine.execution.layers.kernels import layer_kernels


def broken(*_: Any) -> Any:
    raise FileNotFoundError("nvcc")


def test_where_they_are_offered(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    cuda = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(kernels_module.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(kernels_module, "load_flashinfer", lambda: FakeFlashInfer(FakeMemory()))
    assert layer_kernels("auto", torch.bfloat16, cuda).name == "cuda"
    assert layer_kernels("auto", torch.float16, CPU).name == "torch"
    assert layer_kernels("auto", torch.float32, cuda).name == "torch"
    assert layer_kernels("torch", torch.bfloat16, cuda).name == "torch"
    monkeypatch.setattr(kernels_module, "load_flashinfer", broken)
    assert layer_kernels("auto", torch.bfloat16, cuda).name == "torch"
    assert "nvcc" in caplog.text
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert layer_kernels("auto", torch.float16, cuda).name == "torch"


def test_a_compiler_that_cannot_be_imported(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(kernels_module, "compiler_missing", lambda *_: None)
    monkeypatch.setattr(kernels_module, "CompiledKernels", broken)
    assert layer_kernels("auto", torch.float32, CPU).name == "torch"
    assert "importing numba failed" in caplog.text
