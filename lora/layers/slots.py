"""Low-rank adapters in device slots, applied to the rows of a step that use them.

A step's adapters are an argument of its forward (`StepContext.adapters`), which each layer calls with the input and
output of its linear. Where adapters come from does not matter here: `write` takes any `LoraAdapter`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import torch
from torch.nn.functional import linear

from asyncengine.errors import AdapterError, InvariantViolation
from asyncengine.execution.device.arena import Arena
from asyncengine.execution.device.transfer import Int64Array, upload
from asyncengine.execution.layers.step import AdapterRecords, CausalLM, LoraTarget, RowAdapters
from asyncengine.kernels.api import compiler_missing, triton_missing
from asyncengine.lora.layers.outputs import MakeRows, OutputChanges
from asyncengine.lora.layers.stack import LoraStack, RowStack, RowStep, padded_rank
from asyncengine.seams import LoraWeights, ModuleDims

# Low-rank deltas with the same shapes in every step, whichever rows use which adapter: what CUDA graphs need.


class MaskedStep:
    """The rows of a step: `slots` int64 [rows] on the device, -1 for none."""

    def __init__(self, num_slots: int, slots: torch.Tensor) -> None:
        self.size = len(slots)
        self.slots = slots
        self.used = frozenset(range(num_slots))
        """All slots: in a CUDA graph, the rows' slots are known only when it is replayed."""
        self._num_slots = num_slots

    @cached_property
    def keep(self) -> torch.Tensor:
        """bool [rows, 1, slots, 1]: True where the row uses the slot."""
        every = torch.arange(self._num_slots, device=self.slots.device)
        return (self.slots[:, None] == every)[:, None, :, None]

    @cached_property
    def known(self) -> torch.Tensor:
        """`slots` as valid indices: 0 for rows without an adapter, whose results are discarded."""
        return self.slots.clamp(min=0)

    def replace(self, slot: int, x: torch.Tensor, y: torch.Tensor, make: MakeRows) -> None:
        """Replace the rows of y that use the slot by those of `make`."""
        y.copy_(torch.where((self.slots == slot)[:, None], make(x, y), y))

    def scale(self, y: torch.Tensor, factors: torch.Tensor, shifts: torch.Tensor) -> None:
        """Multiply each row of y that has an adapter by its slot's of `factors` [slots, out], and add its shifts."""
        scaled = (y.float() * factors[self.known] + shifts[self.known]).to(y.dtype)
        y.copy_(torch.where((self.slots >= 0)[:, None], scaled, y))

    @cached_property
    def tiles(self) -> Any:
        """Rows by slot, as `kernels.cuda.lora` takes them."""
        from asyncengine.kernels.api import gpu

        return gpu.tiles_of(self.slots, self._num_slots)


class MaskedStack(LoraStack):
    """Factors of all slots in one matrix product, of which each row then selects its own slot's."""

    def add(self, x: torch.Tensor, y: torch.Tensor, step: MaskedStep) -> None:
        x, y = self._flat(x, y, step.size)
        modules = len(self.target.modules)
        if self.target.embedding:  # each row's own, repeated
            down = self._a[step.known, :, :, x][:, None].expand(-1, self._slots, -1, -1)
        else:
            down = linear(x, self._a.flatten(0, 2)).view(step.size, self._slots, modules, self.rank)
        # selected and not multiplied by 0 and 1: 0 * inf of another slot would be NaN
        selected = down.new_empty(step.size, modules, self._slots, self.rank)
        torch.where(step.keep, down.transpose(1, 2), down.new_zeros(()), out=selected)
        b = self._b.flatten(0, 1)
        for index, (left, right) in enumerate(pairwise(self._ends)):
            y[:, left:right].addmm_(selected[:, index].flatten(1), b[:, left:right])


class KernelStack(LoraStack):
    """Factors as the Triton kernels read them. Not for embeddings."""

    def add(self, x: torch.Tensor, y: torch.Tensor, step: MaskedStep) -> None:
        x, y = self._flat(x, y, step.size)
        self._add(x, y, self._factors, step.slots, lambda: step.tiles)

    def _allocate(self) -> None:
        from asyncengine.kernels.api import gpu

        super()._allocate()
        self._add, self._factors = gpu.add_deltas, gpu.Factors.of(self._a, self._b, self._ends)


# Low-rank deltas on CPU by a compiled kernel (`kernels.cpu.lora`), for few rows of an adapter and for many.


