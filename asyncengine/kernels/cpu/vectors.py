"""Vector code for kernels that numba's loops cannot express: what they are built from, in LLVM's own terms.

numba has no vector values. A tile, the innermost part of a matrix product, is therefore a numba intrinsic that writes
LLVM instructions on vectors of sixteen lanes (`intrinsics.emitted`); LLVM cuts those to what the machine has. Nothing
here runs in a kernel: all of it runs while one is compiled, with the `builder` that takes instructions.
"""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import sys
from collections.abc import Callable, Mapping
from typing import Any

import llvmlite.binding
import numba
from llvmlite import ir
from numba.core import cgutils

from asyncengine.kernels.cpu.intrinsics import FLOAT32, INT64, TAG, emitted

LANES = 16
FLOAT, BYTE, WORD, LONG = ir.FloatType(), ir.IntType(8), ir.IntType(32), ir.IntType(64)
FLOATS, WORDS = ir.VectorType(FLOAT, LANES), ir.VectorType(WORD, LANES)
EIGHT_FLOATS, EIGHT_WORDS = ir.VectorType(FLOAT, 8), ir.VectorType(WORD, 8)
HALF_WORD = ir.IntType(16)
HALF_WORDS = ir.VectorType(HALF_WORD, LANES)


class _BFloat(ir.types.Type):  # type: ignore[misc]
    """LLVM's own bfloat16, which llvmlite has no name for."""

    def _to_string(self) -> str:
        return "bfloat"


BFLOAT = _BFloat()
_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18
"""Linux's system call, its request to use a component of the CPU's state, and the matrix unit's tiles among those."""
LINE = 64
"""Bytes of a vector, and of a line of cache on the CPUs that have such vectors."""


@emitted(FLOAT32, result=numba.types.int32)
def bits_of(builder: Any, number: Any) -> Any:
    """The int32 with the bits of a float32."""
    return builder.bitcast(number, WORD)


@emitted(numba.types.int32, result=FLOAT32)
def number_of(builder: Any, bits: Any) -> Any:
    """The float32 with the bits of an int32."""
    return builder.bitcast(bits, FLOAT)


