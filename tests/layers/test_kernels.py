"""FlashInfer's kernels, from a fake module: where they are offered, how they are handed tensors, what they give."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from support.fake_flashinfer import FakeFlashInfer, FakeMemory
from support.layer_options import CPU
from torch.nn import functional

from asyncengine.layers import kernels as kernels_module
from asyncengine.layers.kernels import ACTIVATIONS, FlashInferKernels, layer_kernels
from asyncengine.layers.rotary import Angles, rotate


class Watched(FakeFlashInfer):
    """Remembers what its norms were given."""

    def __init__(self) -> None:
        super().__init__(FakeMemory())
        self.inputs: list[torch.Tensor] = []

    def rmsnorm(self, input: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
        self.inputs.append(input)
        return super().rmsnorm(input, *arguments, **options)


def broken(*_: Any) -> Any:
    raise FileNotFoundError("nvcc")


@pytest.mark.parametrize(("offset", "name"), [(0.0, "rmsnorm"), (1.0, "gemma_rmsnorm")])
def test_norms(offset: float, name: str) -> None:
    fake, weight, x = FakeFlashInfer(FakeMemory()), torch.rand(64), torch.randn(5, 64)
    found = FlashInferKernels(fake).rms_norm(x, weight, 1e-6, offset)
    torch.testing.assert_close(found, functional.rms_norm(x, (64,), offset + weight, 1e-6))
    assert fake.calls == {name: 1}
    total, normed = FlashInferKernels(fake).add_rms_norm(x, x, 0.5, weight, 1e-6, offset)
    torch.testing.assert_close(total, 1.5 * x)
    torch.testing.assert_close(normed, functional.rms_norm(1.5 * x, (64,), offset + weight, 1e-6))


def test_another_offset_has_no_kernel() -> None:
    fake, x = FakeFlashInfer(FakeMemory()), torch.randn(5, 64)
    found = FlashInferKernels(fake).rms_norm(x, torch.ones(64), 1e-6, 0.5)
    torch.testing.assert_close(found, functional.rms_norm(x, (64,), None, 1e-6) * 1.5)
    assert not fake.calls


def test_heads_of_a_merged_projection_are_normed_where_they_are() -> None:
    """[tokens, heads, dim], a part of wider rows. As two dimensions it would have to be copied."""
    fake, weight = Watched(), torch.rand(64) + 0.5
    merged = torch.randn(5, 12 * 64)
    heads = merged[:, : 4 * 64].view(5, 4, 64)
    found = FlashInferKernels(fake).rms_norm(heads, weight, 1e-6)
    assert found.shape == heads.shape
    torch.testing.assert_close(found, functional.rms_norm(heads, (64,), weight, 1e-6))
    (given,) = fake.inputs
    assert given.data_ptr() == merged.data_ptr()
    assert given.shape == (5, 4, 64)


def test_gates() -> None:
    fake = FakeFlashInfer(FakeMemory())
    x = torch.randn(5, 128)
    served = {name: FlashInferKernels(fake).gated(name) for name in ACTIVATIONS}
    assert [name for name, kernel in served.items() if kernel is not None] == ["silu", "gelu", "gelu_tanh"]
    for name, kernel in served.items():
        if kernel is not None:
            torch.testing.assert_close(kernel(x), ACTIVATIONS[name](x[:, :64]) * x[:, 64:])


def test_rotation_converts_a_table_once_for_all_layers() -> None:
    """And anew for the next step's, also where its memory is used again."""
    kernels = FlashInferKernels(FakeFlashInfer(FakeMemory()))
    query, key = torch.randn(3, 4, 64), torch.randn(3, 2, 64)
    seen = set()
    for angle in (0.0, math.pi / 2, math.pi):
        table = torch.full((3, 64), angle)
        angles = Angles(table.cos(), table.sin(), "halves")
        for _ in range(2):
            found = kernels.rotate(query, key, angles.cos, angles.sin)
            assert found is not None
            for rotated, own in zip(found, (query, key), strict=True):
                torch.testing.assert_close(rotated, rotate(own, angles), rtol=1e-5, atol=1e-5)
            seen.add(kernels._table.data_ptr())
        assert len(seen) <= 3
        del angles
    tables = []
    cos, sin = torch.ones(3, 64), torch.zeros(3, 64)
    for _ in range(4):
        kernels.rotate(query, key, cos, sin)
        tables.append(kernels._table)
    assert all(each is tables[0] for each in tables)


@pytest.mark.parametrize(("dim", "rotary"), [(12, 12), (64, 32)])
def test_heads_without_a_kernel_are_left_to_torch(dim: int, rotary: int) -> None:
    fake = FakeFlashInfer(FakeMemory())
    query, cos = torch.randn(3, 4, dim), torch.ones(3, rotary)
    assert FlashInferKernels(fake).rotate(query, query, cos, cos) is None
    assert not fake.calls


def test_where_they_are_offered(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    cuda = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(kernels_module.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(kernels_module, "load_flashinfer", lambda: FakeFlashInfer(FakeMemory()))
    assert layer_kernels("auto", torch.bfloat16, cuda).name == "flashinfer"
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
