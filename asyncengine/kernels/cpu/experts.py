"""A mixture's experts: what each row's chosen ones make of it, summed by weight, in one call.

Weights of all experts lie one below the other, as one packed or quantized weight. (row, expert) pairs are sorted by
expert; then there is one loop over all panels of the experts that are used, for gate and up, and one for down: at one
row only their weights are read, and a step costs two loops, not two for each expert. What multiplies panels is that of
`packed` and `gemm_quantized`. A row's sum goes over its experts in the order in which it chose them: the result depends
neither on the rows beside it nor on the number of threads.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from asyncengine.kernels.cpu import gemm_quantized as gemm
from asyncengine.kernels.cpu.activation import UNGATED, activate, gate, gate_clamped, gate_code
from asyncengine.kernels.cpu.calls import call, parallel_for
from asyncengine.kernels.cpu.gemm_quantized import INPUTS, OUTPUTS, PANELS_AT, QuantizedMatrix, code_for
from asyncengine.kernels.cpu.jit import allocates, array, inline, narrow, pointer, serial_in_order, tag_of, widen
from asyncengine.kernels.cpu.packed import WIDTH, multiply_part
from asyncengine.kernels.cpu.panel_form import PANEL
from asyncengine.kernels.cpu.quantized_tiles import PANELS
from asyncengine.kernels.cpu.team import use_team
from asyncengine.kernels.cpu.team_loops import pieces_of, reads_worth

# What is known of a product x W^T + bias: int64 by place. The address of its code (0: a packed weight, which is not
# rounded), that of its bias (0: none); then the fields of its matrix.
CODE, BIAS, MATRIX = range(3)
PRODUCT_FIELDS = MATRIX + gemm.MATRIX_FIELDS


class LinearWeights(NamedTuple):
    """The weights of one x W^T + bias: panels of `packed`, or a matrix of `gemm_quantized`."""

    weights: torch.Tensor | QuantizedMatrix
    bias: torch.Tensor | None
    inputs: int
    outputs: int

    def fields(self, dtype: torch.dtype) -> list[int]:
        """CODE .. and those of the matrix, for results of that type."""
        bias = 0 if self.bias is None else self.bias.data_ptr()
        if isinstance(self.weights, QuantizedMatrix):
            return [code_for(self.weights.form, dtype), bias, *self.weights.fields().tolist()]
        matrix = [0] * gemm.MATRIX_FIELDS
        matrix[PANELS_AT], matrix[INPUTS] = self.weights.data_ptr(), self.inputs
        matrix[OUTPUTS] = self.outputs
        return [0, bias, *matrix]


ALIGNED = WIDTH
"""Outputs of an expert are a multiple of it: then each begins with a panel, packed or quantized."""
# The two products; OUTPUTS and BYTES are those of one expert.
UP, DOWN = range(2)
# Parts of the memory of a call.
_ORDER, _PLACE, _BEGINS, _ACTIVE, _GATHERED, _BOTH, _INNER, _MADE, _ROUNDED = range(9)
_PARTS = 9
_LINE = 64
_EVEN = 8
"""Rows of an expert whose arithmetic takes about as long as reading its panels."""
_CHUNK = 2**18
"""Bytes of an expert's weights in a piece at least."""
_ROUNDING = 16
"""Bytes that could be read while a number of x is rounded."""
_COLUMNS = 256
"""Numbers of a row that are summed at once."""
CLAMPED = -1
"""The `activation` of neighbours with bounds (`activation.gate_clamped`)."""


class ExpertsForm(NamedTuple):
    """Sizes of a mixture, and what is between its two products."""

    experts: int
    activation: int
    """A number of `activation.activation_id`, or `CLAMPED`. An expert that is not gated has one half only."""
    alpha: float = 0.0
    limit: float = 0.0
    """The bound of `CLAMPED`."""


