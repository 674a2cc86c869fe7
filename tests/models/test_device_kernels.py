"""How FlashInfer's kernels are handed tensors: without a copy where theirs would do."""

from __future__ import annotations

from typing import Any

import torch
from support.fake_flashinfer import FakeFlashInfer, FakeMemory

from asyncengine.models.kernels import DeviceKernels


class Watched(FakeFlashInfer):
    """Remembers what its norm was given."""

    def __init__(self) -> None:
        super().__init__(FakeMemory())
        self.inputs: list[torch.Tensor] = []

    def rmsnorm(self, input: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
        self.inputs.append(input)
        return super().rmsnorm(input, *arguments, **options)


def test_heads_of_a_merged_projection_are_normed_where_they_are() -> None:
    """[1, tokens, heads, dim], a part of wider rows. As two dimensions it would have to be copied."""
    fake, weight = Watched(), torch.rand(64) + 0.5
    merged = torch.randn(1, 5, 12 * 64)
    heads = merged[..., : 4 * 64].view(1, 5, 4, 64)
    found = DeviceKernels(fake).rms_norm(heads, weight, 1e-6)
    assert found.shape == heads.shape
    assert torch.allclose(found, torch.nn.functional.rms_norm(heads, (64,), weight, 1e-6), atol=1e-5)
    (given,) = fake.inputs
    assert given.data_ptr() == merged.data_ptr()
    assert given.shape == (5, 4, 64)


def test_rows_of_a_layer_are_two_dimensions() -> None:
    fake, x = Watched(), torch.randn(1, 5, 128)
    found = DeviceKernels(fake).rms_norm(x, torch.ones(128), 1e-6)
    assert found.shape == x.shape
    assert fake.inputs[0].shape == (5, 128)
    assert fake.inputs[0].data_ptr() == x.data_ptr()


def test_several_sequences_are_rows_too() -> None:
    x = torch.randn(2, 5, 4, 64)
    found = DeviceKernels(Watched()).rms_norm(x, torch.ones(64), 1e-6)
    assert torch.allclose(found, torch.nn.functional.rms_norm(x, (64,), None, 1e-6), atol=1e-5)
