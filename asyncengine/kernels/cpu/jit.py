"""What every compiled kernel is made of: memory by address, bfloat16 as bits, and a split over threads.

A kernel is three things: a `serial` function that does one of several pieces of the work, split by row or by head so
that no result depends on the number of pieces; a small one that shares the pieces out among a team of threads
(`calls.parallel_for`, `team`); and a Python function that takes tensors and hands over addresses.

Kinds: numba has no bfloat16. A tensor's type travels as a zero of the type its memory is read as: `uint16` for
bfloat16, `float32` for float32. `widen` and `narrow` go from there to float32 and back, rounding to nearest even;
numbers below 1e-38 may become 0.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any, TypeVar

import llvmlite.ir
import numba
import numpy as np
import torch
from numba.core.ccallback import CFunc
from numba.core.sigutils import normalize_signature
from numba.extending import intrinsic

from asyncengine.kernels.cpu.cache import KernelCache
from asyncengine.kernels.cpu.vectors import BFLOAT, PAIRS

Function = TypeVar("Function", bound=Callable[..., Any])

_REORDER = {"fastmath": {"reassoc", "contract", "arcp", "nsz"}}
"""Sums may be reordered, which vectorisation needs; infinities and NaN keep their meaning."""
_BARE = {"no_cfunc_wrapper": True}
"""Functions called by address are compiled for that (`compiled_for`). No other is called from C, and a wrapper for each
is a tenth of compiling."""
_KINDS = {torch.bfloat16: np.uint16(0), torch.float32: np.float32(0)}
array: Any = numba.carray


def _compiled(function: Function, **options: Any) -> Function:
    compiled: Any = numba.njit(**options, **_BARE, nogil=True, error_model="numpy")(function)
    compiled._cache = KernelCache(function)
    kernel: Function = compiled
    return kernel


def compiled_for(function: Any, signature: str) -> Any:
    """A compiled function's code for these types, as C would call it: "void(int64, uint16)". `address` says where."""
    options = {name: value for name, value in function.targetoptions.items() if name != "nopython"}
    code: Any = CFunc(function.py_func, normalize_signature(signature), locals={}, options=options)
    code._cache = KernelCache(function.py_func)
    code.compile()
    return code


def serial(function: Function) -> Function:
    """Compile a function that one thread runs."""
    return _compiled(function, **_REORDER)


def inline(function: Function) -> Function:
    """Compile a function that belongs inside the loops of others."""
    return _compiled(function, inline="always", **_REORDER)


def serial_in_order(function: Function) -> Function:
    """As `serial`, but sums stay in the order they are written in: one that does not depend on a tile's size."""
    return _compiled(function)


def with_gil(function: Any) -> Any:
    """A compiled function for calls of some microseconds: it keeps the interpreter's lock. Never with a team, whose
    helpers it would keep waiting for while the whole program stands still.

    Whoever lets go of it may wait for the switch interval (5 ms) until a thread of the program gives it back.
    """
    options = {name: value for name, value in function.targetoptions.items() if name not in ("nopython", "nogil")}
    known = function.py_func
    copy = FunctionType(known.__code__, known.__globals__, known.__name__, known.__defaults__, known.__closure__)
    copy.__module__, copy.__qualname__ = known.__module__, f"{known.__qualname__}-gil"  # kept beside the other one
    compiled = numba.njit(**options)(copy)
    compiled._cache = KernelCache(copy)
    return compiled


def kind_of(dtype: torch.dtype) -> Any:
    """What memory of this type is read as. Raises `KeyError` for types without kernels."""
    return _KINDS[dtype]


def _pointer(_: Any, address: Any, kind: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return numba.types.CPointer(kind)(address, kind), generate


def _widen(_: Any, value: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if value != numba.types.uint16:
            return arguments[0]
        high = builder.shl(builder.zext(arguments[0], _WORD), _WORD(16))
        return builder.bitcast(high, llvmlite.ir.FloatType())

    return numba.types.float32(value), generate


def _narrow(_: Any, value: Any, kind: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if kind != numba.types.uint16:
            return arguments[0]
        if PAIRS:  # one instruction, for as many numbers as a loop's vectors hold
            return builder.bitcast(builder.fptrunc(arguments[0], BFLOAT), llvmlite.ir.IntType(16))
        bits = builder.bitcast(arguments[0], _WORD)
        odd = builder.and_(builder.lshr(bits, _WORD(16)), _WORD(1))
        rounded = builder.lshr(builder.add(bits, builder.add(odd, _WORD(0x7FFF))), _WORD(16))
        number = builder.fcmp_ordered("ord", arguments[0], arguments[0])
        kept = builder.select(number, rounded, _WORD(0x7FC0))  # rounding would make some NaN a number
        return builder.trunc(kept, llvmlite.ir.IntType(16))

    return kind(numba.types.float32, kind), generate


_WORD = llvmlite.ir.IntType(32)

pointer: Any = intrinsic(_pointer)
"""pointer(address, kind), inside kernels: memory of that kind, for `array(pointer(address, kind), shape)`."""
widen: Any = intrinsic(_widen)
"""widen(value), inside kernels: the float32 that a value of some kind stands for."""
narrow: Any = intrinsic(_narrow)
"""narrow(value, kind), inside kernels: a float32 rounded to `kind`."""
