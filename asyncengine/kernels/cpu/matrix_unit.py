"""Products of bfloat16 by the CPU's matrix unit (Intel's AMX), with the panels of `packed`.

The unit has eight tiles of up to sixteen rows of 64 bytes. One instruction adds to a tile of sums [16 rows, 16 outputs]
the products of a tile of x [16 rows, 32 inputs] and a tile of weights [16 pairs of inputs, 16 outputs]: sixteen lines
of one of a panel's two vectors, as they lie there. Sums of up to 32 rows by one panel take four tiles (Intel, "64 and
IA-32 Architectures Optimization Reference Manual", chapter 20).

A row of a tile is computed by itself, and inputs are added in one order whatever the number of rows: so a row's result
depends neither on the rows beside it nor on the number of threads. It is another one than that of `packed`'s tiles,
as pairs are added in another order.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils

from asyncengine.kernels.cpu import vectors
from asyncengine.kernels.cpu.intrinsics import INT64, emitted
from asyncengine.kernels.cpu.jit import inline
from asyncengine.kernels.cpu.vectors import BYTE, FLOATS, LINE, LONG, at, call, load

ROWS = 16
"""Rows of a tile."""
MOST = 2 * ROWS
"""Rows of x that are multiplied by a panel at once."""
STEP = 64
"""Bytes of a row of x in a tile: rows of x are whole steps."""
_SUMS, X, WEIGHTS = (0, 2), (4, 5), (6, 7)
"""Numbers of tiles: sums of the first rows and of those behind them, by vector from there on; rows of x; weights."""
_NOTHING = ir.VoidType()


def _tile(number: int) -> Any:
    return ir.Constant(BYTE, number)


def load_tile(builder: Any, tile: int, address: Any, stride: Any) -> None:
    """Fill a tile with rows that are `stride` bytes apart, as many and as long as it is configured for."""
    where = builder.inttoptr(address, BYTE.as_pointer())
    call(builder, "llvm.x86.tileloadd64", _NOTHING, [_tile(tile), where, stride])


def store_tile(builder: Any, tile: int, address: Any, stride: Any) -> None:
    where = builder.inttoptr(address, BYTE.as_pointer())
    call(builder, "llvm.x86.tilestored64", _NOTHING, [_tile(tile), where, stride])


def zero_tile(builder: Any, tile: int) -> None:
    call(builder, "llvm.x86.tilezero", _NOTHING, [_tile(tile)])


def multiply_tiles(builder: Any, instruction: str, sums: int, x: int, weights: int) -> None:
    """Add products to the tile `sums`: "bf16ps" of pairs of bfloat16, "bsud" of bytes, those of x with sign."""
    call(builder, f"llvm.x86.tdp{instruction}", _NOTHING, [_tile(sums), _tile(x), _tile(weights)])


@emitted(*[INT64] * 3)
def configure_unit(builder: Any, first: Any, second: Any, width: Any) -> None:
    """Configure this thread's tiles: 0, 1 and 4 of `first` rows, 2, 3 and 5 of `second`; 4 and 5, of x, of `width`
    bytes a row, the others of 64; 6 and 7, of weights, of the rows that such an x is multiplied by. 1 to 16 rows, 4 to
    64 bytes."""
    base = builder.ptrtoint(cgutils.alloca_once(builder, ir.ArrayType(BYTE, STEP)), LONG)
    vectors.store(builder, ir.Constant(ir.VectorType(BYTE, STEP), [1] + [0] * (STEP - 1)), base)  # the one palette
    for number in range(8):
        height = second if number in (2, 3, 5) else first
        if number in WEIGHTS:
            height = builder.lshr(width, LONG(2))
        across = builder.trunc(width if number in X else LONG(STEP), ir.IntType(16))
        vectors.store(builder, across, builder.add(base, LONG(16 + 2 * number)))
        vectors.store(builder, builder.trunc(height, BYTE), builder.add(base, LONG(48 + number)))
    call(builder, "llvm.x86.ldtilecfg", _NOTHING, [builder.inttoptr(base, BYTE.as_pointer())])


@emitted()
def release_unit(builder: Any) -> None:
    """Release the tiles of this thread, so that the system need not save them when it switches threads."""
    call(builder, "llvm.x86.tilerelease", _NOTHING, [])


def _write_tiles(
    builder: Any, x: Any, x_size: Any, panel: Any, steps: Any, bias: Any, out: Any, across: Any, out_size: Any,
    rows: Any, *, halves: int,
) -> None:  # fmt: skip
    """Write out [rows, 32] = x W^T + bias, of up to 16 rows (`halves` 1) or 17 to 32, after `configure_unit`.

    Addresses, bytes of a row of x and of `out` (`across`) and of a number there. No bias: address 0.
    """
    sums = _add_up(builder, halves, x, x_size, panel, steps)
    cells = [cgutils.alloca_once_value(builder, vectors.constant(FLOATS, 0.0)) for _ in range(2)]
    with builder.if_then(builder.icmp_signed("!=", bias, LONG(0))):
        for vector, cell in enumerate(cells):
            builder.store(load(builder, builder.add(bias, LONG(vector * LINE)), FLOATS), cell)
    is_narrow = builder.icmp_signed("==", out_size, LONG(2))
    with cgutils.for_range(builder, rows) as loop:
        source = builder.add(sums, builder.mul(loop.index, LONG(2 * LINE)))
        target = builder.add(out, builder.mul(loop.index, across))
        for vector, cell in enumerate(cells):
            total = load(builder, builder.add(source, LONG(vector * LINE)), FLOATS)
            result = builder.fadd(total, builder.load(cell))
            with builder.if_else(is_narrow) as (narrow, wide):
                with narrow:
                    address = builder.add(target, LONG(vector * LINE // 2))
                    vectors.store(builder, vectors.narrow(builder, result), address)
                with wide:
                    vectors.store(builder, result, builder.add(target, LONG(vector * LINE)))


def _add_up(builder: Any, halves: int, x: Any, x_size: Any, panel: Any, steps: Any) -> Any:
    """The address of sums [rows, 32], float32. Each tile is loaded just before it is first needed: loading what is
    multiplied next and multiplying go on side by side."""
    for half in range(halves):
        for vector in range(2):
            zero_tile(builder, _SUMS[half] + vector)
    with cgutils.for_range(builder, steps) as loop:
        address = builder.add(panel, builder.mul(loop.index, LONG(2 * LINE * ROWS)))
        for half in range(halves):
            x_rows = builder.add(at(builder, x, x_size, half * ROWS, LONG(0)), builder.mul(loop.index, LONG(STEP)))
            for vector in range(2):
                if half == 0:
                    load_tile(builder, WEIGHTS[vector], builder.add(address, LONG(vector * LINE)), LONG(2 * LINE))
                if vector == 0:
                    load_tile(builder, X[half], x_rows, x_size)
                multiply_tiles(builder, "bf16ps", _SUMS[half] + vector, X[half], WEIGHTS[vector])
    sums = builder.ptrtoint(cgutils.alloca_once(builder, ir.ArrayType(FLOATS, 2 * ROWS * halves)), LONG)
    for half in range(halves):
        for vector in range(2):
            address = builder.add(sums, LONG((half * ROWS * 2 + vector) * LINE))
            store_tile(builder, _SUMS[half] + vector, address, LONG(2 * LINE))
    return sums


_few_rows, _many_rows = (emitted(*[INT64] * 9, halves=halves)(_write_tiles) for halves in (1, 2))


@inline
def multiply_by_unit(
    x: int, panels: int, bias: int, out: int, across: int, rows: int, size: int, first: int, last: int, block: int,
    out_size: int,
) -> None:  # fmt: skip
    """Multiply `rows` rows of x, of `size` bytes each, by panels [first, last) of bfloat16; the other arguments are
    those of `packed.multiply`. The last tile of rows is moved back, so that it is full, and overlaps the one before."""
    tile, steps = min(rows, MOST), size // STEP
    configure_unit(min(tile, ROWS), max(tile - ROWS, 1), STEP)
    for begin in range(first, last, block):
        for turn in range((rows + MOST - 1) // MOST):
            row = min(turn * MOST, rows - tile)
            for index in range(begin, min(begin + block, last)):
                source, target = x + row * size, out + row * across + index * 2 * ROWS * out_size
                panel, own_bias = panels + index * size * 2 * ROWS, bias + index * 2 * ROWS * 4 if bias != 0 else 0
                if tile <= ROWS:
                    _few_rows(source, size, panel, steps, own_bias, target, across, out_size, tile)
                else:
                    _many_rows(source, size, panel, steps, own_bias, target, across, out_size, tile)
    release_unit()