class CompiledStack(LoraStack):
    """Factors in their plain layout, for the compiled kernel, which reads rows of A and of B in order."""

    def add(self, x: torch.Tensor, y: torch.Tensor, step: RowStep) -> None:
        if self.held.isdisjoint(step.used):
            return
        x, y = self._flat(x, y, step.size)
        total = y.contiguous()
        self._add(x.contiguous(), total, self.factors, step.groups)
        if not y.is_contiguous():
            y.copy_(total)

    def _allocate(self) -> None:
        from asyncengine.kernels.api import lora as kernel

        super()._allocate()
        self._add = kernel.add_deltas
        self.factors: Any = kernel.Factors(self._a, self._b, self._ranks, list(self.target.widths))


class FactorTable:
    """Addresses of the factors of a model's linears, for kernels that run several layers in one call. They are rebuilt
    only when memory moves."""

    def __init__(self, stacks: Mapping[str, LoraStack]) -> None:
        self._stacks = stacks
        self._known: dict[tuple[str, ...], tuple[Int64Array, int]] = {}
        """Addresses by the products' paths, with the most numbers of x A^T for a row."""
        self._down = np.empty(0, dtype=np.float32)

    def forget(self) -> None:
        """Drop all addresses: the memory of some stack is about to move."""
        self._known.clear()

    def records(self, paths: tuple[str, ...], step: RowStep) -> AdapterRecords:
        """Addresses for a step, as `RowAdapters.records`. They stay valid until the next call."""
        if paths not in self._known:
            stacks = [self._stacks.get(path) for path in paths]
            factors = [stack.factors if isinstance(stack, CompiledStack) else None for stack in stacks]
            addresses = np.array([0 if one is None else one.address for one in factors], dtype=np.int64)
            self._known[paths] = addresses, max((one.across for one in factors if one is not None), default=0)
        addresses, across = self._known[paths]
        if len(self._down) < across * step.groups.count:
            self._down = np.empty(across * step.groups.count, dtype=np.float32)
        return AdapterRecords(addresses.ctypes.data, step.groups.address, self._down.ctypes.data)


Step = RowStep | MaskedStep
StepAdapters = tuple[RowAdapters | None, RowAdapters | None]
"""Adapters of all tokens of a step, and of the rows whose logits are wanted."""
_KEPT_STEPS = 8
"""Steps' slots of rows that are kept for the next step."""


class LoraAdapter(Protocol):
    """Factors by the Hugging Face path of the module they belong to."""

    @property
    def modules(self) -> Mapping[str, LoraWeights]: ...


@dataclass(slots=True, eq=False)
class _Adapters:
    """`RowAdapters` of one step."""

    stacks: Mapping[str, LoraStack]
    outputs: Mapping[str, OutputChanges]
    step: Step
    table: FactorTable | None

    def changes(self, path: str) -> bool:
        return path in self.stacks or path in self.outputs

    def add(self, path: str, x: torch.Tensor, y: torch.Tensor) -> None:
        changes = self.outputs.get(path)
        if changes is not None:
            changes.apply(x, y, self.step)
        stack = self.stacks.get(path)
        if stack is not None:
            stack.add(x, y, self.step)

    def records(self, paths: tuple[str, ...]) -> AdapterRecords | None:
        if self.table is None or not isinstance(self.step, RowStep):
            return None
        if any(changes.used_by(self.step) for path, changes in self.outputs.items() if path in paths):
            return None  # no kernel of several layers changes outputs
        return self.table.records(paths, self.step)


