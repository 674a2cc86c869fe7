"""Recurrent states: a layer's memory of a sequence in a fixed number of bytes, and how a step reads and writes it.

A state layer (gated delta rule, Mamba-2, short convolution) keeps one state for each sequence where attention keeps
keys and values for each token. States of all layers lie in slots: a slot holds one sequence's states of every state
layer after some number of its tokens. Slot 0 is the state before any token; it is zero and never written.

A step advances states in **segments**: read the state in slot `source`, advance it over the tokens [begin, end) of the
step, write the result to slot `target`. A row has one or more consecutive segments: a snapshot in the middle of a chunk
ends a segment whose target is the snapshot's slot, from which the next segment starts. A segment without tokens copies.
Segments of different rows have different targets, and no segment reads a slot that another row's segment of the same
step writes, so rows may run in parallel.

The state after a token is computed from the state before it and the token alone, one token after another, in float32:
its bits do not depend on chunks or on other rows, so a snapshot equals a recomputed state. On a GPU, where sums have no
fixed order anyway, prompts are computed many tokens at a time (`kernels.cuda.recurrence`).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch

from asyncengine.execution.device.shared_gather import SharedPools
from asyncengine.execution.device.transfer import Int64Array, upload
from asyncengine.execution.layers.sharded import Share, gathered
from asyncengine.execution.layers.stored import Layer

if TYPE_CHECKING:
    from asyncengine.execution.layers.basic import Linear, Norm
    from asyncengine.execution.layers.options import LayerOptions
    from asyncengine.execution.layers.step import StepContext

FIRST = 0
"""The slot of the state before any token."""


@dataclass(frozen=True, slots=True)
class StateSpec:
    """Shapes of one layer's state of one sequence, without the leading dimension of slots; () for none."""

    recurrent: tuple[int, ...] = ()
    """Recurrent state, float32."""
    window: tuple[int, ...] = ()
    """[taps - 1, channels] the convolution's inputs before the next token, oldest first, in the model's dtype."""
    channel_groups: tuple[int, ...] = ()
    """Channels of each group (queries, keys, values; x, B, C) in a row of the window; (): they are one group."""
    units: int = 1
    """Equal units (heads with their channels of each group) into which ranks can divide the state."""
    divided: bool = False
    """Whether it is one rank's share of the state; other ranks have as much each."""

    def nbytes(self, dtype: torch.dtype) -> int:
        """Bytes of one state."""
        return _count(self.recurrent) * 4 + _count(self.window) * dtype.itemsize


@dataclass(frozen=True, slots=True, eq=False)
class StateSegments:
    """The segments of one step. Host arrays."""

    rows: Int64Array
    """[rows + 1]: row r has segments rows[r] to rows[r + 1], in the order in which they must run."""
    begins: Int64Array
    """[segments] index of the first token in the step."""
    ends: Int64Array
    sources: Int64Array
    targets: Int64Array

    def apart(self) -> tuple[StateSegments, Int64Array]:
        """Split off the segments of one token that are the only one of their row: (other segments, `LoneTokens` as
        int64 [3, rows])."""
        first = self.rows[:-1]
        alone = (np.diff(self.rows) == 1) & (self.ends[first] - self.begins[first] == 1)
        lone, counts = first[alone], np.diff(self.rows)[~alone]
        rest = np.delete(np.arange(len(self.begins)), lone)
        bounds = np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(counts)))
        others = (array[rest] for array in (self.begins, self.ends, self.sources, self.targets))
        return StateSegments(bounds, *others), np.stack((self.begins[lone], self.sources[lone], self.targets[lone]))

    @staticmethod
    def none() -> StateSegments:
        """No segments of no rows."""
        nothing = np.zeros(0, dtype=np.int64)
        return StateSegments(np.zeros(1, dtype=np.int64), nothing, nothing, nothing, nothing)