@emitted(TAG, result=INT64)
def size_of(builder: Any, dtype: Any) -> Any:
    """Bytes of a number of this dtype."""
    return LONG(dtype.bitwidth // 8)


@emitted(INT64, INT64, TAG, result=FLOAT32)
def square_sum(builder: Any, address: Any, count: Any, dtype: Any) -> Any:
    """The sum of the squares of `count` numbers, in the same order in every kernel that calls it."""
    sums = [cgutils.alloca_once_value(builder, constant(FLOATS, 0.0)) for _ in range(4)]

    def add(index: Any, lanes: int, into: Any) -> None:
        offset = builder.mul(index, LONG(dtype.bitwidth // 8))
        number = read(builder, builder.add(address, offset), dtype, one=lanes == 1)
        if lanes == 1:
            number = builder.insert_element(constant(FLOATS, 0.0), number, WORD(0))
        builder.store(multiply_add(builder, number, number, builder.load(into)), into)

    with cgutils.for_range(builder, builder.udiv(count, LONG(4 * LANES))) as loop:
        for chain in range(4):
            add(builder.add(builder.mul(loop.index, LONG(4 * LANES)), LONG(chain * LANES)), LANES, sums[chain])
    done = builder.mul(builder.udiv(count, LONG(4 * LANES)), LONG(4 * LANES))
    with cgutils.for_range(builder, builder.sub(count, done)) as loop:
        add(builder.add(done, loop.index), 1, sums[0])
    return sum_all(builder, sums)


def cpu_has(*features: str) -> bool:
    """True if kernels are compiled for a CPU with all these features, by LLVM's names."""
    if numba.config.CPU_NAME is not None or numba.config.CPU_FEATURES is not None:
        chosen = str(numba.config.CPU_FEATURES or "").split(",")  # kernels for other machines than this one
        return all(f"+{name}" in chosen for name in features)
    host = features_here()
    return all(host.get(name, False) for name in features)


@functools.cache
def features_here() -> Any:
    """The CPU's features by LLVM's names; cached, as LLVM takes half a millisecond to say. Of 64-bit ARM it knows
    features on some systems only (not Apple's): NEON, with fused products and float16, is part of that architecture."""
    arm = platform.machine().lower() in ("aarch64", "arm64")
    return {**llvmlite.binding.get_host_cpu_features(), **({"neon": True} if arm else {})}


def may_use_matrix_unit(environment: Mapping[str, str]) -> bool:
    """False if oneDNN's `ONEDNN_MAX_CPU_ISA` names an instruction set below AMX: it holds for these kernels too."""
    limit = environment.get("ONEDNN_MAX_CPU_ISA") or environment.get("DNNL_MAX_CPU_ISA") or "ALL"
    return "AMX" in limit.upper() or limit.upper() in ("ALL", "DEFAULT", "AVX10_2_512")


def _tiles_permitted() -> bool:
    """Ask the system whether this process may use tiles. Of systems only Linux is asked."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return False
    return bool(ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA) == 0)


UNIT = cpu_has("amx-bf16", "amx-int8") and may_use_matrix_unit(os.environ) and _tiles_permitted()
"""Products of bfloat16 and of bytes go through the CPU's matrix unit, AMX (`matrix_unit`), in this process."""
WIDE = cpu_has("avx512f")
"""The CPU has vectors of sixteen, with the instructions that exist for these only."""
PAIRS = cpu_has("avx512bf16")
"""The CPU has an instruction for products of pairs of bfloat16."""
NEON = cpu_has("neon")
"""The CPU has ARM's vectors of four, 32 of them: as many numbers as sixteen vectors of eight."""
HALVES = cpu_has("f16c") or WIDE or NEON
"""The CPU has an instruction that widens float16."""


def constant(type_of: Any, value: float) -> Any:
    """A constant of type `type_of`: `value`, in all lanes of a vector."""
    return ir.Constant(type_of, [value] * type_of.count if isinstance(type_of, ir.VectorType) else value)


def _alike(item_type: Any, values: Any) -> Any:
    """Vectors of this type with as many lanes as `values`, or the type where those are one number."""
    return ir.VectorType(item_type, values.type.count) if isinstance(values.type, ir.VectorType) else item_type


def splat(builder: Any, value: Any, lanes: int = LANES) -> Any:
    """A vector with `value` in all lanes."""
    vector_type = ir.VectorType(value.type, lanes)
    first = builder.insert_element(ir.Constant(vector_type, ir.Undefined), value, WORD(0))
    return builder.shuffle_vector(first, first, constant(ir.VectorType(WORD, lanes), 0))


def load(builder: Any, address: Any, value_type: Any) -> Any:
    """A value of that type from any address, aligned or not."""
    value = builder.load(builder.inttoptr(address, value_type.as_pointer()))
    value.align = 1
    return value


def store(builder: Any, value: Any, address: Any) -> None:
    builder.store(value, builder.inttoptr(address, value.type.as_pointer())).align = 1


def call(builder: Any, name: str, result: Any, arguments: list[Any]) -> Any:
    """Call one of LLVM's own functions."""
    function_type = ir.FunctionType(result, [argument.type for argument in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, function_type, name), arguments)


def prefetch(builder: Any, address: Any) -> None:
    """Bring a line of memory into the second-level cache. Any address will do, even one past the end."""
    pointer = builder.inttoptr(address, BYTE.as_pointer())
    call(builder, "llvm.prefetch.p0", ir.VoidType(), [pointer, WORD(0), WORD(2), WORD(1)])


def at(builder: Any, base: Any, stride: Any, index: int, offset: Any) -> Any:
    """base + stride * index + offset, in bytes."""
    return builder.add(builder.add(base, builder.mul(stride, LONG(index))), offset)


def multiply_add(builder: Any, left: Any, right: Any, total: Any) -> Any:
    """left * right + total of float32, rounded once."""
    return call(builder, f"llvm.fma.v{total.type.count}f32", total.type, [left, right, total])


def add_pairs(builder: Any, total: Any, left: Any, right: Any) -> Any:
    """Add to each lane of int32 the products of its pair of int16: one instruction (vpdpwssd) or two,
    which LLVM knows by this form."""
    wide = ir.VectorType(WORD, left.type.count)
    products = builder.mul(builder.sext(left, wide), builder.sext(right, wide), flags=["nsw"])
    sides = [ir.Constant(total.type, list(range(first, left.type.count, 2))) for first in (0, 1)]
    return builder.add(total, builder.add(*(builder.shuffle_vector(products, products, side) for side in sides)))


def scale_by_power(builder: Any, number: Any, power: Any, where: Any) -> Any:
    """number * 2 ** power on sixteen float32, for whole powers; 0 in lanes that are not `where`. Only where there is
    `WIDE`."""
    lanes, as_set = builder.bitcast(where, ir.IntType(LANES)), WORD(4)
    zero = constant(FLOATS, 0.0)
    return call(builder, "llvm.x86.avx512.mask.scalef.ps.512", FLOATS, [number, power, zero, lanes, as_set])


def sum_lanes(builder: Any, four: list[Any]) -> Any:
    """The sums over the lanes of four vectors, as one vector of four."""
    sums = _fold(builder, _fold(builder, four[0], four[1], LANES), _fold(builder, four[2], four[3], LANES), LANES // 2)
    for block in (LANES // 4, LANES // 8):
        sums = _fold(builder, sums, None, block)
    return sums


def sum_all(builder: Any, sums: list[Any]) -> Any:
    """The sum over the lanes of four vectors in memory."""
    four = sum_lanes(builder, [builder.load(chain) for chain in sums])
    total = builder.extract_element(four, WORD(0))
    for lane in range(1, 4):
        total = builder.fadd(total, builder.extract_element(four, WORD(lane)))
    return total


def _fold(builder: Any, left: Any, right: Any, block: int) -> Any:
    """Add the two halves of every block of lanes: those of `left`, then those of `right` if there is one."""
    count = left.type.count * (1 if right is None else 2)
    low = [lane for first in range(0, count, block) for lane in range(first, first + block // 2)]
    index_type = ir.VectorType(WORD, len(low))
    halves = [ir.Constant(index_type, [lane + shift for lane in low]) for shift in (0, block // 2)]
    right = left if right is None else right
    return builder.fadd(*(builder.shuffle_vector(left, right, half) for half in halves))


def narrow(builder: Any, floats: Any) -> Any:
    """Sixteen float32 (or eight, or one) as bfloat16, rounded to nearest even: a vector of as many int16.

    Numbers below 1e-38 may become 0.
    """
    if PAIRS and floats.type == FLOAT:  # one instruction, for as many numbers as a loop's vectors hold
        return builder.bitcast(builder.fptrunc(floats, BFLOAT), HALF_WORD)
    if PAIRS:
        return call(builder, "llvm.x86.avx512bf16.cvtneps2bf16.512", HALF_WORDS, [floats])
    words_type = _alike(WORD, floats)
    bits = builder.bitcast(floats, words_type)
    odd = builder.and_(builder.lshr(bits, constant(words_type, 16)), constant(words_type, 1))
    rounded = builder.lshr(builder.add(bits, builder.add(odd, constant(words_type, 0x7FFF))), constant(words_type, 16))
    number = builder.fcmp_ordered("ord", floats, floats)
    kept = builder.select(number, rounded, constant(words_type, 0x7FC0))  # rounding would make some NaN a number
    return builder.trunc(kept, _alike(HALF_WORD, floats))


def widen_halves(builder: Any, halves: Any, float_format: str) -> Any:
    """Numbers of "bfloat16" or "float16", as int16, as float32. Infinities of float16 become 65,536."""
    wide, floats = _alike(WORD, halves), _alike(FLOAT, halves)
    words = builder.zext(halves, wide)
    if float_format == "bfloat16":
        return builder.bitcast(builder.shl(words, constant(wide, 16)), floats)
    if HALVES:
        return builder.fpext(builder.bitcast(halves, _alike(ir.HalfType(), halves)), floats)
    number = builder.shl(builder.and_(words, constant(wide, 0x7FFF)), constant(wide, 13))
    number = builder.bitcast(builder.fmul(builder.bitcast(number, floats), constant(floats, 2.0**112)), wide)
    sign = builder.shl(builder.and_(words, constant(wide, 0x8000)), constant(wide, 16))
    return builder.bitcast(builder.or_(number, sign), floats)


def read(builder: Any, address: Any, dtype: Any, *, one: bool = False) -> Any:
    """Sixteen numbers of that dtype, or one, as float32."""
    if dtype != numba.types.uint16:
        return load(builder, address, FLOAT if one else FLOATS)
    return widen_halves(builder, load(builder, address, HALF_WORD if one else HALF_WORDS), "bfloat16")


def write(builder: Any, floats: Any, address: Any, dtype: Any) -> None:
    """Store sixteen float32 as numbers of that dtype."""
    store(builder, narrow(builder, floats) if dtype == numba.types.uint16 else floats, address)


def by_slices(builder: Any, whole: Any, lanes: int, apply: Callable[[Any, Any], Any]) -> Any:
    """Join the results of `apply(builder, slice)` for every `lanes` lanes of a vector, for instructions on shorter
    vectors. The number of slices is a power of two."""
    starts = range(0, whole.type.count, lanes)
    slices = [ir.Constant(ir.VectorType(WORD, lanes), list(range(first, first + lanes))) for first in starts]
    results = [apply(builder, builder.shuffle_vector(whole, whole, indices)) for indices in slices]
    while len(results) > 1:
        joined = ir.Constant(ir.VectorType(WORD, 2 * results[0].type.count), list(range(2 * results[0].type.count)))
        results = [builder.shuffle_vector(*pair, joined) for pair in zip(results[::2], results[1::2], strict=True)]
    return results[0]


def look_up(builder: Any, words: Any, table: list[int]) -> Any:
    """Each byte of sixteen words, which is below 16, replaced by that entry of a table of 16 bytes."""
    count = LANES * 4
    indices = builder.bitcast(words, ir.VectorType(BYTE, count))
    if cpu_has("avx512bw"):
        vector_type = ir.VectorType(BYTE, count)
        entries = ir.Constant(vector_type, table * 4)
        return builder.bitcast(call(builder, "llvm.x86.avx512.pshuf.b.512", vector_type, [entries, indices]), WORDS)
    if cpu_has("ssse3") or NEON:  # sixteen at a time
        name = "llvm.aarch64.neon.tbl1.v16i8" if NEON else "llvm.x86.ssse3.pshuf.b.128"
        vector_type = ir.VectorType(BYTE, 16)
        entries = ir.Constant(vector_type, table)
        result = by_slices(builder, indices, 16, lambda builder, own: call(builder, name, vector_type, [entries, own]))
        return builder.bitcast(result, WORDS)
    result = constant(ir.VectorType(BYTE, count), table[0])
    for index, entry in enumerate(table[1:], 1):
        same = builder.icmp_unsigned("==", indices, constant(ir.VectorType(BYTE, count), index))
        result = builder.select(same, constant(ir.VectorType(BYTE, count), entry), result)
    return builder.bitcast(result, WORDS)


def _add_pairs(builder: Any, left: Any, right: Any, total: Any) -> Any:
    return call(builder, "llvm.x86.avx512bf16.dpbf16ps.512", FLOATS, [total, left, right])


def sides(builder: Any, words: Any, dtype: Any) -> list[Any]:
    """The numbers in a word of memory of that dtype, or in each of a vector of them, as float32, in the order in which
    products of them are added: two bfloat16, each the upper half of a float32, or the number itself."""
    several = isinstance(words.type, ir.VectorType)
    floats = ir.VectorType(FLOAT, words.type.count) if several else FLOAT
    if dtype != numba.types.uint16:
        return [builder.bitcast(words, floats)]
    shift, mask = (constant(words.type, value) if several else WORD(value) for value in (16, 0xFFFF0000))
    return [builder.bitcast(side, floats) for side in (builder.shl(words, shift), builder.and_(words, mask))]


def _add_sides(dtype: Any, builder: Any, left: Any, right: Any, total: Any) -> Any:
    for one, other in zip(*(sides(builder, side, dtype) for side in (left, right)), strict=True):
        total = multiply_add(builder, one, other, total)
    return total


ACCUMULATE: dict[Any, Any] = {
    numba.types.float32: functools.partial(_add_sides, numba.types.float32),
    numba.types.uint16: _add_pairs if PAIRS else functools.partial(_add_sides, numba.types.uint16),
    numba.types.int16: functools.partial(_add_sides, numba.types.uint16),
}
"""Functions that add a vector's products to sixteen sums, by dtype. int16 is bfloat16 without the CPU's instruction."""
