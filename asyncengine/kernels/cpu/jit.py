"""Building blocks of compiled kernels: memory by address, bfloat16 as bits, and a split over threads.

A kernel is two things: a `serial` function that does some of the work's rows or heads, so that no result depends on
how these are shared out among a team of threads (`calls.team_kernel`; where more is shared than one loop,
`calls.parallel_for`); and a Python function that takes tensors and hands over addresses.

Tags: numba has no bfloat16. A tensor's dtype travels as a tag (`tag_of`), a zero of the type its memory is read as:
`uint16` for bfloat16, `float32` for float32. `widen` and `narrow` go from there to float32 and back, rounding to
nearest even; numbers below 1e-38 may become 0.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from types import FunctionType
from typing import Any, TypeVar

import numba
import numpy as np
import torch
from llvmlite import ir
from numba.core import cgutils
from numba.core.ccallback import CFunc
from numba.core.sigutils import normalize_signature
from numba.extending import intrinsic
from numba.np.arrayobj import make_array, populate_array

from asyncengine.kernels.cpu import vectors
from asyncengine.kernels.cpu.cache import KernelCache
from asyncengine.kernels.cpu.compiling import Kernel, KernelCompiler
from asyncengine.kernels.cpu.intrinsics import TAG, emitted
from asyncengine.kernels.cpu.vectors import LINE, LONG, widen_halves

Function = TypeVar("Function", bound=Callable[..., Any])

_REORDER = {"fastmath": {"reassoc", "contract", "arcp", "nsz"}}
"""Sums may be reordered, which vectorisation needs; infinities and NaN keep their meaning."""
_TAGS = {torch.bfloat16: np.uint16(0), torch.float32: np.float32(0)}


def _compiled(function: Function, **options: Any) -> Function:
    options |= {"nogil": True, "error_model": "numpy", "_nrt": getattr(function, "allocates", False)}
    compiled: Any = Kernel(function, options)
    kernel: Function = compiled
    return kernel


def compiled_for(function: Any, signature: str) -> Any:
    """A compiled function's code for these types, as C would call it: "void(int64, uint16)". It has an `address`."""
    options = {name: value for name, value in function.targetoptions.items() if name != "nopython"}
    # older releases of numba print the name of this type in a way that they do not read
    types = normalize_signature(re.sub(r"\bbool\b", "boolean", signature))
    code: Any = CFunc(function.py_func, types, locals={}, options=options, pipeline_class=KernelCompiler)
    code._cache = KernelCache(function.py_func)
    code.compile()
    return code


def serial(function: Function) -> Function:
    """Compile a function that one thread runs."""
    return _compiled(function, **_REORDER)


def inline(function: Function) -> Function:
    """Compile a function that is inlined into the loops of others."""
    return _compiled(function, inline="always", **_REORDER)


def serial_in_order(function: Function) -> Function:
    """Compile a function like `serial`, but keep sums in the order they are written in, whatever a tile's size."""
    return _compiled(function, fastmath=False)  # else it takes the flags of the caller that compiles it first


def allocates(function: Function) -> Function:
    """Decorator, below `serial` and the like, of a function that makes arrays of its own (`numpy.empty`) or assigns one
    to another, which no other function can. numba counts references to all its arrays, which takes long to compile."""
    function.allocates = True  # type: ignore[attr-defined]
    return function


def with_gil(function: Any) -> Any:
    """A compiled function that keeps the interpreter's lock, for calls of some microseconds: a thread that releases the
    lock may wait for the switch interval (5 ms) until another one gives it back.

    Never for a function that takes a team: it would wait for helpers while the whole program stands still.
    """
    options = {name: value for name, value in function.targetoptions.items() if name != "nogil"}
    python = function.py_func
    twin = FunctionType(python.__code__, python.__globals__, python.__name__, python.__defaults__, python.__closure__)
    twin.__module__, twin.__qualname__ = python.__module__, f"{python.__qualname__}-gil"  # kept beside the other one
    return Kernel(twin, options)


def tag_of(dtype: torch.dtype) -> Any:
    """The tag of a dtype, for kernels. Raises `KeyError` for dtypes without kernels."""
    return _TAGS[dtype]


def _pointer(_: Any, address: Any, dtype: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return numba.types.CPointer(dtype)(address, dtype), generate


def _array(_: Any, start: Any, shape: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array_type, result = signature.return_type, make_array(signature.return_type)(context, builder)
        sizes = [
            context.cast(builder, size, size_type, numba.types.intp)
            for size_type, size in zip(signature.args[1], cgutils.unpack_tuple(builder, arguments[1]), strict=True)
        ]
        item_bytes = LONG(context.get_abi_sizeof(context.get_data_type(array_type.dtype)))
        strides = [item_bytes]
        for size in reversed(sizes[1:]):
            strides.insert(0, builder.mul(strides[0], size))
        populate_array(result, data=arguments[0], shape=sizes, strides=strides, itemsize=item_bytes, meminfo=None)
        return result._getvalue()

    return numba.types.Array(start.dtype, len(shape), "C")(start, shape), generate


def _room(_: Any, count: Any, dtype: Any) -> Any:
    if not isinstance(count, numba.types.IntegerLiteral):
        return None
    dtype_of_item, size = numba.types.unliteral(dtype), count.literal_value

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        memory = cgutils.alloca_once(builder, ir.ArrayType(context.get_data_type(dtype_of_item), size))
        memory.align = LINE
        result = make_array(signature.return_type)(context, builder)
        bytes_of_item = LONG(context.get_abi_sizeof(context.get_data_type(dtype_of_item)))
        start = builder.bitcast(memory, context.get_data_type(dtype_of_item).as_pointer())
        populate_array(
            result, data=start, shape=[LONG(size)], strides=[bytes_of_item], itemsize=bytes_of_item, meminfo=None
        )
        return result._getvalue()

    return numba.types.Array(dtype_of_item, 1, "C")(count, dtype), generate


@emitted(TAG)
def keep(builder: Any, held: Any) -> None:
    """Keep an array until here, after the last use of its address: numba frees an array of the kernel's own after the
    last line that names it, and the next allocation of any thread may get its memory."""


def _widen(_: Any, value: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return widen_halves(builder, arguments[0], "bfloat16") if value == numba.types.uint16 else arguments[0]

    return numba.types.float32(value), generate


def _narrow(_: Any, value: Any, dtype: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if dtype == numba.types.uint16:
            return vectors.narrow(builder, arguments[0])
        return context.cast(builder, arguments[0], numba.types.float32, dtype)

    return dtype(numba.types.float32, dtype), generate


pointer: Any = intrinsic(_pointer)
"""pointer(address, dtype), inside kernels: memory of that type, for `array(pointer(address, dtype), shape)`."""
array: Any = intrinsic(_array)
"""array(pointer, shape), inside kernels: that memory as an array of this shape, a tuple. As `numba.carray`, which is
compiled anew for every type of shape."""
room: Any = intrinsic(prefer_literal=True)(_room)
"""room(count, dtype), inside kernels: an array of `count`, a constant, on the stack: uninitialised, and gone when the
function returns."""
widen: Any = intrinsic(_widen)
"""widen(value), inside kernels: the float32 that a value of a tag's type stands for."""
narrow: Any = intrinsic(_narrow)
"""narrow(value, dtype), inside kernels: a float32 rounded to `dtype`."""