class StatePools:
    """Memory of all states. `recurrent[i]` float32 [slots, ...] and `windows[i]` [slots, taps - 1, channels] are those
    of state layer i, None where it has none."""

    def __init__(
        self, specs: Sequence[StateSpec], num_slots: int, dtype: torch.dtype, device: torch.device, *,
        padding: bool = False, shared: SharedPools | None = None,
    ) -> None:  # fmt: skip
        """`num_slots`: slot 0 included. `padding`: add one slot, to which padding rows of a graph write. `shared`:
        memory for the states on a CPU; None: ordinary memory."""
        self.specs, count = specs, num_slots + padding
        self.recurrent = [_zeros(count, spec.recurrent, torch.float32, device, shared) for spec in specs]
        self.windows = [_zeros(count, spec.window, dtype, device, shared) for spec in specs]

    @property
    def nbytes(self) -> int:
        return sum(pool.nbytes for pool in (*self.recurrent, *self.windows) if pool is not None)


class LoneTokens(NamedTuple):
    """Segments of one token, each the only one of its row, which a GPU computes all at once. int64 [rows]."""

    tokens: slice | torch.Tensor
    """Indices of the tokens in the step; a slice if these are all tokens, as slicing needs no kernel."""
    sources: torch.Tensor
    targets: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class StateStep:
    """The states of a step, and how they advance."""

    pools: StatePools
    segments: StateSegments
    alone: LoneTokens | None = None
    """Further segments, not among `segments`. A CUDA graph has only these, in its own memory."""


def state_step(pools: StatePools, moves: StateSegments | LoneTokens, device: torch.device) -> StateStep:
    """The `StateStep` of these moves. CPU kernels take segments as they are; for a GPU lone tokens are split off."""
    if isinstance(moves, LoneTokens):
        return StateStep(pools, StateSegments.none(), moves)
    if device.type == "cpu":
        return StateStep(pools, moves)
    rest, alone = moves.apart()
    if not alone.size:
        return StateStep(pools, rest)
    tokens, *slots = upload(alone, device).unbind()
    return StateStep(pools, rest, LoneTokens(tokens if len(rest.begins) else slice(None), *slots))


Slots = tuple[torch.Tensor, torch.Tensor]
"""(sources, targets) int64 [sequences]."""
Advance = Callable[[slice | torch.Tensor, Any, Any, Slots | None], tuple[torch.Tensor | None, torch.Tensor | None]]
"""(indices of tokens, recurrent states [sequences, ...], windows likewise, None) -> both after these tokens.

Each sequence has equally many tokens, sequence by sequence. With slots instead of None, sequences have one token each,
and the arguments are whole pools, in which these slots are advanced in place."""


def advance_segments(step: StateStep, index: int, advance: Advance) -> None:
    """Run the segments of state layer `index` one by one, and lone tokens all at once; for GPUs, and for torch.

    `advance` is called for every segment with tokens, and writes the layer's outputs for these tokens itself.
    """
    recurrent, windows = step.pools.recurrent[index], step.pools.windows[index]
    if step.alone is not None:
        advance(step.alone.tokens, recurrent, windows, step.alone[1:])
    segments = step.segments
    for begin, end, source, target in zip(
        segments.begins.tolist(), segments.ends.tolist(), segments.sources.tolist(), segments.targets.tolist(),
        strict=True,
    ):  # fmt: skip
        state, window = (None if pool is None else pool[source : source + 1] for pool in (recurrent, windows))
        if end > begin:
            state, window = advance(slice(begin, end), state, window, None)
        elif source == target:
            continue
        if recurrent is not None and state is not None:
            recurrent[target] = state[0]
        if windows is not None and window is not None:
            windows[target] = window[0]


def by_kernel(kernel: Any, projected: torch.Tensor, step: StateStep, index: int) -> torch.Tensor:
    """Run the compiled `kernel` of state layer `index` on its projections [T, all], which advances its states."""
    assert step.alone is None, "a compiled kernel takes segments"
    out: torch.Tensor = kernel(projected, step.pools.recurrent[index], step.pools.windows[index], step.segments)
    return out


