"""Operations watched one by one: counted, one that runs out of memory, or any that would wait for a device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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


_NO_KERNEL = {
    "view", "_unsafe_view", "unsafe_view", "_reshape_alias", "slice", "select", "split", "split_with_sizes", "t",
    "transpose", "unbind", "unsqueeze", "expand", "detach", "alias", "empty", "empty_like", "new_empty", "as_strided",
    "permute", "lift_fresh", "resolve_conj", "resolve_neg",
}  # fmt: skip
"""Operators of torch that launch nothing."""


class Launches(TorchDispatchMode):
    """Counts what would be launched on a GPU: torch's operators, Triton's kernels and FlashInfer's."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.inside = 0
        self.only_counts = False
        """Triton's kernels are not run: for tests of how many there are."""

    def __torch_dispatch__(self, operator: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        name, made = operator.overloadpacket.__name__, operator(*arguments, **(options or {}))
        same = name in ("to", "reshape") and made.data_ptr() == arguments[0].data_ptr()
        if not self.inside and name not in _NO_KERNEL and not same:
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

    def without(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, of which nothing is counted."""

        def run(*arguments: Any, **options: Any) -> Any:
            self.inside += 1
            try:
                return function(*arguments, **options)
            finally:
                self.inside -= 1

        return run
