"""Models with the kernels of a GPU on host tensors: Triton's in its interpreter, FlashInfer's from the stand-in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.device_modes import Launches
from support.fake_flashinfer import FakeFlashInfer, FakeMemory, Wrapper
from triton.runtime.interpreter import InterpretedFunction

from asyncengine.attention import flashinfer
from asyncengine.layers import kernels, options, rotary, weight_forms
from asyncengine.layers.kernels import CudaKernels
from asyncengine.lora.layers import slots
from asyncengine.models import loading

CPU = torch.device("cpu")


class CountedFlashInfer(FakeFlashInfer):
    """The stand-in, each of whose kernels counts as one launch."""

    def __init__(self, launches: Launches) -> None:
        super().__init__(FakeMemory())
        self.launches = launches

    def silu_and_mul(self, input: torch.Tensor) -> torch.Tensor:
        with self.launches.kernel("silu_and_mul"):
            return super().silu_and_mul(input)

    def gelu_tanh_and_mul(self, input: torch.Tensor) -> torch.Tensor:
        with self.launches.kernel("gelu_tanh_and_mul"):
            return super().gelu_tanh_and_mul(input)


def use_cuda_kernels(monkeypatch: pytest.MonkeyPatch) -> CountedFlashInfer:
    """Models loaded and FlashInfer backends made from now on have them; `launches` of the result count."""
    fake = CountedFlashInfer(Launches())
    for module in (flashinfer, kernels, rotary, weight_forms, slots):
        monkeypatch.setattr(module, "triton_missing", lambda device: None)
    for module in (options, rotary):
        monkeypatch.setattr(module, "compiler_missing", lambda *_: "as on a GPU")
    monkeypatch.setattr(loading, "layer_kernels", lambda *_: CudaKernels(fake, CPU))
    counted = (InterpretedFunction, "run", lambda self, *_: self.fn.__name__), (Wrapper, "launch", lambda _, name: name)
    for owner, method, name_of in counted:
        monkeypatch.setattr(owner, method, _counted(getattr(owner, method), name_of, fake.launches))
    return fake


def _counted(method: Callable[..., Any], name_of: Callable[..., str], launches: Launches) -> Callable[..., Any]:
    def run(self: Any, *arguments: Any, **options: Any) -> Any:
        with launches.kernel(name_of(self, *arguments[:1])):
            if launches.only_counts and isinstance(self, InterpretedFunction):
                return None
            return method(self, *arguments, **options)

    return run
