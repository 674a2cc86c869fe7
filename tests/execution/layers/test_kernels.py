"""Kernels of a GPU, those of FlashInfer from a fake module: where they are offered, and what they give."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.fake_flashinfer import FakeFlashInfer, FakeMemory
from support.layer_options import CPU
from torch.nn import functional

from asyncengine.execution.layers import kernels as kernels_module
from asyncengine.execution.layers.kernels import ACTIVATIONS, CudaKernels, layer_kernels
from asyncengine.kernels.cuda import norm


def broken(*_: Any) -> Any:
    raise FileNotFoundError("nvcc")


def test_norms_are_torchs_where_there_is_no_triton() -> None:
    kernels, weight, x = CudaKernels(FakeFlashInfer(FakeMemory()), CPU), torch.rand(64), torch.randn(5, 64).bfloat16()
    wanted = functional.rms_norm(x.float(), (64,), weight, 1e-6).bfloat16()
    assert torch.equal(kernels.rms_norm(x, weight, 1e-6), wanted)
    total, normed = kernels.add_rms_norm(x, x, 0.5, weight, 1e-6)
    torch.testing.assert_close(total, 1.5 * x)
    torch.testing.assert_close(normed, wanted)


def test_norms_are_triton_kernels_where_they_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels_module, "triton_missing", lambda device: None)
    kernels = CudaKernels(FakeFlashInfer(FakeMemory()), CPU)
    assert (kernels.rms_norm, kernels.add_rms_norm) == (norm.rms_norm, norm.add_rms_norm)


def test_gates() -> None:
    fake = FakeFlashInfer(FakeMemory())
    x = torch.randn(5, 128)
    served = {name: CudaKernels(fake, CPU).gated(name) for name in ACTIVATIONS}
    assert [name for name, kernel in served.items() if kernel is not None] == ["silu", "gelu", "gelu_tanh"]
    for name, kernel in served.items():
        if kernel is not None:
            torch.testing.assert_close(kernel(x), ACTIVATIONS[name](x[:, :64]) * x[:, 64:])


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