class ExpertsKernel:
    """One layer's experts. `up` and `down` are those of all experts, one below the other, in any forms."""

    def __init__(self, up: LinearWeights, down: LinearWeights, form: ExpertsForm, dtype: torch.dtype) -> None:
        """`dtype`: that of all rows."""
        self.parts = [up, down]  # an address keeps nothing where it is
        rounded = [isinstance(part.weights, QuantizedMatrix) for part in self.parts]
        self._forms = np.uint8(0) if True in rounded else None, np.uint8(0) if False in rounded else None
        self.form = form
        self._width, self._both, self._inner = up.inputs, up.outputs // form.experts, down.inputs
        self._record = np.array([part.fields(dtype) for part in self.parts], dtype=np.int64)
        self._record[:, [MATRIX + OUTPUTS, MATRIX + gemm.BYTES]] //= form.experts
        self.address: int = self._record.ctypes.data

    def scratch_bytes(self, pairs: int, size: int) -> int:
        """Memory that a call takes for so many (row, expert) pairs, for numbers of `size` bytes."""
        numbers = pairs * ((2 * self._width + self._both + self._inner) * size + 16)
        quantized = [part.weights for part in self.parts if isinstance(part.weights, QuantizedMatrix)]
        rounded = max((matrix.scratch_bytes(pairs) for matrix in quantized), default=0)
        return numbers + rounded + self.form.experts * 16 + (_PARTS + 2) * _LINE

    def __call__(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor | None, out: torch.Tensor) -> None:
        """out [rows, width] = the sum of what the experts `chosen` (int64 [rows, k]) make of x, times `weights`
        (float32 alike; None: 1). All contiguous, x and out of one type; the k experts of a row differ."""
        rows, count = chosen.shape
        form, size = self.form, x.element_size()
        scratch = torch.empty(self.scratch_bytes(rows * count, size), dtype=torch.uint8)
        run_experts(
            self.address, scratch.data_ptr(), x.data_ptr(), chosen.data_ptr(),
            0 if weights is None else weights.data_ptr(), out.data_ptr(), rows, count, form.experts,
            gate_code(form.activation, x.dtype),
            np.float32(form.alpha), np.float32(form.limit), *self._forms, tag_of(x.dtype), size, use_team(),
        )  # fmt: skip


