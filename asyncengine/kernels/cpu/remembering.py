"""A cache of facts that numba otherwise works out again at every place.

For processes that compile and end (`compile_worker`): in the user's own, numba stays as it is. A kernel adds and
compares thousands of times, each time numba tries all the ways of adding that it knows, and asks LLVM for the size of
every variable, of which there are a few kinds. What is found is the same.
"""

from __future__ import annotations

from typing import Any

from numba.core.base import BaseContext
from numba.core.types.functions import BaseFunction


def remember() -> None:
    """From now on, in this process."""
    _remember_calls()
    _remember_sizes()


def _remember_calls() -> None:
    resolve = BaseFunction.get_call_type
    known: dict[tuple[int, Any], tuple[Any, Any]] = {}
    """Results by a function's address, which no other gets while it is kept here: equal ones may be different ones."""

    def get_call_type(self: Any, context: Any, args: Any, kws: Any) -> Any:
        if kws:
            return resolve(self, context, args, kws)
        key = (id(self), tuple(args))
        if key not in known:
            known[key] = resolve(self, context, args, kws), self
        return known[key][0]

    BaseFunction.get_call_type = get_call_type  # type: ignore[method-assign]


def _remember_sizes() -> None:
    measure = BaseContext.get_abi_sizeof
    known: dict[str, int] = {}

    def get_abi_sizeof(self: Any, ty: Any) -> int:
        name = str(ty)
        if name not in known:
            known[name] = measure(self, ty)
        return known[name]

    BaseContext.get_abi_sizeof = get_abi_sizeof
