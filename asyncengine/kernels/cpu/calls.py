"""Calls by address: a kernel's heavy function is compiled once for all its callers.

numba puts the code of a function into that of every caller, and LLVM optimises it there again: a function three levels
down is compiled four times, and a `prange` loop adds four levels of its own. Here the caller holds an address instead.
It is asked for by name at the first call, since code from the disk cache outlives the process that compiled it, and a
function in that cache is found there too. One loop over a team's threads (`team`) serves all kernels.

A call costs a few nanoseconds. Results cannot differ: what is called is the same code at every place.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import inspect
import operator
import sys
from collections.abc import Callable
from typing import Any

import llvmlite.binding
import numba
from llvmlite import ir
from numba.core import cgutils
from numba.core.sigutils import normalize_signature
from numba.extending import intrinsic

from asyncengine.kernels.cpu.jit import compiled_for, inline, serial_in_order
from asyncengine.kernels.cpu.team_loops import call_piece, pieces_of, run_together
from asyncengine.kernels.cpu.vectors import LONG
from asyncengine.kernels.elsewhere import called_apart

_SYMBOL = "asyncengine_kernel_address"
_TEXT = ir.IntType(8).as_pointer()


@functools.cache
def _code_of(name: str) -> Any:
    """The code of "module:function:void(types)", compiled if need be. It is never freed, so its address stays."""
    module, function, signature = name.split(":")
    dispatcher = operator.attrgetter(function)(sys.modules.get(module) or importlib.import_module(module))
    return compiled_for(dispatcher, signature)


_FINDER = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_char_p)(lambda name: _code_of(name.decode()).address)
llvmlite.binding.add_symbol(_SYMBOL, ctypes.cast(_FINDER, ctypes.c_void_p).value)


def _name_of(function: Any, types: tuple[Any, ...], *, rare: bool = False) -> str:
    """The name of a function for these types, which is compiled now so that its errors are its caller's: unless it is
    rarely called, or others compile it (`elsewhere.called_apart`)."""
    name = name_of(function.dispatcher, types)
    report = called_apart.get()
    if report is not None:
        report(name, rare)
    elif not rare:
        _code_of(name)
    return name


def name_of(function: Any, types: tuple[Any, ...]) -> str:
    """The name by which kernels call a compiled function by address, for these types."""
    python = function.py_func
    return f"{python.__module__}:{python.__name__}:void({', '.join(map(str, types))})"


def address_of(name: str) -> int:
    """The address of "module:function:void(types)", which is compiled if need be. It never moves. 0 where other
    processes compile it (`elsewhere.called_apart`)."""
    report = called_apart.get()
    if report is not None:
        report(name, False)
        return 0
    return int(_code_of(name).address)


def compile_named(name: str) -> None:
    """Compile, and keep, "module:function:(types)", which Python calls, or "module:function:void(types)", which kernels
    call by address. Of "module:function:form ...", the function is called with the last part: it compiles by itself."""
    module, function, signature = name.split(":")
    if signature.startswith("void"):
        _code_of(name)
    elif signature.startswith("form"):
        getattr(importlib.import_module(module), function)(signature)
    else:
        getattr(importlib.import_module(module), function).compile(normalize_signature(signature)[0])


def _emit_address(context: Any, builder: Any, name: str) -> Any:
    """The address of a function, from a place in this code that is filled at the first call."""
    cell = cgutils.add_global_variable(builder.module, LONG, f".kernel.{name}")
    cell.linkage, cell.initializer = "internal", LONG(0)
    address = cgutils.alloca_once(builder, LONG)
    builder.store(builder.load(cell), address)
    with builder.if_then(builder.icmp_unsigned("==", builder.load(address), LONG(0)), likely=False):
        find = cgutils.get_or_insert_function(builder.module, ir.FunctionType(LONG, [_TEXT]), _SYMBOL)
        looked_up = builder.call(find, [context.insert_const_string(builder.module, name)])
        with builder.if_then(builder.icmp_unsigned("==", looked_up, LONG(0)), likely=False):
            message = f"{name} is gone: the cache of compiled kernels is older than this code; delete it"
            context.call_conv.return_user_exc(builder, RuntimeError, (message,))
        builder.store(looked_up, cell)
        builder.store(looked_up, address)
    return builder.load(address)


def _emit_call(builder: Any, address: Any, arguments: list[Any]) -> None:
    function_type = ir.FunctionType(ir.VoidType(), [argument.type for argument in arguments])
    builder.call(builder.inttoptr(address, function_type.as_pointer()), arguments)


def _call(_: Any, function: Any, arguments: Any) -> Any:
    return _calling(function, _plain(arguments), rare=False)


def _call_rare(_: Any, function: Any, arguments: Any) -> Any:
    return _calling(function, _plain(arguments), rare=True)


def _call_where(_: Any, function: Any, arguments: Any, tag: Any, wanted_tag: Any) -> Any:
    argument_types = function, arguments, tag, wanted_tag
    if tag != wanted_tag:
        return numba.types.void(*argument_types), lambda context, *_: context.get_dummy_value()
    return numba.types.void(*argument_types), _calling(function, _plain(arguments), rare=False)[1]


def _plain(arguments: Any) -> tuple[Any, ...]:
    return tuple(map(numba.types.unliteral, arguments.types))


def _calling(function: Any, types: tuple[Any, ...], *, rare: bool) -> Any:
    is_address = numba.types.unliteral(function) == numba.types.int64
    name = "" if is_address else _name_of(function, types, rare=rare)

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        address = values[0] if is_address else _emit_address(context, builder, name)
        _emit_call(builder, address, cgutils.unpack_tuple(builder, values[1]))
        return context.get_dummy_value()

    first = numba.types.int64 if is_address else function
    return numba.types.void(first, numba.types.BaseTuple.from_types(types)), generate


def _parallel_for(_: Any, function: Any, team: Any, pieces: Any, arguments: Any) -> Any:
    return _loop(function, arguments, by_units=False)


def _parallel_units(_: Any, function: Any, team: Any, pieces: Any, arguments: Any, units: Any) -> Any:
    return _loop(function, arguments, by_units=True)


def _loop(function: Any, arguments: Any, *, by_units: bool) -> Any:
    int64, types = numba.types.int64, _plain(arguments)
    piece_types = (int64,) * (2 if by_units else 3)
    runner_name = _name_of(numba.typeof(_run), (int64,) * 4)
    is_address = numba.types.unliteral(function) == int64
    name = "unknown" if is_address else _name_of(function, (*piece_types, *types))

    def generate(context: Any, builder: Any, signature: Any, operands: Any) -> Any:
        address = operands[0] if is_address else _emit_address(context, builder, name)
        values = [address, *operands[4:], *cgutils.unpack_tuple(builder, operands[3])]
        record = cgutils.alloca_once(builder, ir.LiteralStructType([value.type for value in values]))
        for index, value in enumerate(values):
            builder.store(value, cgutils.gep_inbounds(builder, record, 0, index))
        piece_code = builder.ptrtoint(_emit_piece(builder.module, name, record.type, by_units), LONG)
        runner = _emit_address(context, builder, runner_name)
        _emit_call(builder, runner, [piece_code, builder.ptrtoint(record, LONG), operands[2], operands[1]])
        return context.get_dummy_value()

    operands = int64 if is_address else function, int64, int64, numba.types.BaseTuple.from_types(types)
    return numba.types.void(*operands, *((int64,) if by_units else ())), generate


def _emit_piece(module: Any, name: str, record: Any, by_units: bool) -> Any:
    """Emit the function that a thread calls with (piece, pieces, worker, record): it calls the function whose address
    begins the record with the rest of the record. `by_units`: the number of all units comes next in the record, and the
    function gets the piece's range of them in place of the piece."""
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [LONG] * 4), module.get_unique_name(f".part.{name}"))
    function.linkage = "internal"
    builder = ir.IRBuilder(function.append_basic_block())
    *position, record_address = function.args
    fields = builder.inttoptr(record_address, record)
    address, *values = (
        builder.load(cgutils.gep_inbounds(builder, fields, 0, index)) for index in range(len(record.pointee.elements))
    )
    if by_units:
        (piece, pieces, _), units = position, values.pop(0)
        ends = piece, builder.add(piece, LONG(1))
        position = [builder.sdiv(builder.mul(units, end), pieces) for end in ends]
    _emit_call(builder, address, [*position, *values])
    builder.ret_void()
    return function


