"""The fused decoder layer: what stands between one layer's attention and the next one's, in one call, for short steps.

The output projection, the residual sum with its norm, the feed-forward part, the next sum and norm, and the merged
projection of the layer that follows. The kernels are those of the other modules and give the same bits; what is saved
is what Python takes to call them one by one, which for one token is a tenth of a step (CUDA graphs save the same on a
GPU).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from asyncengine.kernels.cpu import gemm_quantized, packed
from asyncengine.kernels.cpu.activation import apply
from asyncengine.kernels.cpu.calls import call_rare
from asyncengine.kernels.cpu.jit import array, kind_of, pointer, serial_in_order
from asyncengine.kernels.cpu.linears import (
    INPUTS,
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
from asyncengine.kernels.cpu.scaling import add_beside, scale
from asyncengine.kernels.cpu.team import use_team

# The linears of a layer, in the order they run: of what attention gives, and of what a state beside it gives; the
# feed-forward part's; and those that the next layer's attention reads, and the state beside it.
OUT, OUT_BESIDE, GATE_UP, DOWN, NEXT, NEXT_BESIDE = range(6)
LINEARS = 6
# Behind them in a layer's record: addresses of the weights of the norm before the feed-forward part (0: there is none),
# of the one after it, of the `MixtureKernel` that the feed-forward part has or is, if there is one, and of `Factors`,
# if one of them is not 1.
MLP_NORM, NEXT_NORM, MIXTURE, FACTORS = range(4)
_OTHERS = 4


class Factors(NamedTuple):
    """Factors of a layer's numbers (Falcon-H1), float32 by place."""

    gate: float = 1.0
    """The gate, before its activation."""
    inner: float = 1.0
    """The factor of the second product's inputs."""
    beside: float = 1.0
    """The factor of attention's results, where a state is beside it."""


_GATE, _INNER, _BESIDE = range(3)
_ONES = Factors()