class LoraLayers:
    """Slots 1 .. max_loras of one model; slot 0 means no adapter. Used by one thread, between and before forwards."""

    def __init__(self, model: CausalLM, max_loras: int, max_rank: int, masked: bool | None = None) -> None:
        """No memory is taken before `allocate` or `write`. `masked`: apply adapters with the same shapes in every step,
        as CUDA graphs need it; None: wherever the device is not the CPU."""
        self.max_loras = max_loras
        self.max_rank = max_rank
        self.modules: dict[str, ModuleDims] = {}
        """Every module an adapter may target, by Hugging Face path."""
        self._targets: dict[str, tuple[LoraTarget, int]] = {}
        for target in model.lora_targets():
            for index, (path, width) in enumerate(target.modules):
                biased, whole = target.bias is not None, target.read_rows is not None
                dims = ModuleDims(target.in_features, width, target.type, target.scale, biased, target.head, whole)
                self.modules[path] = dims
                self._targets[path] = (target, index)
        self.dtype, self._device = model.dtype, model.device
        self._masked = self._device.type != "cpu" if masked is None else masked
        self._compiled = not self._masked and compiler_missing(self.dtype, self._device) is None
        self._memory = Arena() if self._compiled else None
        self.version = 0
        """Incremented when memory of adapters is allocated or moves, which makes captured CUDA graphs stale."""
        self._stacks: dict[str, LoraStack] = {}
        """Stacks by the first path of their target."""
        self._outputs: dict[str, OutputChanges] = {}
        """Changes of outputs by the same paths; most targets have none."""
        self._written: dict[int, list[LoraStack | OutputChanges]] = {}
        self._bound: dict[int, LoraAdapter] = {}
        """Adapters whose slots hold values that depend on the model's weights (`write_again`)."""
        self._ranks = np.zeros(max_loras, dtype=np.int64)
        """The largest padded rank in each slot."""
        self._table = FactorTable(self._stacks) if self._compiled else None
        self._known: dict[bytes, RowStep] = {}
        """Rows of recent steps by their slots: the next decoding step often has the same."""

    @property
    def nbytes(self) -> int:
        """Device memory taken so far. It grows with the first adapter that targets a module or has a larger rank than
        all before it, and never shrinks."""
        held = [stack.nbytes for stack in self._stacks.values()]
        return sum(held) + sum(each.nbytes for each in self._outputs.values())

    def allocate(self, paths: Iterable[str], rank: int | None = None) -> None:
        """Take the memory that adapters of these modules and this rank need, now instead of at the first `write`.

        `rank` None: as large as it may be.
        """
        for path in paths:
            target, _ = self._target(path)
            if target.is_local:
                self.make_room(target, self.max_rank if rank is None else min(rank, self.max_rank))

    def write(self, slot: int, adapter: LoraAdapter) -> None:
        """Replace the content of `slot` by `adapter`. Not while a step runs; steps wait for it.

        Raises `AdapterError` for an unknown module and for a shape, rank or dtype that does not fit; the slot is
        unchanged then. Values are not looked at: one that is not finite would reach other adapters' rows.
        """
        self._check_slot(slot)
        for path, factors in adapter.modules.items():
            self._check(path, factors)
        local = {path: weights for path, weights in adapter.modules.items() if self._targets[path][0].is_local}
        for path, weights in local.items():
            self.make_room(self._targets[path][0], weights.a.shape[0])
        self.clear(slot)
        written: dict[LoraStack | OutputChanges, None] = {}
        try:
            for path, weights in local.items():
                target, index = self._targets[path]
                b = weights.b
                if weights.magnitude is not None or weights.bias is not None or weights.table is not None:
                    if target.path not in self._outputs:
                        self.version += 1
                        self._outputs[target.path] = OutputChanges(target, self.max_loras, self._device)
                    changes = self._outputs[target.path]
                    written[changes] = None
                    b = changes.put(slot - 1, index, weights)
                    self.version += weights.table is not None
                if len(weights.a):
                    stack = self._stacks[target.path]
                    written[stack] = None
                    stack.write(slot - 1, index, weights.a, target.local_rows(index, b))
        except BaseException:  # no memory for the copy: the slot's next adapter may not overwrite all of this
            for memory in written:
                memory.clear(slot - 1)
            raise
        self._written[slot] = list(written)
        self._ranks[slot - 1] = max((padded_rank(w.a.shape[0]) for w in adapter.modules.values()), default=0)
        if any(weights.magnitude is not None or weights.bias is not None for weights in local.values()):
            self._bound[slot] = adapter

    def write_again(self) -> None:
        """Recompute values that depend on the model's weights, after these have changed: DoRA's norms, biases."""
        for slot, adapter in list(self._bound.items()):
            self.write(slot, adapter)

    def clear(self, slot: int) -> None:
        """Empty `slot`: no row may use it until it is written again. Idempotent."""
        self._check_slot(slot)
        self._known.clear()
        self._bound.pop(slot, None)
        for memory in self._written.pop(slot, []):
            self.version += isinstance(memory, OutputChanges) and slot - 1 in memory.rows
            memory.clear(slot - 1)

    def begin(self, slots: Sequence[int], counts: Int64Array, logit_rows: torch.Tensor) -> StepAdapters:
        """Prepare the adapters of a forward: request r has counts[r] tokens and the adapter in slots[r], or none if
        that is 0.

        `logit_rows` [N] on the device are the tokens whose logits are wanted. Raises `InvariantViolation` for an empty
        slot: it would answer as the base model does.
        """
        if not any(slots):
            return None, None
        self.check_slots(slots)
        token_slots = np.repeat(np.array(slots, dtype=np.int64), counts) - 1
        if self._masked:
            on_device = upload(token_slots, self._device)
            return self._begun(MaskedStep(self.max_loras, on_device), MaskedStep(self.max_loras, on_device[logit_rows]))
        return self._begun(self._row_step(token_slots), self._row_step(token_slots[logit_rows.numpy()]))

    def begin_fixed(self, slots: torch.Tensor) -> StepAdapters:
        """Begin a forward of one row for each of `slots`, int64 on the device, counted from 0, -1 for none; in a CUDA
        graph, whatever is there by the time it is replayed. Needs `masked`."""
        step = MaskedStep(self.max_loras, slots)
        return self._begun(step, step)

    def _begun(self, tokens: Step, logits: Step) -> StepAdapters:
        memory = (self._stacks, self._outputs)
        return _Adapters(*memory, tokens, self._table), _Adapters(*memory, logits, self._table)

    def check_slots(self, slots: Sequence[int]) -> None:
        """Raises `InvariantViolation` for a slot that is not 0 and empty."""
        for slot in slots:
            if slot and slot not in self._written:
                raise InvariantViolation(f"a row uses adapter slot {slot}, which is empty")

    def close(self) -> None:
        """Free all slots and let go of the model. Idempotent."""
        for held in (self._stacks, self._outputs, self._written, self._bound, self._known, self._targets, self.modules):
            held.clear()
        self._table = None

    def _row_step(self, token_slots: Int64Array) -> RowStep:
        key = token_slots.tobytes()
        if key not in self._known:
            if len(self._known) == _KEPT_STEPS:
                self._known.clear()
            self._known[key] = RowStep(token_slots, self._ranks)
        return self._known[key]

    def make_room(self, target: LoraTarget, rank: int) -> None:
        """Have a stack for `target` that can hold `rank`; none for 0."""
        key = target.path
        if not rank:
            return
        if self._table is not None:
            self._table.forget()  # memory may move
        if key in self._stacks:
            self.version += self._stacks[key].grow(rank)
            return
        self.version += 1
        if self._compiled and not self._stacks:
            from asyncengine.kernels.api import lora

            lora.compile_for(self.dtype)
        self._stacks[key] = self._form(target)(target, self.max_loras, rank, self.dtype, self._device, self._memory)

    def _form(self, target: LoraTarget) -> type[LoraStack]:
        if self._masked:
            return MaskedStack if target.embedding or triton_missing(self._device) is not None else KernelStack
        return CompiledStack if self._compiled and not target.embedding else RowStack

    def _check(self, path: str, factors: LoraWeights) -> None:
        """Raises `AdapterError` if `factors` cannot belong to the module at `path`."""
        target, index = self._target(path)
        if factors.embedding != target.embedding:
            raise AdapterError("adapter", "its weights do not belong to this kind of module", path)
        rank, width = factors.a.shape[0], target.modules[index][1]
        if rank > self.max_rank:
            raise AdapterError("max_lora_rank", f"{path} has rank {rank}, more than {self.max_rank}", self.max_rank)
        if tuple(factors.a.shape) != (rank, target.in_features) or tuple(factors.b.shape) != (width, rank):
            shapes = f"{list(factors.a.shape)} and {list(factors.b.shape)}"
            raise AdapterError("adapter", f"{path} maps {target.in_features} to {width}, not as {shapes}")
        if factors.a.dtype != self.dtype or factors.b.dtype != self.dtype:
            raise AdapterError("adapter", f"{path} must be in the model's {self.dtype}", str(factors.a.dtype))

    def _target(self, path: str) -> tuple[LoraTarget, int]:
        if path not in self._targets:
            raise AdapterError("adapter", "the model has no such module that an adapter can change", path)
        return self._targets[path]

    def _check_slot(self, slot: int) -> None:
        if not 1 <= slot <= self.max_loras:
            raise InvariantViolation(f"adapter slot {slot} is not in 1 .. {self.max_loras}")