def recur(
    step: StateStep, index: int, convolve: Callable[..., tuple[torch.Tensor, torch.Tensor]], inputs: torch.Tensor,
    gates: tuple[torch.Tensor, torch.Tensor], token: Callable[..., tuple[torch.Tensor, torch.Tensor]], kernel: Any,
) -> torch.Tensor:  # fmt: skip
    """Advance the recurrent states of layer `index`: outputs float32 [T, heads, value dim].

    `inputs` [T, channels] go through `convolve`, a `CausalConv.advance`. Its results and `gates` [T, any] advance the
    states by `kernel`, a `Recurrence`, or by `token(convolved, gate, gate, states)`, which takes one token of each
    sequence and the states [sequences, ...] before it, and returns (outputs, states after).
    """
    pool = step.pools.recurrent[index]
    assert pool is not None
    out = torch.empty((len(inputs), pool.shape[1], pool.shape[3]), dtype=torch.float32, device=pool.device)

    def advance(
        tokens: slice | torch.Tensor, states: torch.Tensor, windows: torch.Tensor, slots: Slots | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows, windows = convolve(inputs[tokens], windows, slots)
        arguments = rows, gates[0][tokens], gates[1][tokens]
        if kernel is not None:
            made, states = kernel.move(*arguments, states, slots, out[tokens] if isinstance(tokens, slice) else None)
            if not isinstance(tokens, slice):
                out[tokens] = made
            return states, windows
        moved, reads = states if slots is None else states.index_select(0, slots[0]), []
        for token_inputs in zip(*(torch.unflatten(x, 0, (len(moved), -1)).unbind(1) for x in arguments), strict=True):
            read, moved = token(*token_inputs, moved)
            reads.append(read)
        out[tokens] = torch.stack(reads, 1).flatten(0, 1)
        return moved if slots is None else states.index_copy_(0, slots[1], moved), windows

    advance_segments(step, index, advance)
    return out


def each_token(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """The elementwise `function` of x [tokens, ...], applied token by token on a CPU.

    torch computes exponentials in vectors, and a remainder that fills no vector by another routine with other last
    bits. Which elements these are depends on the size of the tensor, and so would a token's bits.
    """
    return function(x) if x.device.type != "cpu" else torch.cat([function(row) for row in torch.split(x, 1)])


class StateLayer(Layer, ABC):
    """A layer that mixes tokens by a recurrent state: x [T, width] -> [T, width]."""

    index: int
    """Number of its states in `StatePools`."""
    spec: StateSpec
    inputs: Linear
    out: Linear
    share: Share | None
    """This rank's heads or channels, whose states it stores; None: it has all of them."""
    kernel: Any = None
    """The compiled kernel that advances its states on a CPU; None: torch does, and no step is recorded."""

    def __call__(self, x: torch.Tensor, step: StepContext) -> torch.Tensor:
        """x [T, width] -> [T, width]. Advances `step.states`; tokens are in order within rows, and rows in the order of
        the segments."""
        assert step.states is not None
        mixed = self.mix(self.projected(x, step), step.states)
        return self.out(gathered(self.share, mixed), step.adapters)

    def projected(self, x: torch.Tensor, step: StepContext) -> torch.Tensor:
        """All projections of x side by side, [T, all], for this rank's heads or channels."""
        return self.inputs.local_outputs(x, step.adapters)

    @abstractmethod
    def mix(self, projected: torch.Tensor, step: StateStep) -> torch.Tensor:
        """The output projection's input [T, this rank's columns], from `projected`; advances the states."""

    def linears(self) -> list[Linear]:
        return [self.inputs, self.out]

    def norms(self) -> list[Norm]:
        return []


class StateConfig(Protocol):
    """A family's settings of a state layer."""

    def build(self, options: LayerOptions, norm: Any, prefix: str, width: int, index: int) -> StateLayer:
        """Build the layer. `index`: number of its states in the pools. `prefix`: of its tensors' names."""
        ...


_ALIGNED = 64


def _zeros(
    num_slots: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, shared: SharedPools | None
) -> torch.Tensor | None:
    """Zeros [num_slots, *shape]; None for an empty shape. On a CPU they are fresh pages, which take no memory until a
    slot is written; torch's own zeros would be written at once."""
    if not shape:
        return None
    if device.type != "cpu":
        return torch.zeros((num_slots, *shape), dtype=dtype, device=device)
    if shared is not None:
        return shared.empty((num_slots, *shape), dtype)
    size = num_slots * _count(shape) * dtype.itemsize
    memory = np.zeros(size + _ALIGNED, dtype=np.uint8)
    first = -memory.ctypes.data % _ALIGNED
    return torch.from_numpy(memory[first : first + size]).view(dtype).view(num_slots, *shape)


def _count(shape: tuple[int, ...]) -> int:
    return math.prod(shape) if shape else 0
