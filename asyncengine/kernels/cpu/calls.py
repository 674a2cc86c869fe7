"""Calls by address: a kernel's heavy part is compiled once, whoever calls it.

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
    """The code of "module:function:void(types)", which is compiled if need be. It stays where it is."""
    module, function, signature = name.split(":")
    found = operator.attrgetter(function)(sys.modules.get(module) or importlib.import_module(module))
    return compiled_for(found, signature)


def _find(name: bytes) -> int:
    address: int = _code_of(name.decode()).address
    return address


_FINDER = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_char_p)(_find)
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
    """The address of "module:function:void(types)", which is compiled if need be. It never moves. 0 where others
    compile it (`elsewhere.called_apart`)."""
    report = called_apart.get()
    if report is not None:
        report(name, False)
        return 0
    address: int = _code_of(name).address
    return address


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
        found = builder.call(find, [context.insert_const_string(builder.module, name)])
        with builder.if_then(builder.icmp_unsigned("==", found, LONG(0)), likely=False):
            message = f"{name} is gone: the cache of compiled kernels is older than this code; delete it"
            context.call_conv.return_user_exc(builder, RuntimeError, (message,))
        builder.store(found, cell)
        builder.store(found, address)
    return builder.load(address)


def _emit_call(builder: Any, address: Any, arguments: list[Any]) -> None:
    kind = ir.FunctionType(ir.VoidType(), [argument.type for argument in arguments])
    builder.call(builder.inttoptr(address, kind.as_pointer()), arguments)


def _call(_: Any, function: Any, arguments: Any) -> Any:
    return _calling(function, _plain(arguments), rare=False)


def _call_rare(_: Any, function: Any, arguments: Any) -> Any:
    return _calling(function, _plain(arguments), rare=True)


def _call_where(_: Any, function: Any, arguments: Any, own: Any, wanted: Any) -> Any:
    given = function, arguments, own, wanted
    if own != wanted:
        return numba.types.void(*given), lambda context, *_: context.get_dummy_value()
    return numba.types.void(*given), _calling(function, _plain(arguments), rare=False)[1]


def _plain(arguments: Any) -> tuple[Any, ...]:
    return tuple(map(numba.types.unliteral, arguments.types))


def _calling(function: Any, types: tuple[Any, ...], *, rare: bool) -> Any:
    known = numba.types.unliteral(function) == numba.types.int64
    name = "" if known else _name_of(function, types, rare=rare)

    def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        address = given[0] if known else _emit_address(context, builder, name)
        _emit_call(builder, address, cgutils.unpack_tuple(builder, given[1]))
        return context.get_dummy_value()

    first = numba.types.int64 if known else function
    return numba.types.void(first, numba.types.BaseTuple.from_types(types)), generate


def _parallel_for(_: Any, function: Any, team: Any, pieces: Any, arguments: Any) -> Any:
    return _loop(function, arguments, by_units=False)


def _parallel_units(_: Any, function: Any, team: Any, pieces: Any, arguments: Any, units: Any) -> Any:
    return _loop(function, arguments, by_units=True)


def _loop(function: Any, arguments: Any, *, by_units: bool) -> Any:
    whole, types = numba.types.int64, _plain(arguments)
    numbers = (whole,) * (2 if by_units else 3)
    run = _name_of(numba.typeof(_run), (whole,) * 4)
    known = numba.types.unliteral(function) == whole
    name = "unknown" if known else _name_of(function, (*numbers, *types))

    def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        address = given[0] if known else _emit_address(context, builder, name)
        values = [address, *given[4:], *cgutils.unpack_tuple(builder, given[3])]
        record = cgutils.alloca_once(builder, ir.LiteralStructType([value.type for value in values]))
        for place, value in enumerate(values):
            builder.store(value, cgutils.gep_inbounds(builder, record, 0, place))
        piece = builder.ptrtoint(_emit_part(builder.module, name, record.type, by_units), LONG)
        runner = _emit_address(context, builder, run)
        _emit_call(builder, runner, [piece, builder.ptrtoint(record, LONG), given[2], given[1]])
        return context.get_dummy_value()

    given = whole if known else function, whole, whole, numba.types.BaseTuple.from_types(types)
    return numba.types.void(*given, *((whole,) if by_units else ())), generate


def _emit_part(module: Any, name: str, record: Any, by_units: bool) -> Any:
    """Emit the function that a thread calls: (piece, pieces, worker, record) -> the function in the record, with the
    rest of it. `by_units`: the record's next number is that of all units, and the function gets those of the piece."""
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [LONG] * 4), module.get_unique_name(f".part.{name}"))
    function.linkage = "internal"
    builder = ir.IRBuilder(function.append_basic_block())
    *which, place = function.args
    held = builder.inttoptr(place, record)
    address, *values = (
        builder.load(cgutils.gep_inbounds(builder, held, 0, index)) for index in range(len(record.pointee.elements))
    )
    if by_units:
        (piece, pieces, _), units = which, values.pop(0)
        ends = piece, builder.add(piece, LONG(1))
        which = [builder.sdiv(builder.mul(units, end), pieces) for end in ends]
    _emit_call(builder, address, [*which, *values])
    builder.ret_void()
    return function


call: Any = intrinsic(_call)
"""call(function, (arguments...)), inside kernels: of a compiled function that returns nothing; or of what lies at an
address (`jit.compiled_for`), whose types must be these."""
call_rare: Any = intrinsic(_call_rare)
"""`call` of a function that most programs never call: it is compiled when it is first called, or by `compile_named`."""
call_where: Any = intrinsic(_call_where)
"""call_where(function, (arguments...), own, wanted), inside kernels: `call` if the numbers `own` and `wanted` have one
type. For kernels of another type the function is not compiled, and nothing is called."""
parallel_for: Any = intrinsic(_parallel_for)
"""parallel_for(function, team, pieces, (arguments...)), inside kernels:

Call function(piece, pieces, worker, arguments...) for all pieces, by the threads of a team (`team.use_team`; 0: by the
caller alone), in any order and side by side. Pieces of one `worker` come one after the other: what it needs to work in
may be its own. The function may be given by its address (`jit.compiled_for`), whose types must be these.
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
    """Above a compiled function of (first, last, arguments...), which does those of a loop's units: make of it the
    kernel of (arguments..., team), which shares all units out among a team.

    `sizes` is given some of the arguments, by their names, and says how many units there are, and how many bytes of
    memory could be read while all of them are done (`pieces_of`).
    """

    def make(share: Any) -> Any:
        function = share.py_func
        name, (_, _, *given) = function.__name__, inspect.signature(function).parameters
        known = inspect.signature(sizes).parameters
        source = _TEAM_KERNEL.format(name=name, given=", ".join(given), known=", ".join(known))
        source = "\n" * (function.__code__.co_firstlineno - 2) + source  # errors and the cache name the function's line
        made = {
            "__name__": function.__module__, "_sizes": inline(sizes), "_share": share, "_share_units": _share_units,
            "_pieces_of": pieces_of,
        }  # fmt: skip
        exec(compile(source, function.__code__.co_filename, "exec"), made)
        kernel = serial_in_order(made[name])
        kernel.share, function.__name__ = share, f"{name}.share"  # it is called by this name
        return kernel

    return make
