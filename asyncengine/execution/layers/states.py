"""Recurrent state: what a layer remembers of a sequence in a fixed number of bytes, and how a step reads and writes it.

A state layer (gated delta rule, Mamba-2, short convolution) keeps one state for each sequence where attention keeps
keys and values for each token. States of all layers lie in slots: a slot holds one sequence's states of every state
layer after some number of its tokens. Slot 0 is the state before any token; it is zero and never written.

A step tells a layer what to do in **segments**: take the state of `source`, move it over the tokens [begin, end) of the
step, put what comes out into `target`. A row has one segment or several, one after another: a snapshot in the middle of
a chunk is a segment that ends there and whose target is the snapshot's slot, from which the next one starts. A segment
without tokens copies. Segments of different rows touch different targets, and no segment reads what another row's
segment of the same step writes, so rows may run in parallel.

The state after a token is computed from the state before it and the token alone, one token after another, in float32:
the same bits in any chunk and any company, so that a snapshot equals what would be computed. On a GPU, where sums have
no fixed order anyway, prompts go many tokens at a time (`kernels.cuda.recurrence`).
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
    """The state that one layer remembers of one sequence. Shapes without the leading one of slots; () for nothing."""

    recurrent: tuple[int, ...] = ()
    """float32."""
    window: tuple[int, ...] = ()
    """The inputs of a convolution that precede the next token, [taps - 1, channels], oldest first, each as a row of the
    layer's own; the model's dtype."""
    kinds: tuple[int, ...] = ()
    """Channels of each kind, side by side in a row of the window; (): they are of one."""
    parts: int = 1
    """Equal parts (heads, and of each kind as much) of which each of several processes may have some."""
    divided: bool = False
    """It is the share of one of several processes; the others have as much each."""

    def nbytes(self, dtype: torch.dtype) -> int:
        """Bytes of one state."""
        return _count(self.recurrent) * 4 + _count(self.window) * dtype.itemsize


@dataclass(frozen=True, slots=True, eq=False)
class StateSegments:
    """The segments of one step. Host arrays."""

    rows: Int64Array
    """[rows + 1]: row r has segments rows[r] to rows[r + 1], in the order in which they must run."""
    begins: Int64Array
    """[segments] first token, of the step's."""
    ends: Int64Array
    sources: Int64Array
    targets: Int64Array

    def apart(self) -> tuple[StateSegments, Int64Array]:
        """(the others, `LoneTokens` [3, rows]): segments of one token that are the only one of their row go apart."""
        first = self.rows[:-1]
        alone = (np.diff(self.rows) == 1) & (self.ends[first] - self.begins[first] == 1)
        lone, counts = first[alone], np.diff(self.rows)[~alone]
        rest = np.delete(np.arange(len(self.begins)), lone)
        bounds = np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(counts)))
        others = (part[rest] for part in (self.begins, self.ends, self.sources, self.targets))
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
        """`num_slots`: slot 0 included. `padding`: there is one more, which rows that fill up a graph write to.
        `shared`: memory for them on a CPU; None: wherever it is."""
        self.specs, count = specs, num_slots + padding
        self.recurrent = [_zeros(count, spec.recurrent, torch.float32, device, shared) for spec in specs]
        self.windows = [_zeros(count, spec.window, dtype, device, shared) for spec in specs]

    @property
    def nbytes(self) -> int:
        return sum(pool.nbytes for pool in (*self.recurrent, *self.windows) if pool is not None)


class LoneTokens(NamedTuple):
    """Segments of one token, each the only one of its row, as a device takes them all at once. int64 [rows]."""

    tokens: slice | torch.Tensor
    """Places among the step's tokens; a slice where all of them are meant, which takes no kernel."""
    sources: torch.Tensor
    targets: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class StateStep:
    """The states that a step's context names."""

    pools: StatePools
    segments: StateSegments
    alone: LoneTokens | None = None
    """Further segments, which are not among `segments`. A CUDA graph has these alone, in memory of its own."""


def state_step(pools: StatePools, moves: StateSegments | LoneTokens, device: torch.device) -> StateStep:
    """A step that moves these; on devices other than a CPU, whose kernels take segments, lone tokens go apart."""
    if isinstance(moves, LoneTokens):
        return StateStep(pools, StateSegments.none(), moves)
    if device.type == "cpu":
        return StateStep(pools, moves)
    others, alone = moves.apart()
    if not alone.size:
        return StateStep(pools, others)
    tokens, *slots = upload(alone, device).unbind()
    return StateStep(pools, others, LoneTokens(tokens if len(others.begins) else slice(None), *slots))


