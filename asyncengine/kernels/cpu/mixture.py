"""A layer's whole mixture by address, for fused layers: the router's product, the choice, and the experts."""

from __future__ import annotations

import numpy as np
import torch

from asyncengine.kernels.cpu.experts import ExpertsKernel, run_experts
from asyncengine.kernels.cpu.jit import array, pointer, serial_in_order
from asyncengine.kernels.cpu.linears import LinearWeights
from asyncengine.kernels.cpu.packed import WIDTH, multiply, panels_at_once
from asyncengine.kernels.cpu.routing import RouteSettings, route_rows

# What is known of a mixture: int64 by place. Addresses (0: there is none), and sizes.
WEIGHTS, BIAS, INPUTS, COLUMNS, CORRECTION, BY_EXPERT, EXPERTS, CHOSEN = range(8)
SIGMOID, GROUPS, KEPT, NORMALISED, RECORD, ACTIVATION, NUMBERS = range(8, 15)
_FIELDS = 15
LEAST, SCALE, ALPHA, LIMIT = range(4)
"""float32 by place, at NUMBERS."""
_LINE = 64


class MixtureKernel:
    """One layer's mixture. `router` is packed, of x's type; `vectors` are its correction and its factors by expert."""

    def __init__(
        self,
        router: LinearWeights,
        vectors: tuple[torch.Tensor | None, torch.Tensor | None],
        settings: RouteSettings,
        experts: ExpertsKernel,
    ) -> None:
        self._held = (router, vectors, experts)  # an address keeps nothing where it is
        self.parts = experts.parts
        """Products of the experts."""
        if not isinstance(router.weights, torch.Tensor):
            raise ValueError("the router is quantized")
        form = experts.form
        self._numbers = np.array([settings.least, settings.scale, form.alpha, form.limit], dtype=np.float32)
        addresses = [0 if vector is None else vector.data_ptr() for vector in vectors]
        self._record = np.array(
            [
                router.weights.data_ptr(), 0 if router.bias is None else router.bias.data_ptr(), router.inputs,
                router.outputs, *addresses, settings.experts, settings.chosen, settings.sigmoid, settings.groups,
                settings.kept, settings.normalised, experts.address, form.activation, self._numbers.ctypes.data,
            ],
            dtype=np.int64,
        )  # fmt: skip
        self.address: int = self._record.ctypes.data

    def scratch_bytes(self, rows: int, size: int) -> int:
        """What a call needs of `scratch`, for numbers of `size` bytes."""
        columns, chosen = int(self._record[COLUMNS]), int(self._record[CHOSEN])
        experts: ExpertsKernel = self._held[2]
        return rows * (4 * columns + 12 * chosen) + 3 * _LINE + experts.scratch_bytes(rows * chosen, size)


@serial_in_order
def run_mixture(
    record: int, x: int, out: int, scratch: int, rows: int, tile: int, tiles: int, rounds: np.generic | None,
    packs: np.generic | None, kind: np.generic, size: int, team: int,
) -> None:  # fmt: skip
    """out [rows, width] of x [rows, width], as a `MixtureKernel` says; `tile`, `tiles`: `packed.tiles_for` the rows."""
    fields = array(pointer(record, np.int64(0)), (_FIELDS,))
    numbers = array(pointer(fields[NUMBERS], np.float32(0)), (4,))
    columns, chosen, row = fields[COLUMNS], fields[CHOSEN], fields[INPUTS] * size
    logits = -(-scratch // _LINE) * _LINE
    ids = logits + -(-rows * columns * 4 // _LINE) * _LINE
    weights = ids + rows * chosen * 8
    memory = weights + rows * chosen * 4
    multiply(
        x, fields[WEIGHTS], fields[BIAS], logits, columns * 4, rows, row, columns // WIDTH, tile, tiles,
        panels_at_once(rows, row), kind, np.float32(0), 4, team,
    )  # fmt: skip
    route_rows(
        logits, fields[CORRECTION], fields[BY_EXPERT], ids, weights, rows, columns, fields[EXPERTS], chosen,
        fields[SIGMOID] != 0, fields[GROUPS], fields[KEPT], fields[NORMALISED] != 0, numbers[LEAST], numbers[SCALE],
    )  # fmt: skip
    run_experts(
        fields[RECORD], memory, x, ids, weights, out, rows, chosen, fields[EXPERTS], fields[ACTIVATION],
        numbers[ALPHA], numbers[LIMIT], rounds, packs, kind, size, team,
    )  # fmt: skip
