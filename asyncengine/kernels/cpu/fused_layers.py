"""All layers of a short step in one call: attention and the fused layer behind it (`fused_layer`), turn by turn.

What is saved is what Python takes to call two kernels for each layer, and more where the program's other threads run
Python: whoever comes back from a kernel waits for the interpreter's lock, up to the switch interval each time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from asyncengine.kernels.cpu import packed
from asyncengine.kernels.cpu.attention import attend, join
from asyncengine.kernels.cpu.attention_write import prepare_and_write
from asyncengine.kernels.cpu.calls import address_of, call, call_rare
from asyncengine.kernels.cpu.fused_layer import LINEARS, FusedLayerKernel, run_fused_layer
from asyncengine.kernels.cpu.head_gate import multiply_gates, split
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
from asyncengine.kernels.cpu.norm import norm
from asyncengine.kernels.cpu.scaling import scale_columns
from asyncengine.kernels.cpu.team import use_team

# What is known of a layer: int64 by place. Of its fused layer and heads, what never changes (GATED: whether its heads
# have gates; COLUMNS: numbers of a row of what they read; VALUES: of what they give; HEADS is 0 without attention. Of a
# layer that keeps a state, MIX: the address of its record, 0 without one, and CODE: that of what is called with it;
# FACTORS: that of what the first SCALED columns of its projection are multiplied by, whose rows are WIDE) ...
RECORD, ACTIVATION, PROJECTS, Q_NORM, K_NORM, HEADS, KEY_BYTES, GATED, COLUMNS, MIX, CODE = range(11)
VALUES, FACTORS, SCALED, WIDE = range(11, 15)
# ... and of a step: addresses of the layer's pool and plan, results to be joined, cosines, sines, dimensions rotated.
POOL, STEP, JOINS, COS, SIN, ROTARY = range(15, 21)
STATES, WINDOWS = 21, 22
"""Fields of a layer that keeps a state: addresses of its pools."""
FIELDS = 23
FACTOR, FIRST_EPSILON, SECOND_EPSILON, HEAD_EPSILON = range(4)
NUMBERS = 4
"""float32 by place."""


class Heads(NamedTuple):
    """A layer's attention heads, and the RMS norms of queries and keys, if it has any."""

    number: int
    key_dim: int
    value_dim: int
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    epsilon: float
    gated: bool = False
    """Gates stand behind the queries of each head."""


class StateMix(NamedTuple):
    """The mixer of a layer that keeps a state, in the place of heads."""

    record: int
    """The address of what its code is called with first."""
    code: str
    """The name of its code for `calls.address_of`: (record, the layer's states and windows, projections, out, six
    numbers of the step's segments (`segment_places`), tokens, kind, team)."""
    outputs: int
    width: int
    """Numbers of a row of its projection."""
    factors: torch.Tensor | None = None
    """Factors of the first of them, float32."""


class Mix(NamedTuple):
    """The mixer of a layer: attention, a state, or both of the same x, with their projections one behind the other."""

    heads: Heads | None
    state: StateMix | None