Slots = tuple[torch.Tensor, torch.Tensor]
"""(sources, targets) int64 [sequences]."""
Advance = Callable[[slice | torch.Tensor, Any, Any, Slots | None], tuple[torch.Tensor | None, torch.Tensor | None]]
"""(which tokens, recurrent states [sequences, ...], windows alike, None) -> the two after these tokens.

Each sequence has equally many of them, and one's stand behind the other's. With slots in place of None, the states of
sequences of one token lie there in pools, which are given whole and moved."""


def advance_segments(step: StateStep, index: int, advance: Advance) -> None:
    """Run the segments of state layer `index`, one by one but for lone tokens, on devices other than a CPU or in torch.

    `advance` is called for every segment with tokens and writes the layer's outputs of these tokens itself.
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
    """Run the compiled `kernel` of state layer `index` on its projections [T, all], and move its states on."""
    assert step.alone is None, "a compiled kernel takes segments"
    made: torch.Tensor = kernel(projected, step.pools.recurrent[index], step.pools.windows[index], step.segments)
    return made


def recur(
    step: StateStep, index: int, convolve: Callable[..., tuple[torch.Tensor, torch.Tensor]], inputs: torch.Tensor,
    gates: tuple[torch.Tensor, torch.Tensor], token: Callable[..., tuple[torch.Tensor, torch.Tensor]], kernel: Any,
) -> torch.Tensor:  # fmt: skip
    """Reads of the recurrent states of layer `index`, float32 [T, heads, value dim].

    `inputs` [T, channels] go through `convolve`, a `CausalConv.advance`. Over what comes out and `gates` [T, any] the
    states are moved by a `Recurrence`, or by `token`: of what these are for a token of each sequence, and of the states
    [sequences, ...], it makes what is read and the states after.
    """
    pool = step.pools.recurrent[index]
    assert pool is not None
    out = torch.empty((len(inputs), pool.shape[1], pool.shape[3]), dtype=torch.float32, device=pool.device)

    def advance(
        tokens: slice | torch.Tensor, states: torch.Tensor, windows: torch.Tensor, slots: Slots | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows, windows = convolve(inputs[tokens], windows, slots)
        parts = rows, gates[0][tokens], gates[1][tokens]
        if kernel is not None:
            made, states = kernel.move(*parts, states, slots, out[tokens] if isinstance(tokens, slice) else None)
            if not isinstance(tokens, slice):
                out[tokens] = made
            return states, windows
        moved, reads = states if slots is None else states.index_select(0, slots[0]), []
        for place in zip(*(torch.unflatten(part, 0, (len(moved), -1)).unbind(1) for part in parts), strict=True):
            read, moved = token(*place, moved)
            reads.append(read)
        out[tokens] = torch.stack(reads, 1).flatten(0, 1)
        return moved if slots is None else states.index_copy_(0, slots[1], moved), windows

    advance_segments(step, index, advance)
    return out


def each_token(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """`function`, which takes numbers one by one, of x [tokens, ...], one token after the other on a CPU.

    torch computes exponentials in vectors and those that fill none of them in another way, with other last bits: which
    ones these are depends on how many numbers there are.
    """
    return function(x) if x.device.type != "cpu" else torch.cat([function(row) for row in torch.split(x, 1)])


class StateLayer(Layer, ABC):
    """A layer that mixes tokens by a state: x [T, width] -> [T, width]."""

    index: int
    """The place of its states among the pools."""
    spec: StateSpec
    inputs: Linear
    out: Linear
    share: Share | None
    """This rank's heads or channels, whose states it keeps; None: it has all of them."""
    kernel: Any = None
    """The compiled kernel that moves its states on a CPU; None: torch moves them, and no step is recorded."""

    def __call__(self, x: torch.Tensor, step: StepContext) -> torch.Tensor:
        """Takes `step.states`; tokens of a row stand in order, rows in the order of the segments."""
        assert step.states is not None
        mixed = self.mix(self.projected(x, step), step.states)
        return self.out(gathered(self.share, mixed), step.adapters)

    def projected(self, x: torch.Tensor, step: StepContext) -> torch.Tensor:
        """All projections of x side by side, [T, all], for the heads or channels that are here."""
        return self.inputs.own(x, step.adapters)

    @abstractmethod
    def mix(self, projected: torch.Tensor, step: StateStep) -> torch.Tensor:
        """Numbers [T, those that are here] for the last projection, of `projected`."""

    def linears(self) -> list[Linear]:
        return [self.inputs, self.out]

    def norms(self) -> list[Norm]:
        return []


class StateConfig(Protocol):
    """A family's settings of such a layer; it knows how to build it."""

    def build(self, options: LayerOptions, norm: Any, prefix: str, width: int, index: int) -> StateLayer:
        """The layer, whose states have place `index` among the pools; `prefix` of its tensors' names."""
        ...


_ALIGNED = 64


def _zeros(
    num_slots: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, shared: SharedPools | None
) -> torch.Tensor | None:
    """Memory of the host is taken when a slot is first written: torch writes its zeros, the system knows them."""
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
