"""Operations watched one by one: counted, one that runs out of memory, or any that would wait for a device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

DEVICE = torch.device("meta")
"""A stand-in for the accelerator: it is not the host, and it computes nothing."""


class FailOnce(TorchDispatchMode):
    """Raises in the operation number `at` that runs while it is on; 0: only counts."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at, self.seen = at, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen += 1
        if self.seen == self.at:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return func(*args, **(kwargs or {}))


class NoWaiting(TorchDispatchMode):
    """Raises where the host would wait for `DEVICE`: reading from it, or copying to it from memory not pinned."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.copies = 0
        self._pinned: dict[int, torch.Tensor] = {}

        def pin(tensor: torch.Tensor) -> torch.Tensor:
            made = tensor.clone()
            self._pinned[made.untyped_storage().data_ptr()] = made
            return made

        monkeypatch.setattr(torch.Tensor, "pin_memory", pin)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = str(func)
        if name.startswith("aten._to_copy") and kwargs.get("device") is not None:
            self._check(args[0], torch.device(kwargs["device"]), bool(kwargs.get("non_blocking")))
        elif name.startswith("aten.copy_"):
            self._check(args[1], args[0].device, bool(kwargs.get("non_blocking") or (len(args) > 2 and args[2])))
        elif args and isinstance(args[0], torch.Tensor) and args[0].device == DEVICE:
            assert "_local_scalar_dense" not in name, "a value is read from the device"
            assert "nonzero" not in name, "the size of a result is read from the device"
        return func(*args, **kwargs)

    def _check(self, source: torch.Tensor, target: torch.device, non_blocking: bool) -> None:
        if source.device == target:
            return
        assert source.device != DEVICE, "a copy to the host"
        assert non_blocking, "a copy that waits"
        assert source.untyped_storage().data_ptr() in self._pinned, "a copy from memory that is not pinned"
        self.copies += 1
