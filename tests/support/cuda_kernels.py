"""Models with the kernels of a GPU on host tensors: Triton's in its interpreter, FlashInfer's from the stand-in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from support.fake_flashinfer import FakeFlashInfer, FakeMemory, Wrapper
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import InterpretedFunction

from asyncengine.attention import flashinfer
from asyncengine.layers import kernels, options, rotary, weight_forms
from asyncengine.layers.kernels import CudaKernels
from asyncengine.models import loading

CPU = torch.device("cpu")
_NO_KERNEL = {
    "view", "_unsafe_view", "unsafe_view", "_reshape_alias", "slice", "select", "split", "split_with_sizes", "t",
    "transpose", "unsqueeze", "expand", "detach", "alias", "empty", "empty_like", "new_empty", "as_strided", "permute",
    "lift_fresh", "resolve_conj", "resolve_neg",
}  # fmt: skip
"""Operators of torch that launch nothing."""


class Launches(TorchDispatchMode):
    """Counts what would be launched on a GPU: torch's operators, Triton's kernels and FlashInfer's."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.inside = 0

    def __torch_dispatch__(self, operator: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        name, made = operator.overloadpacket.__name__, operator(*arguments, **(options or {}))
        if not self.inside and name not in _NO_KERNEL and not (name == "to" and made is arguments[0]):
            self.calls[name] += 1
        return made

    @contextmanager
    def kernel(self, name: str) -> Iterator[None]:
        """One launch; what its stand-in does is not counted."""
        self.calls[name] += not self.inside
        self.inside += 1
        try:
            yield
        finally:
            self.inside -= 1


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
    for module in (flashinfer, kernels, rotary, weight_forms):
        monkeypatch.setattr(module, "triton_missing", lambda device: None)
    for module in (options, rotary):
        monkeypatch.setattr(module, "compiler_missing", lambda *_: "as on a GPU")
    monkeypatch.setattr(options, "can_reorder", lambda *_: False)
    monkeypatch.setattr(loading, "layer_kernels", lambda *_: CudaKernels(fake, CPU))
    counted = (InterpretedFunction, "run", lambda self, *_: self.fn.__name__), (Wrapper, "launch", lambda _, name: name)
    for owner, method, name_of in counted:
        monkeypatch.setattr(owner, method, _counted(getattr(owner, method), name_of, fake.launches))
    return fake


def _counted(method: Callable[..., Any], name_of: Callable[..., str], launches: Launches) -> Callable[..., Any]:
    def run(self: Any, *arguments: Any, **options: Any) -> Any:
        with launches.kernel(name_of(self, *arguments[:1])):
            return method(self, *arguments, **options)

    return run
