"""A mixture of experts: each row's weighted sum over the experts that the router chose for it, in one call.

Weights of all experts lie one below the other, as one packed or quantized weight. (row, expert) pairs are sorted by
expert; then there is one loop over all panels of the experts that are used, for gate and up, and one for down: at one
row only their weights are read, and a step costs two loops, not two for each expert. Panels are multiplied by the
kernels of `packed` and `gemm_quantized`. A row's sum goes over its experts in the order in which it chose them: the
result depends neither on the rows beside it nor on the number of threads.
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

# Indices of the record of a product x W^T + bias, int64: the address of its code (0: the weight is packed, not
# quantized), that of its bias (0: none); then the fields of its matrix.
CODE, BIAS, MATRIX = range(3)
PRODUCT_FIELDS = MATRIX + gemm.MATRIX_FIELDS


class LinearWeights(NamedTuple):
    """The weights of one x W^T + bias: panels of `packed`, or a matrix of `gemm_quantized`."""

    weights: torch.Tensor | QuantizedMatrix
    bias: torch.Tensor | None
    inputs: int
    outputs: int

    def fields(self, dtype: torch.dtype) -> list[int]:
        """The record CODE, BIAS and the fields of the matrix, for results of that dtype."""
        bias = 0 if self.bias is None else self.bias.data_ptr()
        if isinstance(self.weights, QuantizedMatrix):
            return [code_for(self.weights.form, dtype), bias, *self.weights.fields().tolist()]
        matrix = [0] * gemm.MATRIX_FIELDS
        matrix[PANELS_AT], matrix[INPUTS] = self.weights.data_ptr(), self.inputs
        matrix[OUTPUTS] = self.outputs
        return [0, bias, *matrix]


ALIGNED = WIDTH
"""Outputs of an expert are a multiple of it, so that each expert begins with a panel, packed or quantized."""
# The two products; OUTPUTS and BYTES are those of one expert.
UP, DOWN = range(2)
# Buffers in the scratch memory of a call.
_ORDER, _POSITION, _BEGINS, _ACTIVE, _GATHERED, _GATE_UP, _INNER, _RESULTS, _ROUNDED = range(9)
_BUFFERS = 9
_LINE = 64
_EVEN = 8
"""Rows of an expert whose arithmetic takes about as long as reading its panels."""
_CHUNK = 2**18
"""The fewest bytes of an expert's weights in a piece."""
_ROUNDING = 16
"""Bytes that could be read while a number of x is rounded."""
_COLUMNS = 256
"""Numbers of a row that are summed at once."""
CLAMPED = -1
"""The `activation` of gpt-oss, of interleaved gate and up with bounds (`activation.gate_clamped`)."""


class ExpertsForm(NamedTuple):
    """Sizes of a mixture, and the activation between its two products."""

    experts: int
    activation: int
    """An id of `activation.activation_id`, or `CLAMPED`. Without a gate, `up` has no gate's half."""
    alpha: float = 0.0
    limit: float = 0.0
    """The bound of `CLAMPED`."""