call: Any = intrinsic(_call)
"""call(function, (arguments...)), inside kernels: call a compiled function that returns nothing. `function` may be an
address (`jit.compiled_for`) of code for arguments of these types."""
call_rare: Any = intrinsic(_call_rare)
"""`call` of a function that most programs never call: it is compiled when it is first called, or by `compile_named`."""
call_where: Any = intrinsic(_call_where)
"""call_where(function, (arguments...), tag, wanted), inside kernels: `call` if the values `tag` and `wanted` have one
type. For kernels of another type the function is not compiled, and nothing is called."""
parallel_for: Any = intrinsic(_parallel_for)
"""parallel_for(function, team, pieces, (arguments...)), inside kernels:

Call function(piece, pieces, worker, arguments...) for all pieces, by the threads of a team (`team.use_team`; 0: by the
caller alone), in any order and side by side. Pieces of one `worker` come one after the other, so that scratch memory
for each worker suffices. The function may be given by its address (`jit.compiled_for`), for arguments of these types.
"""
_share_units: Any = intrinsic(_parallel_units)


@serial_in_order
def _run(function: int, record: int, pieces: int, team: int) -> None:
    if team == 0 or pieces < 2:
        for piece in range(pieces):
            call_piece(function, piece, pieces, 0, record)
    else:
        run_together(function, record, pieces, team)


_TEAM_KERNEL = """
def {name}({given}, team):
    units, work = _sizes({known})
    _share_units(_share, team, _pieces_of(work, units, team), ({given},), units)
"""


def team_kernel(sizes: Callable[..., tuple[int, int]]) -> Callable[[Any], Any]:
    """Decorator of a compiled function of (first, last, arguments...), which computes units [first, last) of a loop:
    makes it the kernel of (arguments..., team), which shares all units out among a team.

    `sizes` is given some of the arguments, by their names, and returns the number of units, and the bytes of memory
    that could be read while all of them are computed (`pieces_of`).
    """

    def make(share: Any) -> Any:
        function = share.py_func
        name, (_, _, *given) = function.__name__, inspect.signature(function).parameters
        size_arguments = inspect.signature(sizes).parameters
        source = _TEAM_KERNEL.format(name=name, given=", ".join(given), known=", ".join(size_arguments))
        source = "\n" * (function.__code__.co_firstlineno - 2) + source  # errors and the cache name the function's line
        namespace = {
            "__name__": function.__module__, "_sizes": inline(sizes), "_share": share, "_share_units": _share_units,
            "_pieces_of": pieces_of,
        }  # fmt: skip
        exec(compile(source, function.__code__.co_filename, "exec"), namespace)
        kernel = serial_in_order(namespace[name])
        kernel.share, function.__name__ = share, f"{name}.share"  # it is called by this name
        return kernel

    return make
