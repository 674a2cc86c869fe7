"""Low-rank adapters in device slots, applied to the rows of a step that use them.

The model's modules stay what they are. While a step has rows with adapters, forward hooks on the adapted products add
their deltas; for a step without any, the hooks are taken off, so that it runs exactly the model that was loaded.
Nothing here knows where adapters come from: `write` takes anything of the shape of `LoraAdapter`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from asyncengine.attention.base import Int64Array
from asyncengine.errors import AdapterError, InvalidParameter, InvariantViolation
from asyncengine.models.lora_linears import LoraStack, ModuleDims, Place, StepRows, find_places


class LoraFactors(Protocol):
    """What one module gains: y += (x @ a.T) @ b.T, everything that multiplies it folded in.

    `a` [r, in] and `b` [out, r] are on the host, contiguous, finite and in the model's dtype.
    """

    @property
    def a(self) -> torch.Tensor: ...
    @property
    def b(self) -> torch.Tensor: ...
    @property
    def embedding(self) -> bool: ...


class LoraAdapter(Protocol):
    """Factors by the Hugging Face path of the module they belong to."""

    @property
    def modules(self) -> Mapping[str, LoraFactors]: ...


def install_lora(module: Any, max_loras: int, max_rank: int, targets: Collection[str] | None = None) -> LoraLayers:
    """Make `module`, a loaded and perhaps fused transformers model, ready for adapters in slots 1 .. max_loras.

    `targets` limits what adapters may change to these paths. No memory is taken before `allocate` or `write`. Raises
    `InvalidParameter` for a count below one or a target the model does not have.
    """
    for name, value in (("max_loras", max_loras), ("max_lora_rank", max_rank)):
        if value < 1:
            raise InvalidParameter(name, "must be at least 1", value)
    layers = LoraLayers(module, max_loras, max_rank)
    if targets is not None:
        layers.limit(targets)
    return layers


class LoraLayers:
    """Slots 1 .. max_loras of one model; slot 0 means no adapter. Used by one thread, between and before forwards."""

    def __init__(self, module: Any, max_loras: int, max_rank: int) -> None:
        self.max_loras = max_loras
        self.max_rank = max_rank
        self.modules: dict[str, ModuleDims] = {}
        """Every module an adapter may target, by Hugging Face path."""
        self._places: dict[str, tuple[Place, int]] = {}
        for place in find_places(module):
            for index, (path, width) in enumerate(place.parts):
                self.modules[path] = ModuleDims(place.in_features, width, place.kind, place.scale)
                self._places[path] = (place, index)
        parameter = next(iter(module.parameters()))
        self._dtype, self._device = parameter.dtype, parameter.device
        self._stacks: dict[str, LoraStack] = {}
        """By the first path of its place."""
        self._written: dict[int, list[LoraStack]] = {}
        self._hooks: list[Any] = []
        self._tokens: StepRows | None = None
        self._logits: StepRows | None = None

    @property
    def nbytes(self) -> int:
        """Device memory taken so far. It grows with the first adapter that targets a module, and never shrinks."""
        return sum(stack.nbytes for stack in self._stacks.values())

    def limit(self, targets: Collection[str]) -> None:
        """Let adapters target these paths only. Raises `InvalidParameter` for one not in `modules`."""
        for path in targets:
            self._place("lora_targets", path)
        self.modules = {path: dims for path, dims in self.modules.items() if path in targets}

    def layer_linears(self) -> list[str]:
        """What an adapter made for "all-linear" changes: every linear but the head; no embedding."""
        return [path for path in self.modules if not (self._places[path][0].embedding or self._places[path][0].head)]

    def allocate(self, paths: Iterable[str]) -> None:
        """Take the memory that adapters of these modules need, now instead of at the first `write`."""
        for path in paths:
            place, _ = self._place("lora_targets", path)
            key = place.parts[0][0]
            if key not in self._stacks:
                self._stacks[key] = LoraStack(place, self.max_loras, self.max_rank, self._dtype, self._device)
                self._detach()  # the next step with adapters attaches all of them

    def write(self, slot: int, adapter: LoraAdapter) -> None:
        """Make `slot` hold `adapter` instead of whatever it holds. Not while a step runs; steps wait for it.

        Raises `AdapterError` for an unknown module and for a shape, rank or dtype that does not fit; the slot is
        unchanged then. Values are not looked at: one that is not finite would reach other adapters' rows.
        """
        self._check_slot(slot)
        for path, factors in adapter.modules.items():
            self._check(path, factors)
        self.allocate(adapter.modules)
        self.clear(slot)
        used: dict[str, LoraStack] = {}
        for path, factors in adapter.modules.items():
            place, part = self._places[path]
            key = place.parts[0][0]
            used[key] = self._stacks[key]
            used[key].write(slot - 1, part, factors.a, factors.b)
        self._written[slot] = list(used.values())

    def clear(self, slot: int) -> None:
        """Empty `slot`: no row may use it until it is written again. Idempotent."""
        self._check_slot(slot)
        for stack in self._written.pop(slot, []):
            stack.clear(slot - 1)

    def begin(self, slots: Sequence[int], counts: Int64Array, logit_rows: torch.Tensor) -> None:
        """Before each forward: request r has counts[r] tokens and the adapter in slots[r], or none if that is 0.

        `logit_rows` [N] on the device are the tokens whose logits are wanted. Raises `InvariantViolation` for an empty
        slot: it would answer as the base model does.
        """
        if not any(slots):
            self._detach()
            return
        for slot in slots:
            if slot and slot not in self._written:
                raise InvariantViolation(f"a row uses adapter slot {slot}, which is empty")
        self._tokens, self._logits = self._rows(slots, counts, logit_rows)
        if not self._hooks:
            self._attach()

    def close(self) -> None:
        """Leave the model as it was loaded and free all slots. Idempotent."""
        self._detach()
        self._stacks.clear()
        self._written.clear()

    def _rows(self, slots: Sequence[int], counts: Int64Array, logit_rows: torch.Tensor) -> tuple[StepRows, StepRows]:
        """Maps of all tokens and of those whose logits are wanted."""
        first, last = 0, self.max_loras
        if self._device.type == "cpu":  # elsewhere shapes stay the same from step to step, for CUDA graphs
            first, last = min(slot for slot in slots if slot) - 1, max(slots)
        own = np.repeat(np.array(slots, dtype=np.int64), counts) - 1
        where = torch.from_numpy(own).to(self._device, non_blocking=True)
        segments = None
        if self._device.type == "cpu" or counts.max() > 1:  # a pure decoding step is what a CUDA graph holds
            segments = _segments(slots, counts)
        tokens = StepRows(first, last, where, segments)
        return tokens, StepRows(first, last, where[logit_rows])

    def _check(self, path: str, factors: LoraFactors) -> None:
        """Raises `AdapterError` if `factors` cannot belong to the module at `path`."""
        place, part = self._place("adapter", path)
        if path not in self.modules:
            raise AdapterError("adapter", "its module is not among lora_targets", path)
        if factors.embedding != place.embedding:
            raise AdapterError("adapter", "its weights do not belong to this kind of module", path)
        rank, width = factors.a.shape[0], place.parts[part][1]
        if rank > self.max_rank:
            raise AdapterError("max_lora_rank", f"{path} has rank {rank}, more than {self.max_rank}", self.max_rank)
        if tuple(factors.a.shape) != (rank, place.in_features) or tuple(factors.b.shape) != (width, rank):
            shapes = f"{list(factors.a.shape)} and {list(factors.b.shape)}"
            raise AdapterError("adapter", f"{path} maps {place.in_features} to {width}, not as {shapes}")
        if factors.a.dtype != self._dtype or factors.b.dtype != self._dtype:
            raise AdapterError("adapter", f"{path} must be in the model's {self._dtype}", str(factors.a.dtype))

    def _place(self, field: str, path: str) -> tuple[Place, int]:
        if path not in self._places:
            raise AdapterError(field, "the model has no such module that an adapter can change", path)
        return self._places[path]

    def _check_slot(self, slot: int) -> None:
        if not 1 <= slot <= self.max_loras:
            raise InvariantViolation(f"adapter slot {slot} is not in 1 .. {self.max_loras}")

    def _attach(self) -> None:
        for stack in self._stacks.values():
            self._hooks.append(stack.place.module.register_forward_hook(self._hook(stack)))

    def _hook(self, stack: LoraStack) -> Any:
        def add(_: Any, arguments: tuple[Any, ...], output: torch.Tensor) -> None:
            rows = self._logits if stack.place.head else self._tokens
            assert rows is not None
            stack.add(arguments[0], output, rows)

        return add

    def _detach(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._tokens = self._logits = None


def _segments(slots: Sequence[int], counts: Int64Array) -> tuple[tuple[int, int, int], ...]:
    """(first token, end, slot counted from 0) of neighbouring tokens with one adapter."""
    found: list[tuple[int, int, int]] = []
    end = 0
    for slot, count in zip(slots, counts.tolist(), strict=True):
        begin, end = end, end + count
        if not slot:
            continue
        if found and found[-1][1:] == (begin, slot - 1):
            begin = found.pop()[0]
        found.append((begin, end, slot - 1))
    return tuple(found)
