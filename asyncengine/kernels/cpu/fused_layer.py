"""The fused decoder layer: what stands between one layer's attention and the next one's, in one call, for short steps.

The output projection, the residual sum with its norm, the gated MLP, the next sum and norm, and the merged projection
of the layer that follows. The kernels are those of the other modules and give the same bits; what is saved is what
Python takes to call them one by one, which for one token is a tenth of a step (CUDA graphs save the same on a GPU).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from asyncengine.kernels.cpu import gemm_quantized, packed
from asyncengine.kernels.cpu.activation import gate
from asyncengine.kernels.cpu.jit import array, kind_of, pointer, serial_in_order
from asyncengine.kernels.cpu.linears import (
    LINEAR_FIELDS,
    OUTPUTS,
    LinearRecord,
    LinearWeights,
    forms_of,
    multiply_any,
)
from asyncengine.kernels.cpu.lora import add_adapters
from asyncengine.kernels.cpu.mixture import MixtureKernel, run_mixture
from asyncengine.kernels.cpu.norm import add_norm
from asyncengine.kernels.cpu.team import use_team

# The linears of a layer, in the order they run; NEXT_QKV is the next layer's, if there is one.
OUT_PROJECTION, GATE_UP, DOWN, NEXT_QKV = range(4)
_LINEARS = 4
# Behind them in a layer's record: addresses of the weights of the norm before the MLP, of the one after it, and of the
# `MixtureKernel` in place of the MLP's linears, if there is one.
MLP_NORM, NEXT_NORM, MIXTURE = range(3)
_OTHERS = 3


class FusedLayerKernel:
    """One layer's linears and norms from attention's result to what the next attention reads, or the output layer.

    `linears` are OUT_PROJECTION .. NEXT_QKV, the last one left out where the model's last norm follows; a layer with a
    `mixture` has neither GATE_UP nor DOWN. `norms` are weight and epsilon of MLP_NORM and NEXT_NORM, `activation` is
    what `activation_id` says of that of the MLP, `factor` what a branch is multiplied by before it is added to the
    residual, `dtype` the type of all rows.
    """

    def __init__(
        self,
        linears: Sequence[Sequence[LinearWeights]],
        norms: Sequence[tuple[torch.Tensor, float]],
        activation: int,
        factor: float,
        dtype: torch.dtype,
        mixture: MixtureKernel | None = None,
    ) -> None:
        self._records = [LinearRecord(parts, dtype) for parts in linears]
        self._held = (norms, mixture)  # an address keeps nothing where it is
        self.mixture = mixture
        self.parts = [part for record in self._records for part in record.parts]
        """All products, those of the experts too."""
        self.parts += [] if mixture is None else mixture.parts
        there = range(_LINEARS) if mixture is None else (OUT_PROJECTION, NEXT_QKV)
        by_place = dict(zip(there, self._records, strict=False))
        projects = NEXT_QKV in by_place
        epsilons = np.float32(norms[MLP_NORM][1]), np.float32(norms[NEXT_NORM][1])
        self.settings = (np.float32(factor), *epsilons, activation, projects)
        """(factor, epsilons of MLP_NORM and NEXT_NORM, activation, whether there is a NEXT_QKV)"""
        out = by_place[OUT_PROJECTION]
        self.outputs = by_place[NEXT_QKV].outputs if projects else out.outputs
        self._row = 2 * out.outputs
        if mixture is None:
            self._row += by_place[GATE_UP].outputs + by_place[DOWN].inputs
        self._inputs = max(linear.inputs for linear in self._records)
        self._record = np.zeros(_LINEARS * LINEAR_FIELDS + _OTHERS, dtype=np.int64)
        for place, linear in by_place.items():
            self._record[place * LINEAR_FIELDS : (place + 1) * LINEAR_FIELDS] = linear.fields
        others = [weight.data_ptr() for weight, _ in norms]
        self._record[-_OTHERS:] = [*others, 0 if mixture is None else mixture.address]
        self.address: int = self._record.ctypes.data

    def scratch_bytes(self, rows: int, size: int) -> int:
        """What a call needs of `scratch`, for numbers of `size` bytes."""
        rounded = 0 if forms_of(self.parts)[0] is None else gemm_quantized.scratch_bytes(rows, self._inputs)
        mixed = 0 if self.mixture is None else self.mixture.scratch_bytes(rows, size)
        return rows * self._row * size + max(rounded, mixed)

    def __call__(self, attended: torch.Tensor, residual: torch.Tensor, scratch: torch.Tensor) -> torch.Tensor:
        """[rows, outputs] from attention's result [rows, heads * dim]; the residual [rows, width] is added to.

        All contiguous and of one type.
        """
        rows, size = residual.shape[0], residual.element_size()
        out = residual.new_empty((rows, self.outputs))
        run_fused_layer(
            self.address, attended.data_ptr(), residual.data_ptr(), out.data_ptr(), scratch.data_ptr(), rows,
            *self.settings, *packed.tiles_for(rows), *forms_of(self.parts),
            None if self.mixture is None else np.uint8(0), kind_of(residual.dtype), size, 0, 0, 0, 0, use_team(),
        )  # fmt: skip
        return out


@serial_in_order
def run_fused_layer(
    record: int, attended: int, residual: int, out: int, scratch: int, rows: int, factor: np.float32,
    first_epsilon: np.float32, second_epsilon: np.float32, activation: int, projects: bool, tile: int, tiles: int,
    rounds: np.generic | None, packs: np.generic | None, mixed: np.generic | None, kind: np.generic, size: int,
    adapters: int, first_linear: int, adapter_rows: int, memory: int, team: int,
) -> None:  # fmt: skip
    """A `FusedLayerKernel` by address. `rounds`, `packs` are what `forms_of` says; if `mixed` is None there is no
    mixture, and no code for one is compiled. `adapters`, `adapter_rows`, `memory`: `AdapterRecords` of the model's
    linears (0: none), of which the first here is number `first_linear`."""
    linears = array(pointer(record, np.int64(0)), (_LINEARS, LINEAR_FIELDS))
    norms = array(pointer(record + _LINEARS * LINEAR_FIELDS * 8, np.int64(0)), (_OTHERS,))
    width, inner_width = linears[OUT_PROJECTION, OUTPUTS], linears[GATE_UP, OUTPUTS] // 2
    branch, normed = scratch, scratch + rows * width * size
    gate_up = normed + rows * width * size
    inner = gate_up + rows * inner_width * 2 * size
    rounded = inner + rows * inner_width * size
    for place in range(_LINEARS if projects else NEXT_QKV):
        source = attended if place == OUT_PROJECTION else inner if place == DOWN else normed
        target = gate_up if place == GATE_UP else out if place == NEXT_QKV else branch
        if linears[place, OUTPUTS] != 0:
            multiply_any(source, linears[place], target, rounded, rows, tile, tiles, rounds, packs, kind, size, team)
            add_adapters(source, target, adapters, first_linear + place, adapter_rows, memory, kind, team)
        elif mixed is not None and place == DOWN:
            run_mixture(norms[MIXTURE], normed, branch, rounded, rows, tile, tiles, rounds, packs, kind, size, team)
        if place == OUT_PROJECTION:
            add_norm(
                residual, branch, norms[MLP_NORM], residual, normed, rows, width, factor, first_epsilon, kind, team
            )
        elif place == GATE_UP:
            gate(gate_up, inner, rows, inner_width, activation, kind, team)
        elif place == DOWN:
            after = normed if projects else out
            add_norm(
                residual, branch, norms[NEXT_NORM], residual, after, rows, width, factor, second_epsilon, kind, team
            )
