"""A list of the compiled kernels that a computation calls, made by running it without them.

While a `KernelList` is entered, a kernel that Python calls is noted by its name and its arguments' types, and neither
compiled nor run. So a model's layers say what they need before their weights are read: the forward runs over weights
that hold nothing, and what it computes means nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from asyncengine.kernels.cpu.compiling import Kernel, noting
from asyncengine.kernels.elsewhere import called_apart

_NEW = {torch.ops.aten.empty.memory_format, torch.ops.aten.new_empty.default, torch.ops.aten.empty_like.default}
_PRODUCTS: dict[str, Callable[..., tuple[int, ...]]] = {
    "aten::mm": lambda x, y: (x.shape[0], y.shape[1]),
    "aten::addmm": lambda _, x, y, **scales: (x.shape[0], y.shape[1]),
    "aten::bmm": lambda x, y: (*x.shape[:2], y.shape[2]),
}
"""Shapes of torch's products, which would read all weights."""
_APART = 1 << 20
"""The extent of a function that is called by its address: it is so because it takes long."""


class KernelList(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Names of kernels called on this thread, and of functions whose addresses were asked for, in the order of the
    first calls. int64 in new tensors are zeros, so that they are in range where torch looks things up."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._found: dict[str, int] = {}
        """Each name, and about how long it takes to compile (`_extent`)."""
        self._calls: set[tuple[Any, ...]] = set()
        """Kernels that were noted, with the types of their arguments."""

    @property
    def names(self) -> list[str]:
        """Names as `calls.compile_named` takes them, those that take longest first."""
        return sorted(self._found, key=lambda name: -self._found[name])

    def __enter__(self) -> KernelList:
        self._tokens = noting.set(self._note), called_apart.set(self._note_address)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)  # type: ignore[no-untyped-call]
        noting.reset(self._tokens[0])
        called_apart.reset(self._tokens[1])

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch imports its compiler, which takes a second

    def _note(self, kernel: Kernel, arguments: tuple[Any, ...]) -> None:
        call = kernel, *map(type, arguments)
        if call not in self._calls:
            self._calls.add(call)
            self._found[kernel.name_for(arguments)] = _extent(kernel, set())

    def _note_address(self, name: str, rare: bool) -> None:
        self._found.setdefault(name, _APART)

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        named = named or {}
        shape_of = _PRODUCTS.get(function.name().partition(".")[0])
        if shape_of is not None:
            return next(each for each in arguments if isinstance(each, torch.Tensor)).new_empty(
                shape_of(*arguments, **named)
            )
        found = function(*arguments, **named)
        return found.zero_() if function in _NEW and found.dtype == torch.int64 else found


def _extent(function: Any, seen: set[Any]) -> int:
    """Bytes of Python's code of a kernel and of all kernels that it names."""
    seen.add(function)
    code, known = function.py_func.__code__, function.py_func.__globals__
    named = [known.get(name) for name in code.co_names]
    others = [each for each in named if isinstance(each, Kernel) and each not in seen]
    return len(code.co_code) + sum(_extent(each, seen) for each in others if each not in seen)