class FusedLayersKernel:
    """The layers of one model, from the first norm to what the output layer reads.

    `first` are weight and epsilon of the first norm, `projections` the first layer's merged one, and that of a state
    beside its attention; `layers` and `mixes` are those of each layer, some of which may have a mixture of experts.
    """

    def __init__(
        self,
        first: tuple[torch.Tensor, float],
        projections: Sequence[Sequence[LinearWeights]],
        layers: Sequence[FusedLayerKernel],
        mixes: Sequence[Mix],
        dtype: torch.dtype,
    ) -> None:
        records = [LinearRecord(parts, dtype) for parts in projections]
        self._held = (first, layers, mixes, records)  # an address keeps nothing where it is
        self._kind, self._size = kind_of(dtype), dtype.itemsize
        parts = [part for record in records for part in record.parts]
        parts += [part for layer in layers for part in layer.parts]
        mixed = np.uint8(0) if any(layer.mixture is not None for layer in layers) else None
        heads = [own.heads for own in mixes if own.heads is not None]
        gated = np.uint8(0) if any(own.gated for own in heads) else None
        self.forms = (*forms_of(parts), mixed, gated)
        """Forms for `fused_layer.run_fused_layer`, and those of gates."""
        self._first = (first[0].data_ptr(), np.float32(first[1]))
        self._projections = np.zeros((2, LINEAR_FIELDS), dtype=np.int64)
        self._projections[: len(records)] = [record.fields for record in records]
        self._table = np.zeros((len(layers), FIELDS), dtype=np.int64)
        self._places: NDArray[np.int64] | None = None
        """Addresses that the table has now."""
        self._numbers = np.zeros((len(layers), NUMBERS), dtype=np.float32)
        attending = [records[0].outputs, *(layer.attending for layer in layers)]
        """Columns of what each layer's attention reads, which is the last part of the layer before."""
        for place, (layer, own) in enumerate(zip(layers, mixes, strict=True)):
            factor, *epsilons, activation, projects = layer.settings
            self._table[place, :Q_NORM] = layer.address, activation, projects
            self._table[place, COLUMNS] = attending[place]
            self._numbers[place, :HEAD_EPSILON] = factor, *epsilons
            self._note(place, own)
        self._table_at, self._numbers_at = self._table.ctypes.data, self._numbers.ctypes.data
        self._projections_at = self._projections.ctypes.data
        self._codes = {place: own.state.code for place, own in enumerate(mixes) if own.state is not None}
        """Names of layers' code that has not been asked for."""
        self._width = records[0].inputs
        self._outputs = max(sum(record.outputs for record in records), *(layer.outputs for layer in layers))
        self._query = max((own.number * own.key_dim for own in heads), default=0)
        self._attended = max(_outputs_of(own) for own in mixes)
        self._split = max((width for width, own in zip(attending, mixes, strict=False) if _is_gated(own)), default=0)

    def _note(self, place: int, own: Mix) -> None:
        if own.state is not None:
            factors = own.state.factors
            scaled = (0, 0) if factors is None else (factors.data_ptr(), len(factors))
            self._table[place, MIX], self._table[place, FACTORS:POOL] = own.state.record, (*scaled, own.state.width)
        heads = own.heads
        if heads is not None:
            norms = [0 if weight is None else weight.data_ptr() for weight in (heads.q_norm, heads.k_norm)]
            self._table[place, Q_NORM:COLUMNS] = *norms, heads.number, heads.key_dim * self._size, heads.gated
            self._table[place, VALUES] = heads.number * heads.value_dim
            self._numbers[place, HEAD_EPSILON] = heads.epsilon

    def scratch_bytes(self, rows: int) -> int:
        """Bytes of `scratch` that a call needs for itself, before those of the fused layers."""
        own = self._width + self._outputs + self._query + self._attended + self._split
        return -(-rows * own * self._size // 64) * 64

    def __call__(
        self,
        h: torch.Tensor,
        out: torch.Tensor,
        places: NDArray[np.int64],
        tile_types: tuple[Any, Any],
        scratch: torch.Tensor,
        adapters: tuple[int, int, int] = (0, 0, 0),
        segments: NDArray[np.int64] | None = None,
    ) -> None:
        """out = what the output layer reads, of the embedded tokens h, which are overwritten. Both [rows, width].

        `places` int64 [layers, 8]: POOL .. WINDOWS of each layer, zeros for what it has not; an array that nobody
        changes, as that of the last call is not looked at again; `tile_types` (lanes, operand) as `attention.attend`
        takes them; `adapters`: `AdapterRecords` of all linears in order, `LINEARS` of each layer, of which the first
        two are its projections, or zeros; `segments` int64 [6]: `segment_places`, where layers keep states.
        """
        rows = h.shape[0]
        while self._codes:
            place, code = self._codes.popitem()
            self._table[place, CODE] = address_of(code)
        if places is not self._places:
            self._table[:, POOL:] = self._places = places
        memory = scratch.data_ptr()
        _run_layers(
            self._table_at, self._numbers_at, len(self._table), *self._first, self._projections_at, h.data_ptr(),
            out.data_ptr(), memory, memory + self.scratch_bytes(rows), rows, self._width, self._outputs, self._query,
            self._attended, *packed.tiles_for(rows), *self.forms, self._kind, *tile_types, self._size, *adapters,
            0 if segments is None else segments.ctypes.data, use_team(),
        )  # fmt: skip


def _is_gated(own: Mix) -> bool:
    return own.heads is not None and own.heads.gated


def _outputs_of(own: Mix) -> int:
    """Numbers of a row of what a layer mixes, of attention and of a state."""
    heads = 0 if own.heads is None else own.heads.number * own.heads.value_dim
    return heads + (0 if own.state is None else own.state.outputs)


@serial_in_order
def _run_layers(
    table: int, numbers: int, count: int, weight: int, epsilon: np.float32, projections: int, residual: int, out: int,
    own: int, scratch: int, rows: int, width: int, outputs: int, queries: int, values: int, tile: int, tiles: int,
    rounds: np.generic | None, packs: np.generic | None, mixed: np.generic | None, gated: np.generic | None,
    kind: np.generic, lanes: Any, operand: Any, size: int, adapters: int, adapter_rows: int, memory: int,
    segments: int, team: int,
) -> None:  # fmt: skip
    fields = array(pointer(table, np.int64(0)), (count, FIELDS))
    factors = array(pointer(numbers, np.float32(0)), (count, NUMBERS))
    normed, x = own, own + rows * width * size
    query = x + rows * outputs * size
    attended = query + rows * queries * size
    ungated = attended + rows * values * size
    norm(residual, weight, normed, rows, width, epsilon, kind, team)
    linears = array(pointer(projections, np.int64(0)), (2, LINEAR_FIELDS))
    target = x
    for place in range(2):
        if linears[place, OUTPUTS] != 0:
            multiply_any(normed, linears[place], target, scratch, rows, tile, tiles, rounds, packs, kind, size, team)
            add_adapters(normed, target, adapters, place, adapter_rows, memory, kind, team)
            target += rows * linears[place, OUTPUTS] * size
    for index in range(count):
        spec, number = fields[index], factors[index]
        if spec[MIX] != 0:
            part = array(pointer(segments, np.int64(0)), (6,))
            given, made = x, attended
            if spec[HEADS] != 0:
                given, made = x + rows * spec[COLUMNS] * size, attended + rows * spec[VALUES] * size
            if spec[SCALED] != 0:
                call_rare(scale_columns, (given, spec[FACTORS], rows, spec[WIDE], spec[SCALED], kind, team))
            call(
                spec[CODE],
                (spec[MIX], spec[STATES], spec[WINDOWS], given, made, part[0], part[1], part[2], part[3], part[4],
                 part[5], rows, kind, team),
            )  # fmt: skip
        if spec[HEADS] != 0:
            _attend(
                x, ungated, query, attended, spec, number[HEAD_EPSILON], rows, gated, kind, lanes, operand, size, team
            )
        run_fused_layer(
            spec[RECORD], attended, residual, x if index + 1 < count else out, scratch, rows, number[FACTOR],
            number[FIRST_EPSILON], number[SECOND_EPSILON], spec[ACTIVATION], spec[PROJECTS] != 0, tile, tiles, rounds,
            packs, mixed, kind, size, adapters, LINEARS * index + 2, adapter_rows, memory, team,
        )  # fmt: skip


@serial_in_order
def _attend(
    x: int, ungated: int, query: int, attended: int, spec: NDArray[np.int64], epsilon: float, rows: int,
    gated: np.generic | None, kind: np.generic, lanes: Any, operand: Any, size: int, team: int,
) -> None:  # fmt: skip
    """One layer's attention, of its projection `x` [rows, COLUMNS]."""
    heads, head = spec[HEADS], spec[KEY_BYTES]
    merged = x
    if gated is not None and spec[GATED] != 0:
        split(x, ungated, rows, spec[COLUMNS], heads, head // size, kind, team)
        merged = ungated
    prepare_and_write(
        merged, query, spec[Q_NORM], spec[K_NORM], epsilon, spec[COS], spec[SIN], spec[ROTARY], spec[POOL], spec[STEP],
        kind, team,
    )  # fmt: skip
    attend(query, heads * head, head, attended, spec[POOL], spec[STEP], kind, lanes, operand, team)
    if spec[JOINS] > 0:
        call_rare(join, (attended, spec[POOL], spec[STEP], kind, spec[JOINS], team))
    if gated is not None and spec[GATED] != 0:
        multiply_gates(attended, x, attended, rows, spec[COLUMNS], heads, head // size, kind, team)
