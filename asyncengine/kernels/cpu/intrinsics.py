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
    """Decorator of `write(builder, *arguments, **settings)`, which writes instructions: makes a function for kernels.

    `types` are those of its arguments. `write` is given LLVM's values of them, but for a `TAG` the argument's numba
    type; it returns the value of type `result`, if there is one. The instructions are the same for every caller.
    `settings`: keyword-only arguments of `write`, by which similar functions are made of one.
    """

    def make(write: Callable[..., Any]) -> Any:
        @functools.wraps(write)
        def typed(_: Any, *given: Any) -> Any:
            tags = [declared is TAG for declared in types]

            def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
                operands = [own if tag else value for tag, own, value in zip(tags, given, values, strict=True)]
                returned = write(builder, *operands, **settings)
                return context.get_dummy_value() if returned is None else returned

            wanted = zip(tags, given, types, strict=True)
            return result(*(own if tag else declared for tag, own, declared in wanted)), generate

        signature = inspect.signature(write)  # numba takes names of arguments from there, but for the first
        parameters = [parameter for parameter in signature.parameters.values() if parameter.name not in settings]
        typed.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        return intrinsic(typed)

    return make
