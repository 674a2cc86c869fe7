"""A layer's mixture by address, for fused layers: the router's product, the choice, the experts, and the sum with what
all rows go through beside them."""

from __future__ import annotations

import numpy as np
import torch

from asyncengine.kernels.cpu.calls import call_rare, parallel_for
from asyncengine.kernels.cpu.experts import ExpertsKernel, run_experts
from asyncengine.kernels.cpu.jit import array, kind_of, pointer, serial_in_order, widen
from asyncengine.kernels.cpu.linears import LinearWeights
from asyncengine.kernels.cpu.packed import WIDTH, multiply, panels_at_once
from asyncengine.kernels.cpu.routing import RouteSettings, route_rows
from asyncengine.kernels.cpu.scaling import add_shared
from asyncengine.kernels.cpu.team_loops import pieces_of

# What is known of a mixture: int64 by place. Addresses (0: there is none), and sizes.
WEIGHTS, BIAS, INPUTS, COLUMNS, CORRECTION, BY_EXPERT, EXPERTS, CHOSEN = range(8)
SIGMOID, GROUPS, KEPT, NORMALISED, RECORD, ACTIVATION, NUMBERS = range(8, 15)
# Whether the router is of float32 where x is not; what is added to the experts' result: nothing, what all rows go
# through beside them (1), or that times the sigmoid of the logit behind the experts' (2).
EXACT, SHARED = range(15, 17)
_FIELDS = 17
ALONE, ADDED, GATED = range(3)
LEAST, SCALE, ALPHA, LIMIT = range(4)
"""float32 by place, at NUMBERS."""
_LINE = 64
_WORK = 8
"""Bytes that could be read while a number is widened."""


class MixtureKernel:
    """One layer's mixture. `router` is packed, of x's type or of float32; `vectors` are its correction and its factors
    by expert; `shared` is `ALONE`, `ADDED` or `GATED`."""

    def __init__(
        self,
        router: LinearWeights,
        vectors: tuple[torch.Tensor | None, torch.Tensor | None],
        settings: RouteSettings,
        experts: ExpertsKernel,
        shared: int = ALONE,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """`dtype`: that of all rows."""
        self._held = (router, vectors, experts)  # an address keeps nothing where it is
        self.parts = experts.parts
        """Products of the experts."""
        if not isinstance(router.weights, torch.Tensor):
            raise ValueError("the router is quantized")
        form, exact = experts.form, router.weights.dtype != dtype
        self._numbers = np.array([settings.least, settings.scale, form.alpha, form.limit], dtype=np.float32)
        addresses = [0 if vector is None else vector.data_ptr() for vector in vectors]
        self._record = np.array(
            [
                router.weights.data_ptr(), 0 if router.bias is None else router.bias.data_ptr(), router.inputs,
                router.outputs, *addresses, settings.experts, settings.chosen, settings.sigmoid, settings.groups,
                settings.kept, settings.normalised, experts.address, form.activation, self._numbers.ctypes.data, exact,
                shared,
            ],
            dtype=np.int64,
        )  # fmt: skip
        self.address: int = self._record.ctypes.data

    def scratch_bytes(self, rows: int, size: int) -> int:
        """Bytes of `scratch` that a call needs, for numbers of `size` bytes."""
        columns, chosen = int(self._record[COLUMNS]), int(self._record[CHOSEN])
        experts: ExpertsKernel = self._held[2]
        row = 4 * columns + 12 * chosen + int(self._record[INPUTS]) * (4 + size)
        return rows * row + 5 * _LINE + experts.scratch_bytes(rows * chosen, size)

    @staticmethod
    def exact_code(dtype: torch.dtype) -> str:
        """The name of the code for a router of float32 and rows of `dtype` that are not; for `calls.compile_named`."""
        kind = type(kind_of(dtype)).__name__
        return f"{__name__}:_exact_logits:void({', '.join(['int64'] * 10)}, {kind}, int64)"


@serial_in_order
def run_mixture(
    record: int, x: int, out: int, scratch: int, rows: int, tile: int, tiles: int, rounds: np.generic | None,
    packs: np.generic | None, kind: np.generic, size: int, team: int,
) -> None:  # fmt: skip
    """out [rows, width] of x [rows, width], as a `MixtureKernel` says; `tile`, `tiles`: `packed.tiles_for` the rows.
    Where there is something beside the experts, `out` has it."""
    fields = array(pointer(record, np.int64(0)), (_FIELDS,))
    numbers = array(pointer(fields[NUMBERS], np.float32(0)), (4,))
    columns, chosen, width = fields[COLUMNS], fields[CHOSEN], fields[INPUTS]
    row = width * size
    logits = -(-scratch // _LINE) * _LINE
    ids = logits + -(-rows * columns * 4 // _LINE) * _LINE
    weights = ids + rows * chosen * 8
    wide = -(-(weights + rows * chosen * 4) // _LINE) * _LINE
    made = -(-(wide + rows * width * 4) // _LINE) * _LINE
    memory = made + rows * row
    if fields[EXACT] != 0:
        call_rare(
            _exact_logits,
            (x, wide, fields[WEIGHTS], fields[BIAS], logits, rows, width, columns, tile, tiles, kind, team),
        )  # fmt: skip
    else:
        multiply(
            x, fields[WEIGHTS], fields[BIAS], logits, columns * 4, rows, row, columns // WIDTH, tile, tiles,
            panels_at_once(rows, row), kind, 4, team,
        )  # fmt: skip
    route_rows(
        logits, fields[CORRECTION], fields[BY_EXPERT], ids, weights, rows, columns, fields[EXPERTS], chosen,
        fields[SIGMOID] != 0, fields[GROUPS], fields[KEPT], fields[NORMALISED] != 0, numbers[LEAST], numbers[SCALE],
    )  # fmt: skip
    run_experts(
        fields[RECORD], memory, x, ids, weights, out if fields[SHARED] == ALONE else made, rows, chosen,
        fields[EXPERTS], fields[ACTIVATION], numbers[ALPHA], numbers[LIMIT], rounds, packs, kind, size, team,
    )  # fmt: skip
    if fields[SHARED] != ALONE:
        gates = logits + fields[EXPERTS] * 4 if fields[SHARED] == GATED else 0
        add_shared(made, out, gates, columns, out, rows, width, kind, team)


@serial_in_order
def _exact_logits(
    x: int, wide: int, weights: int, bias: int, logits: int, rows: int, width: int, columns: int, tile: int, tiles: int,
    kind: np.generic, team: int,
) -> None:  # fmt: skip
    """float32 [rows, columns] of x [rows, width], which is widened in `wide`, and weights of float32."""
    parallel_for(_widen_part, team, pieces_of(rows * width * _WORK, rows, team), (x, wide, rows, width, kind))
    multiply(
        wide, weights, bias, logits, columns * 4, rows, width * 4, columns // WIDTH, tile, tiles,
        panels_at_once(rows, width * 4), np.float32(0), 4, team,
    )  # fmt: skip


@serial_in_order
def _widen_part(
    piece: int, pieces: int, worker: int, x: int, wide: int, rows: int, width: int, kind: np.generic
) -> None:
    first, last = rows * width * piece // pieces, rows * width * (piece + 1) // pieces
    values, numbers = array(pointer(x, kind), (last,)), array(pointer(wide, np.float32(0)), (last,))
    for index in range(first, last):
        numbers[index] = widen(values[index])