class FusedLayerKernel:
    """One layer's linears and norms from attention's result to what the next attention reads, or the output layer.

    `linears` by their places OUT .. NEXT_BESIDE, those left out that there are not: NEXT where the model's last norm
    follows, GATE_UP and DOWN where there is nothing but a `mixture`, or no feed-forward part at all. `norms` are weight
    and epsilon of MLP_NORM (None without a feed-forward part) and NEXT_NORM, `activation` is what `activation_id` says
    of that of the MLP, `factor` what a branch is multiplied by before it is added to the residual, `dtype` the type of
    all rows.
    """

    def __init__(
        self,
        linears: Mapping[int, Sequence[LinearWeights]],
        norms: Sequence[tuple[torch.Tensor, float] | None],
        activation: int,
        factor: float,
        dtype: torch.dtype,
        mixture: MixtureKernel | None = None,
        factors: Factors = _ONES,
    ) -> None:
        by_place = {place: LinearRecord(parts, dtype) for place, parts in linears.items()}
        numbers = np.array(factors, dtype=np.float32)
        self._held = (norms, mixture, by_place, numbers)  # an address keeps nothing where it is
        self.mixture = mixture
        self.parts = [part for record in by_place.values() for part in record.parts]
        """All products, those of the experts too."""
        self.parts += [] if mixture is None else mixture.parts
        projects = NEXT in by_place
        first, second = (np.float32(0 if norm is None else norm[1]) for norm in norms)
        self.settings = (np.float32(factor), first, second, activation, projects)
        """(factor, epsilons of MLP_NORM and NEXT_NORM, activation, whether there is a NEXT)"""
        self.outputs = sum(by_place[place].outputs for place in (NEXT, NEXT_BESIDE) if place in by_place)
        width = by_place[OUT].outputs
        between = 0 if GATE_UP not in by_place else by_place[GATE_UP].outputs + by_place[DOWN].inputs
        self._row = 2 * width + max(between, width if OUT_BESIDE in by_place else 0)
        self.outputs = self.outputs or width
        self.attending = by_place[NEXT].outputs if projects else width
        """The part of `outputs` that attention reads."""
        self._inputs = max(linear.inputs for linear in by_place.values())
        self._record = np.zeros(LINEARS * LINEAR_FIELDS + _OTHERS, dtype=np.int64)
        for place, linear in by_place.items():
            self._record[place * LINEAR_FIELDS : (place + 1) * LINEAR_FIELDS] = linear.fields
        others = [0 if norm is None else norm[0].data_ptr() for norm in norms]
        others.append(0 if mixture is None else mixture.address)
        self._record[-_OTHERS:] = [*others, 0 if factors == _ONES else numbers.ctypes.data]
        self.address: int = self._record.ctypes.data

    def scratch_bytes(self, rows: int, size: int) -> int:
        """Bytes of `scratch` that a call needs, for numbers of `size` bytes."""
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
    """A `FusedLayerKernel` by address. `attended`: what attention gives, and behind all its rows what a state beside it
    does. `rounds`, `packs` are what `forms_of` says; if `mixed` is None there is no mixture, and no code for one is
    compiled. `adapters`, `adapter_rows`, `memory`: `AdapterRecords` of the model's linears (0: none), of which the
    first here is number `first_linear`."""
    linears = array(pointer(record, np.int64(0)), (LINEARS, LINEAR_FIELDS))
    others = array(pointer(record + LINEARS * LINEAR_FIELDS * 8, np.int64(0)), (_OTHERS,))
    factors = array(pointer(others[FACTORS], np.float32(0)), (3,))
    width, inner_width = linears[OUT, OUTPUTS], linears[DOWN, INPUTS]
    alone = others[MLP_NORM] == 0
    branch, normed = scratch, scratch + rows * width * size
    beside = gate_up = inner = normed + rows * width * size
    taken = linears[GATE_UP, OUTPUTS] + inner_width
    if linears[OUT_BESIDE, OUTPUTS] != 0:
        taken = max(taken, width)
    rounded, after = beside + rows * taken * size, normed if projects else out
    for place in range(LINEARS):
        source, target = normed, branch
        if place == OUT:
            source = attended
        elif place == OUT_BESIDE:
            source, target = attended + rows * linears[OUT, INPUTS] * size, beside
        elif place == GATE_UP:
            target = gate_up
        elif place == DOWN:
            source = inner
        elif place == NEXT:
            target = out
        elif place == NEXT_BESIDE:
            target = out + rows * linears[NEXT, OUTPUTS] * size
        if linears[place, OUTPUTS] != 0:
            multiply_any(source, linears[place], target, rounded, rows, tile, tiles, rounds, packs, kind, size, team)
            add_adapters(source, target, adapters, first_linear + place, adapter_rows, memory, kind, team)
        if place == OUT_BESIDE:
            if linears[OUT_BESIDE, OUTPUTS] != 0:
                by = factors[_BESIDE] if others[FACTORS] != 0 else np.float32(1)
                call_rare(add_beside, (branch, by, beside, rows, width, kind, team))
            weight, epsilon, target = others[MLP_NORM], first_epsilon, normed
            if alone:
                weight, epsilon, target = others[NEXT_NORM], second_epsilon, after
            add_norm(residual, branch, weight, residual, target, rows, width, factor, epsilon, kind, team)
        elif place == GATE_UP and inner_width != 0:
            if others[FACTORS] != 0 and factors[_GATE] != np.float32(1):
                call_rare(scale, (gate_up, factors[_GATE], rows, linears[GATE_UP, OUTPUTS], inner_width, kind, team))
            inner = apply(gate_up, rows, inner_width, activation, kind, team)
            if others[FACTORS] != 0 and factors[_INNER] != np.float32(1):
                call_rare(scale, (inner, factors[_INNER], rows, inner_width, inner_width, kind, team))
        elif place == DOWN and not alone:
            if mixed is not None and others[MIXTURE] != 0:
                run_mixture(
                    others[MIXTURE], normed, branch, rounded, rows, tile, tiles, rounds, packs, kind, size, team
                )
            add_norm(
                residual, branch, others[NEXT_NORM], residual, after, rows, width, factor, second_epsilon, kind, team
            )