class ExpertsKernel:
    """One layer's experts. `up` and `down` are the weights of all experts, one below the other, in any forms."""

    def __init__(self, up: LinearWeights, down: LinearWeights, form: ExpertsForm, dtype: torch.dtype) -> None:
        """`dtype`: of x and the results."""
        self._linears = [up, down]  # kept here because addresses do not keep memory alive
        quantized = [isinstance(linear.weights, QuantizedMatrix) for linear in self._linears]
        self._forms = np.uint8(0) if True in quantized else None, np.uint8(0) if False in quantized else None
        self.form = form
        self._width, self._gate_up, self._inner = up.inputs, up.outputs // form.experts, down.inputs
        self._record = np.array([linear.fields(dtype) for linear in self._linears], dtype=np.int64)
        self._record[:, [MATRIX + OUTPUTS, MATRIX + gemm.BYTES]] //= form.experts
        self.address: int = self._record.ctypes.data

    def scratch_bytes(self, pairs: int, size: int) -> int:
        """Bytes of scratch memory for a call with `pairs` (row, expert) pairs, of numbers of `size` bytes."""
        numbers = pairs * ((2 * self._width + self._gate_up + self._inner) * size + 16)
        quantized = [linear.weights for linear in self._linears if isinstance(linear.weights, QuantizedMatrix)]
        rounded = max((matrix.scratch_bytes(pairs) for matrix in quantized), default=0)
        return numbers + rounded + self.form.experts * 16 + (_BUFFERS + 2) * _LINE

    def __call__(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor | None, out: torch.Tensor) -> None:
        """out [rows, width] = the sum of the results of the experts `chosen` (int64 [rows, k]) for x, times `weights`
        (float32 [rows, k]; None: 1). All contiguous, x and out of one dtype; the k experts of a row differ."""
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
    activation: int, alpha: np.float32, limit: np.float32, quantized: np.generic | None, packed: np.generic | None,
    dtype: np.generic, size: int, team: int,
) -> None:  # fmt: skip
    """An `ExpertsKernel` by address. `activation`: from `gate_code`. `quantized`, `packed`: any number if there are
    such products, else None, whose type keeps code for them from being compiled."""
    linears = array(pointer(record, np.int64(0)), (2, PRODUCT_FIELDS))
    pairs, width, inner = rows * count, linears[UP, MATRIX + INPUTS], linears[DOWN, MATRIX + INPUTS]
    memory = _buffers_of(scratch, pairs, width, linears[UP, MATRIX + OUTPUTS], inner, experts, size)
    order, begins, active = memory[_ORDER], memory[_BEGINS], memory[_ACTIVE]
    used = _sort_pairs(chosen, order, memory[_POSITION], begins, active, pairs, experts)
    source, one_row = memory[_GATHERED], rows == 1  # one row need not be gathered: all of its experts read it
    if one_row:
        source = x
    else:
        pieces = pieces_of(pairs * width * size * 2, pairs, team)
        parallel_for(_gather_piece, team, pieces, (x, order, source, pairs, count, width * size))
    _multiply(linears[UP], source, one_row, memory, memory[_GATE_UP], pairs, used, quantized, packed, dtype, size, team)
    if activation == CLAMPED:
        gate_clamped(memory[_GATE_UP], memory[_INNER], pairs, inner, alpha, limit, dtype, team)
    elif UNGATED <= activation < 2 * UNGATED:
        activate(memory[_GATE_UP], pairs, inner, activation - UNGATED, 0, dtype, team)
        memory[_INNER] = memory[_GATE_UP]
    else:
        gate(memory[_GATE_UP], memory[_INNER], pairs, inner, activation, dtype, team)
    inner_rows, results = memory[_INNER], memory[_RESULTS]
    _multiply(linears[DOWN], inner_rows, False, memory, results, pairs, used, quantized, packed, dtype, size, team)
    blocks = -(-width // _COLUMNS)
    pieces = pieces_of(pairs * width * size * 2, rows * blocks, team)
    parallel_for(_sum_piece, team, pieces, (results, memory[_POSITION], weights, out, rows, count, width, dtype, size))


@inline
def _buffers_of(
    scratch: int, pairs: int, width: int, gate_up: int, inner: int, experts: int, size: int
) -> NDArray[np.int64]:
    """Addresses of the buffers in a call's memory, in the order of their numbers; the last one goes to its end."""
    buffers = np.empty(_BUFFERS, np.int64)
    buffers[_ORDER] = buffers[_POSITION] = 8 * pairs
    buffers[_BEGINS], buffers[_ACTIVE] = 8 * (experts + 1), 8 * experts
    buffers[_GATHERED] = buffers[_RESULTS] = pairs * width * size
    buffers[_GATE_UP], buffers[_INNER] = pairs * gate_up * size, pairs * inner * size
    buffers[_ROUNDED] = 0
    at = -(-scratch // _LINE) * _LINE
    for buffer in range(_BUFFERS):
        begin, at = at, at + -(-buffers[buffer] // _LINE) * _LINE
        buffers[buffer] = begin
    return buffers


@serial_in_order
@allocates
def _sort_pairs(chosen: int, order: int, position: int, begins: int, active: int, pairs: int, experts: int) -> int:
    """Sort (row, expert) pairs by expert, in the order of rows within each; return the number of experts that have any.

    Writes the pair at each position to `order`, the position of each pair to `position`, the first position of each
    expert to `begins`, [experts + 1], and the experts that have any to `active`.
    """
    whole = np.int64(0)
    ids, ordered = array(pointer(chosen, whole), (pairs,)), array(pointer(order, whole), (pairs,))
    positions, firsts = array(pointer(position, whole), (pairs,)), array(pointer(begins, whole), (experts + 1,))
    active_ids = array(pointer(active, whole), (experts,))
    firsts[:] = 0
    for pair in range(pairs):
        firsts[ids[pair] + 1] += 1
    used = 0
    for expert in range(experts):
        if firsts[expert + 1] > 0:
            active_ids[used] = expert
            used += 1
        firsts[expert + 1] += firsts[expert]
    ends = np.empty(experts, np.int64)
    ends[:] = firsts[:experts]
    for pair in range(pairs):
        index = ends[ids[pair]]
        ends[ids[pair]] = index + 1
        positions[pair], ordered[index] = index, pair
    return used


@serial_in_order
@allocates  # rows are copied as arrays
def _gather_piece(
    piece: int, pieces: int, worker: int, x: int, order: int, out: int, pairs: int, count: int, size: int
) -> None:
    """Copy rows of x, of `size` bytes, in the order of the sorted pairs."""
    first, last = pairs * piece // pieces, pairs * (piece + 1) // pieces
    ordered = array(pointer(order, np.int64(0)), (last,))
    words = size // 4
    for index in range(first, last):
        source = array(pointer(x + ordered[index] // count * size, np.uint32(0)), (words,))
        target = array(pointer(out + index * size, np.uint32(0)), (words,))
        target[:] = source


@serial_in_order
def _multiply(
    linear: NDArray[np.int64], x: int, one_row: bool, memory: NDArray[np.int64], out: int, pairs: int, used: int,
    quantized: np.generic | None, packed: np.generic | None, dtype: np.generic, size: int, team: int,
) -> None:  # fmt: skip
    """out [pairs, OUTPUTS] = x [pairs, INPUTS] W^T + bias, of the expert of each pair. `one_row`: x is one row."""
    if quantized is None:
        _multiply_packed(linear, x, one_row, memory, out, pairs, used, dtype, size, team)
    elif packed is None or linear[CODE] != 0:
        _multiply_quantized(linear, x, one_row, memory, out, pairs, used, dtype, size, team)
    else:
        _multiply_packed(linear, x, one_row, memory, out, pairs, used, dtype, size, team)


@serial_in_order
def _multiply_packed(
    linear: NDArray[np.int64], x: int, one_row: bool, memory: NDArray[np.int64], out: int, pairs: int, used: int,
    dtype: np.generic, size: int, team: int,
) -> None:  # fmt: skip
    inputs, outputs, weights = linear[MATRIX + INPUTS], linear[MATRIX + OUTPUTS], linear[MATRIX + PANELS_AT]
    panels = outputs // WIDTH
    chunks = _chunks(inputs * outputs * size, panels, -(-pairs // used), used, team)
    parallel_for(
        _packed_piece, team, used * chunks,
        (
            weights, linear[BIAS], x, 0 if one_row else inputs * size, out, memory[_BEGINS], memory[_ACTIVE], chunks,
            inputs * size, panels, dtype, size,
        ),
    )  # fmt: skip


@serial_in_order
def _multiply_quantized(
    linear: NDArray[np.int64], x: int, one_row: bool, memory: NDArray[np.int64], out: int, pairs: int, used: int,
    dtype: np.generic, size: int, team: int,
) -> None:  # fmt: skip
    outputs, address = linear[MATRIX + OUTPUTS], linear.ctypes.data
    distinct = 1 if one_row else used  # rows of the first expert are that one row
    pieces = pieces_of(pairs * linear[MATRIX + INPUTS] * _ROUNDING, distinct, team)
    parallel_for(
        _round_rows_piece, team, pieces,
        (address, x, memory[_ROUNDED], memory[_BEGINS], memory[_ACTIVE], distinct, dtype, size),
    )  # fmt: skip
    step = 0 if one_row else _rounded_bytes(linear[MATRIX:])
    limit = -(-outputs // (PANELS * PANEL))
    chunks = _chunks(linear[MATRIX + gemm.BYTES], limit, -(-pairs // used), used, team)
    parallel_for(
        _quantized_piece, team, used * chunks,
        (address, memory[_ROUNDED], step, out, memory[_BEGINS], memory[_ACTIVE], chunks, dtype, size),
    )  # fmt: skip


@inline
def _chunks(work: int, limit: int, rows: int, used: int, team: int) -> int:
    """The number of pieces of an expert's weight, of `work` bytes: enough that all threads end together."""
    wanted = pieces_of(work * used * reads_worth(rows, _EVEN), limit * used, team)
    return max(1, min(-(-wanted // used), limit, work // _CHUNK)) if team != 0 else 1


@serial_in_order
def _packed_piece(
    piece: int, pieces: int, worker: int,
    weights: int, bias: int, x: int, step: int, out: int, begins: int, active: int, chunks: int, row_size: int,
    panels: int, dtype: np.generic, size: int,
) -> None:  # fmt: skip
    """Multiply all rows of one expert by some of its panels. `row_size`: bytes of a row of x; `step`: to the next."""
    expert = array(pointer(active, np.int64(0)), (piece // chunks + 1,))[piece // chunks]
    firsts = array(pointer(begins, np.int64(0)), (expert + 2,))
    begin, rows = firsts[expert], firsts[expert + 1] - firsts[expert]
    own_bias = bias + expert * panels * WIDTH * 4 if bias != 0 else 0
    arguments = (
        piece % chunks, chunks, worker, x + begin * step, weights + expert * panels * WIDTH * row_size, own_bias,
        out + begin * panels * WIDTH * size, panels * WIDTH * size, rows, row_size, panels, dtype, size,
    )  # fmt: skip
    call(multiply_part, arguments)


@inline
def _rounded_bytes(matrix: NDArray[np.int64]) -> int:
    """Bytes of a rounded row: its numbers, scales and sums, as `PanelForm.row_bytes` counts them."""
    width = matrix[gemm.CHUNKS] * matrix[gemm.CHUNK_INPUTS]
    numbers = width * 4 if matrix[gemm.SUM_FORM] == gemm.EXACT else width + width // matrix[gemm.SHARED] * 4
    size: int = numbers + width // matrix[gemm.SUMMED] * 4 + gemm.SPARED
    return size


@serial_in_order
def _round_rows_piece(
    piece: int, pieces: int, worker: int,
    linear: int, x: int, rounded: int, begins: int, active: int, used: int, dtype: np.generic, size: int,
) -> None:  # fmt: skip
    """Round rows of some experts, each expert's in a block of its own, as a product takes them."""
    first, last = used * piece // pieces, used * (piece + 1) // pieces
    experts = array(pointer(active, np.int64(0)), (last,))
    matrix = array(pointer(linear, np.int64(0)), (PRODUCT_FIELDS,))[MATRIX:]
    inputs, groups = matrix[INPUTS], matrix[gemm.CHUNKS] * matrix[gemm.CHUNK_INPUTS] // matrix[gemm.SHARED]
    for index in range(first, last):
        expert = experts[index]
        firsts = array(pointer(begins, np.int64(0)), (expert + 2,))
        begin, rows = firsts[expert], firsts[expert + 1] - firsts[expert]
        source, target = x + begin * inputs * size, rounded + begin * _rounded_bytes(matrix)
        arguments = (
            0, 1, worker, source, matrix[gemm.ORDER], target, rows, inputs, groups, matrix[gemm.SHARED],
            matrix[gemm.SUMMED], matrix[gemm.SUM_FORM], dtype, size,
        )  # fmt: skip
        call(gemm.round_piece, arguments)


@serial_in_order
def _quantized_piece(
    piece: int, pieces: int, worker: int,
    linear: int, rounded: int, step: int, out: int, begins: int, active: int, chunks: int, dtype: np.generic, size: int,
) -> None:  # fmt: skip
    """Multiply all rows of one expert by some of its panels. `step`: bytes from a pair's rounded row to the next."""
    expert = array(pointer(active, np.int64(0)), (piece // chunks + 1,))[piece // chunks]
    firsts = array(pointer(begins, np.int64(0)), (expert + 2,))
    begin, rows = firsts[expert], firsts[expert + 1] - firsts[expert]
    product = array(pointer(linear, np.int64(0)), (PRODUCT_FIELDS,))
    matrix = product[MATRIX:]
    outputs, bias, scales = matrix[OUTPUTS], product[BIAS], matrix[gemm.ROW_SCALES]
    own_panels = matrix[PANELS_AT] + expert * matrix[gemm.BYTES]
    own_scales = scales + expert * outputs * 4 if scales != 0 else 0
    own_bias = bias + expert * outputs * 4 if bias != 0 else 0
    source, target = rounded + begin * step, out + begin * outputs * size
    arguments = (
        piece % chunks, chunks, worker, own_panels, own_scales, own_bias, target, source, rows, matrix[gemm.CHUNKS],
        outputs, outputs, dtype,
    )  # fmt: skip
    call(product[CODE], arguments)


@serial_in_order
@allocates
def _sum_piece(
    piece: int, pieces: int, worker: int,
    made: int, position: int, weights: int, out: int, rows: int, count: int, width: int, dtype: np.generic, size: int,
) -> None:  # fmt: skip
    """Sum the results of each row's experts, in the order in which it chose them, for some blocks of rows."""
    blocks = -(-width // _COLUMNS)
    first, last = rows * blocks * piece // pieces, rows * blocks * (piece + 1) // pieces
    sums = np.empty(_COLUMNS, np.float32)
    positions = array(pointer(position, np.int64(0)), (rows * count,))
    factors = array(pointer(weights, np.float32(0)), (rows * count,))
    for block in range(first, last):
        row, begin = block // blocks, block % blocks * _COLUMNS
        columns = min(_COLUMNS, width - begin)
        sums[:] = 0
        for pair in range(row * count, (row + 1) * count):
            factor = factors[pair] if weights != 0 else np.float32(1)
            values = array(pointer(made + (positions[pair] * width + begin) * size, dtype), (columns,))
            for column in range(columns):
                sums[column] += factor * widen(values[column])
        result = array(pointer(out + (row * width + begin) * size, dtype), (columns,))
        for column in range(columns):
            result[column] = narrow(sums[column], dtype)