@serial_in_order
@allocates
def run_experts(
    record: int, scratch: int, x: int, chosen: int, weights: int, out: int, rows: int, count: int, experts: int,
    activation: int, alpha: np.float32, limit: np.float32, rounds: np.generic | None, packs: np.generic | None,
    kind: np.generic, size: int, team: int,
) -> None:  # fmt: skip
    """An `ExpertsKernel` by address. `activation` is what `gate_code` says. `rounds`, `packs`: quantized and packed
    products; None where there are none, for which no code is compiled then."""
    linears = array(pointer(record, np.int64(0)), (2, PRODUCT_FIELDS))
    pairs, width, inner = rows * count, linears[UP, MATRIX + INPUTS], linears[DOWN, MATRIX + INPUTS]
    memory = _parts_of(scratch, pairs, width, linears[UP, MATRIX + OUTPUTS], inner, experts, size)
    order, begins, active = memory[_ORDER], memory[_BEGINS], memory[_ACTIVE]
    used = _sort_pairs(chosen, order, memory[_PLACE], begins, active, pairs, experts)
    source, one = memory[_GATHERED], rows == 1  # which all of its experts take as it is
    if one:
        source = x
    else:
        pieces = pieces_of(pairs * width * size * 2, pairs, team)
        parallel_for(_gather_part, team, pieces, (x, order, source, pairs, count, width * size))
    _multiply(linears[UP], source, one, memory, memory[_BOTH], pairs, used, rounds, packs, kind, size, team)
    if activation == CLAMPED:
        gate_clamped(memory[_BOTH], memory[_INNER], pairs, inner, alpha, limit, kind, team)
    elif UNGATED <= activation < 2 * UNGATED:
        activate(memory[_BOTH], pairs, inner, activation - UNGATED, 0, kind, team)
        memory[_INNER] = memory[_BOTH]
    else:
        gate(memory[_BOTH], memory[_INNER], pairs, inner, activation, kind, team)
    _multiply(linears[DOWN], memory[_INNER], False, memory, memory[_MADE], pairs, used, rounds, packs, kind, size, team)
    blocks = -(-width // _COLUMNS)
    pieces = pieces_of(pairs * width * size * 2, rows * blocks, team)
    parallel_for(_sum_part, team, pieces, (memory[_MADE], memory[_PLACE], weights, out, rows, count, width, kind, size))


@inline
def _parts_of(
    scratch: int, pairs: int, width: int, both: int, inner: int, experts: int, size: int
) -> NDArray[np.int64]:
    """Offsets of the parts of a call's memory; the last part goes to its end."""
    parts = np.empty(_PARTS, np.int64)
    parts[_ORDER] = parts[_PLACE] = 8 * pairs
    parts[_BEGINS], parts[_ACTIVE] = 8 * (experts + 1), 8 * experts
    parts[_GATHERED] = parts[_MADE] = pairs * width * size
    parts[_BOTH], parts[_INNER] = pairs * both * size, pairs * inner * size
    parts[_ROUNDED] = 0
    at = -(-scratch // _LINE) * _LINE
    for part in range(_PARTS):
        begin, at = at, at + -(-parts[part] // _LINE) * _LINE
        parts[part] = begin
    return parts


@serial_in_order
@allocates
def _sort_pairs(chosen: int, order: int, place: int, begins: int, active: int, pairs: int, experts: int) -> int:
    """Pairs by expert, in the order of rows within each; which experts have any; how many these are.

    `order`: the pair at each place. `place`: the place of each pair. `begins`: [experts + 1].
    """
    whole = np.int64(0)
    ids, ordered = array(pointer(chosen, whole), (pairs,)), array(pointer(order, whole), (pairs,))
    places, firsts = array(pointer(place, whole), (pairs,)), array(pointer(begins, whole), (experts + 1,))
    having = array(pointer(active, whole), (experts,))
    firsts[:] = 0
    for pair in range(pairs):
        firsts[ids[pair] + 1] += 1
    used = 0
    for expert in range(experts):
        if firsts[expert + 1] > 0:
            having[used] = expert
            used += 1
        firsts[expert + 1] += firsts[expert]
    ends = np.empty(experts, np.int64)
    ends[:] = firsts[:experts]
    for pair in range(pairs):
        at = ends[ids[pair]]
        ends[ids[pair]] = at + 1
        places[pair], ordered[at] = at, pair
    return used


@serial_in_order
@allocates  # rows are copied as arrays
def _gather_part(
    piece: int, pieces: int, worker: int, x: int, order: int, out: int, pairs: int, count: int, size: int
) -> None:
    """Rows of x, of `size` bytes, in the order of the sorted pairs."""
    first, last = pairs * piece // pieces, pairs * (piece + 1) // pieces
    ordered = array(pointer(order, np.int64(0)), (last,))
    words = size // 4
    for at in range(first, last):
        source = array(pointer(x + ordered[at] // count * size, np.uint32(0)), (words,))
        target = array(pointer(out + at * size, np.uint32(0)), (words,))
        target[:] = source


@serial_in_order
def _multiply(
    linear: NDArray[np.int64], x: int, one: bool, memory: NDArray[np.int64], out: int, pairs: int, used: int,
    rounds: np.generic | None, packs: np.generic | None, kind: np.generic, size: int, team: int,
) -> None:  # fmt: skip
    """out [pairs, OUTPUTS] = x [pairs, INPUTS] W^T + bias, of the expert of each pair. `one`: x is one row, of all."""
    if rounds is None:
        _multiply_packed(linear, x, one, memory, out, pairs, used, kind, size, team)
    elif packs is None or linear[CODE] != 0:
        _multiply_rounded(linear, x, one, memory, out, pairs, used, kind, size, team)
    else:
        _multiply_packed(linear, x, one, memory, out, pairs, used, kind, size, team)


@serial_in_order
def _multiply_packed(
    linear: NDArray[np.int64], x: int, one: bool, memory: NDArray[np.int64], out: int, pairs: int, used: int,
    kind: np.generic, size: int, team: int,
) -> None:  # fmt: skip
    inputs, outputs, weights = linear[MATRIX + INPUTS], linear[MATRIX + OUTPUTS], linear[MATRIX + PANELS_AT]
    panels = outputs // WIDTH
    chunks = _chunks(inputs * outputs * size, panels, -(-pairs // used), used, team)
    parallel_for(
        _packed_part, team, used * chunks,
        (
            weights, linear[BIAS], x, 0 if one else inputs * size, out, memory[_BEGINS], memory[_ACTIVE], chunks,
            inputs * size, panels, kind, size,
        ),
    )  # fmt: skip


@serial_in_order
def _multiply_rounded(
    linear: NDArray[np.int64], x: int, one: bool, memory: NDArray[np.int64], out: int, pairs: int, used: int,
    kind: np.generic, size: int, team: int,
) -> None:  # fmt: skip
    outputs, address = linear[MATRIX + OUTPUTS], linear.ctypes.data
    different = 1 if one else used  # rows of the first expert are that one row
    pieces = pieces_of(pairs * linear[MATRIX + INPUTS] * _ROUNDING, different, team)
    parallel_for(
        _round_rows_part, team, pieces,
        (address, x, memory[_ROUNDED], memory[_BEGINS], memory[_ACTIVE], different, kind, size),
    )  # fmt: skip
    step = 0 if one else _rounded_row(linear[MATRIX:])
    most = -(-outputs // (PANELS * PANEL))
    chunks = _chunks(linear[MATRIX + gemm.BYTES], most, -(-pairs // used), used, team)
    parallel_for(
        _quantized_part, team, used * chunks,
        (address, memory[_ROUNDED], step, out, memory[_BEGINS], memory[_ACTIVE], chunks, kind, size),
    )  # fmt: skip


@inline
def _chunks(work: int, most: int, rows: int, used: int, team: int) -> int:
    """Parts of an expert's weight, of `work` bytes, that are pieces: enough that all threads end together."""
    wanted = pieces_of(work * used * reads_worth(rows, _EVEN), most * used, team)
    return max(1, min(-(-wanted // used), most, work // _CHUNK)) if team != 0 else 1


@serial_in_order
def _packed_part(
    piece: int, pieces: int, worker: int,
    weights: int, bias: int, x: int, step: int, out: int, begins: int, active: int, chunks: int, row_size: int,
    panels: int, kind: np.generic, size: int,
) -> None:  # fmt: skip
    """Some panels of one expert, for all its rows. `row_size`: bytes of a row of x; `step`: to that of the next."""
    expert = array(pointer(active, np.int64(0)), (piece // chunks + 1,))[piece // chunks]
    firsts = array(pointer(begins, np.int64(0)), (expert + 2,))
    begin, rows = firsts[expert], firsts[expert + 1] - firsts[expert]
    added = bias + expert * panels * WIDTH * 4 if bias != 0 else 0
    arguments = (
        piece % chunks, chunks, worker, x + begin * step, weights + expert * panels * WIDTH * row_size, added,
        out + begin * panels * WIDTH * size, panels * WIDTH * size, rows, row_size, panels, kind, size,
    )  # fmt: skip
    call(multiply_part, arguments)


@inline
def _rounded_row(matrix: NDArray[np.int64]) -> int:
    """Bytes of a rounded row: its numbers, scales and sums, as `PanelForm.row_bytes` has them."""
    width = matrix[gemm.CHUNKS] * matrix[gemm.CHUNK_INPUTS]
    numbers = width * 4 if matrix[gemm.SUM_FORM] == gemm.EXACT else width + width // matrix[gemm.SHARED] * 4
    size: int = numbers + width // matrix[gemm.SUMMED] * 4 + gemm.SPARED
    return size


@serial_in_order
def _round_rows_part(
    piece: int, pieces: int, worker: int,
    linear: int, x: int, rounded: int, begins: int, active: int, used: int, kind: np.generic, size: int,
) -> None:  # fmt: skip
    """Rows of some experts, each expert's in a block of its own, as a product takes them."""
    first, last = used * piece // pieces, used * (piece + 1) // pieces
    having = array(pointer(active, np.int64(0)), (last,))
    matrix = array(pointer(linear, np.int64(0)), (PRODUCT_FIELDS,))[MATRIX:]
    inputs, groups = matrix[INPUTS], matrix[gemm.CHUNKS] * matrix[gemm.CHUNK_INPUTS] // matrix[gemm.SHARED]
    for place in range(first, last):
        expert = having[place]
        firsts = array(pointer(begins, np.int64(0)), (expert + 2,))
        begin, rows = firsts[expert], firsts[expert + 1] - firsts[expert]
        source, target = x + begin * inputs * size, rounded + begin * _rounded_row(matrix)
        arguments = (
            0, 1, worker, source, matrix[gemm.ORDER], target, rows, inputs, groups, matrix[gemm.SHARED],
            matrix[gemm.SUMMED], matrix[gemm.SUM_FORM], kind, size,
        )  # fmt: skip
        call(gemm.round_part, arguments)


@serial_in_order
def _quantized_part(
    piece: int, pieces: int, worker: int,
    linear: int, rounded: int, step: int, out: int, begins: int, active: int, chunks: int, kind: np.generic, size: int,
) -> None:  # fmt: skip
    """Some panels of one expert, for all its rows. `step`: bytes from a pair's rounded row to that of the next."""
    expert = array(pointer(active, np.int64(0)), (piece // chunks + 1,))[piece // chunks]
    firsts = array(pointer(begins, np.int64(0)), (expert + 2,))
    begin, rows = firsts[expert], firsts[expert + 1] - firsts[expert]
    product = array(pointer(linear, np.int64(0)), (PRODUCT_FIELDS,))
    matrix = product[MATRIX:]
    outputs, bias, scales = matrix[OUTPUTS], product[BIAS], matrix[gemm.ROW_SCALES]
    own = matrix[PANELS_AT] + expert * matrix[gemm.BYTES]
    its_scales = scales + expert * outputs * 4 if scales != 0 else 0
    added = bias + expert * outputs * 4 if bias != 0 else 0
    source, target = rounded + begin * step, out + begin * outputs * size
    arguments = (
        piece % chunks, chunks, worker, own, its_scales, added, target, source, rows, matrix[gemm.CHUNKS], outputs,
        outputs, kind,
    )  # fmt: skip
    call(product[CODE], arguments)


@serial_in_order
@allocates
def _sum_part(
    piece: int, pieces: int, worker: int,
    made: int, place: int, weights: int, out: int, rows: int, count: int, width: int, kind: np.generic, size: int,
) -> None:  # fmt: skip
    """Blocks of rows of the result: sums over each row's experts, in the order it chose them."""
    blocks = -(-width // _COLUMNS)
    first, last = rows * blocks * piece // pieces, rows * blocks * (piece + 1) // pieces
    sums = np.empty(_COLUMNS, np.float32)
    places = array(pointer(place, np.int64(0)), (rows * count,))
    shares = array(pointer(weights, np.float32(0)), (rows * count,))
    for block in range(first, last):
        row, begin = block // blocks, block % blocks * _COLUMNS
        columns = min(_COLUMNS, width - begin)
        sums[:] = 0
        for pair in range(row * count, (row + 1) * count):
            share = shares[pair] if weights != 0 else np.float32(1)
            values = array(pointer(made + (places[pair] * width + begin) * size, kind), (columns,))
            for column in range(columns):
                sums[column] += share * widen(values[column])
        result = array(pointer(out + (row * width + begin) * size, kind), (columns,))
        for column in range(columns):
            result[column] = narrow(sums[column], kind)
