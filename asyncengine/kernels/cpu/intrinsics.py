"""Functions that kernels call and that are written in LLVM's own instructions: what numba calls intrinsics."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import numba
from numba.extending import intrinsic

INT64, FLOAT32 = numba.types.int64, numba.types.float32
TAG: Any = None
"""In `emitted`: an argument of which only the type matters, such as a tag (`jit.tag_of`)."""


def emitted(*types: Any, result: Any = numba.types.void, **settings: Any) -> Callable[[Callable[..., Any]], Any]:
    """A function of kernels made of one that writes its instructions: `write(builder, *arguments, **settings)`.

    `types` are those of its arguments. `write` is given LLVM's values of them, but for a `TAG` the argument's numba
    type; it returns the value of type `result`, if there is one. No result depends on who calls.
    `settings`: keyword-only arguments, which functions of kernels that are alike differ in.
    """

    def make(write: Callable[..., Any]) -> Any:
        @functools.wraps(write)
        def typed(_: Any, *given: Any) -> Any:
            def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
                known = zip(types, given, arguments, strict=True)
                found = write(builder, *(own if kind is TAG else value for kind, own, value in known), **settings)
                return context.get_dummy_value() if found is None else found

            return result(*(own if kind is TAG else kind for kind, own in zip(types, given, strict=True))), generate

        known = inspect.signature(write)  # numba takes names of arguments from there, but for the first
        names = [name for name in known.parameters.values() if name.name not in settings]
        typed.__signature__ = known.replace(parameters=names)  # type: ignore[attr-defined]
        return intrinsic(typed)

    return make
