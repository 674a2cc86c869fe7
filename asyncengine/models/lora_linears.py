"""Where low-rank adapters act in a model, and the products that apply all adapters of a step at once.

Every adapted product of the model keeps the factors of all device slots side by side. Two ways to apply them:

* stacked: x @ [A_1; A_2; ...]^T, zero wherever a token's slot is another one, @ [B_1 | B_2 | ...]^T. Two products
  whatever the number of adapters, with shapes that do not depend on who uses which;
* by segment: neighbouring tokens of one adapter form a segment with two products of its own. Less work when there are
  many slots and long segments (prompts), more calls otherwise. Same idea as the segments of Punica's SGMV.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from torch.nn.functional import embedding, linear

from asyncengine.models.linears import FastLinear, GatedMLP, MergedQKV

_QKV = ("q_proj", "k_proj", "v_proj")
_GATE_UP = ("gate_proj", "up_proj")
_CALL = {torch.float32: 115_000}
_CALL_HALF = 4_500_000
"""Multiplications that take as long as calling one product, measured on CPU with one thread: a half-precision product
costs more to call and less by number."""
_KEPT_WINDOWS = 32
"""Ranges of slots a stack keeps views of."""


class ModuleDims(NamedTuple):
    """One module that an adapter may change."""

    inputs: int
    """Features in; rows of the table for an embedding."""
    outputs: int
    kind: Literal["linear", "conv1d", "embedding"] = "linear"
    """conv1d: GPT-2's linear, stored transposed."""
    scale: float = 1.0
    """What the module multiplies its output by (Gemma 3's embedding): what adapters add must be multiplied as well."""


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """One product of the model, and the modules (by their Hugging Face paths) whose outputs lie in it side by side."""

    module: nn.Module
    """What is called with the product's input; its output is where deltas are added."""
    in_features: int
    """Rows of the table for an embedding."""
    parts: tuple[tuple[str, int], ...]
    """(path, width of its output)."""
    kind: Literal["linear", "conv1d", "embedding"] = "linear"
    head: bool = False
    """Gets the rows whose logits are wanted, not all tokens."""
    scale: float = 1.0

    @property
    def embedding(self) -> bool:
        return self.kind == "embedding"


def find_places(model: Any) -> list[Place]:
    """Every place of a transformers model, fused or not, that low-rank weights can be added to.

    Linears of single experts are left out: they see a part of the tokens, in an order of their own.
    """
    from transformers.pytorch_utils import Conv1D

    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    found: list[Place] = []
    inner: set[str] = set()
    for path, child in model.named_modules():
        parent = path.rpartition(".")[0]
        if path in inner or "experts" in path.split("."):
            continue
        if child is table:
            rows, width = child.weight.shape
            scale = float(getattr(child, "embed_scale", 1.0))
            found.append(Place(child, rows, ((path, width),), "embedding", scale=scale))
        elif isinstance(child, MergedQKV):
            parts = tuple((f"{parent}.{name}", size) for name, size in zip(_QKV, child.sizes, strict=True))
            found.append(Place(child.merged, child.merged.in_features, parts))
            inner.add(f"{path}.merged")
        elif isinstance(child, GatedMLP):
            half = child.gate_up.out_features // 2
            found.append(
                Place(child.gate_up, child.gate_up.in_features, tuple((f"{path}.{n}", half) for n in _GATE_UP))
            )
            inner.add(f"{path}.gate_up")
        elif isinstance(child, (nn.Linear, FastLinear)):
            found.append(Place(child, child.in_features, ((path, child.out_features),), head=child is head))
        elif isinstance(child, Conv1D):  # stores the transpose, but maps in to out like any other
            found.append(Place(child, child.nx, ((path, child.nf),), "conv1d", head=child is head))
    return found


class StepRows:
    """Which slot each row of a product's input uses. Slots count from 0 here; rows without an adapter use none.

    Slots [first, last) take part. `slots` int64 [rows] on the device is each row's slot, -1 for none; `segments` are
    (first row, end row, slot) of neighbours with one adapter and cover all rows with one; None: never go by segment.
    """

    def __init__(
        self, first: int, last: int, slots: torch.Tensor, segments: tuple[tuple[int, int, int], ...] | None = None
    ) -> None:
        self.first, self.last, self.segments = first, last, segments
        self.slots = slots.clamp(min=0)
        self.spared = len(slots) * (last - first - 1) / len(segments) if segments else 0.0
        """Rows x slots that each segment spares the stacked products."""
        taking_part = torch.arange(first, last, device=slots.device)
        self.keep = (slots[:, None] == taking_part)[:, None, :, None]
        """bool [rows, 1, slots, 1]: True where the row uses the slot."""
        self._scratch: dict[int, tuple[torch.Tensor, list[torch.Tensor], torch.Tensor]] = {}

    def __len__(self) -> int:
        return len(self.slots)

    def choose(self, down: torch.Tensor) -> list[torch.Tensor]:
        """down [rows, slots, parts, rank], zero where the slot is not the row's own, as [rows, slots * rank] by part.

        Chosen, not multiplied, so that no neighbour's infinity spreads. The memory is used again by the next call:
        calls are what a small batch pays for, so that everything that stays the same in a step is made once.
        """
        size, slots, parts, rank = down.shape
        if parts not in self._scratch:
            out = down.new_empty(size, parts, slots, rank)
            self._scratch[parts] = out, [part.view(size, -1) for part in out.unbind(1)], down.new_zeros(())
        out, found, zero = self._scratch[parts]
        torch.where(self.keep, down.transpose(1, 2), zero, out=out)
        return found


class LoraStack:
    """The factors of all slots for one place. Rank is padded with zeros: a padded factor adds exact zeros."""

    def __init__(self, place: Place, slots: int, rank: int, dtype: torch.dtype, device: torch.device) -> None:
        self.place = place
        self._rank = rank
        self._width = place.in_features
        count = len(place.parts)
        kind: dict[str, Any] = {"dtype": dtype, "device": device}
        shape = (slots, place.in_features, rank) if place.embedding else (slots, count, rank, place.in_features)
        self._a = torch.zeros(shape, **kind)
        # [out, slots, rank]: a row is all slots' factors of one output, the layout that CPU products read fastest
        self._b = [torch.zeros((width, slots, rank), **kind) for _, width in place.parts]
        self._ends = list(accumulate((width for _, width in place.parts), initial=0))
        calls, numbers = 1 + count, rank * (count * place.in_features * (not place.embedding) + self._ends[-1])
        self._segment_price = _CALL.get(dtype, _CALL_HALF) * calls / numbers
        """Rows x slots whose products take as long as the calls of one segment."""
        self._windows: dict[tuple[int, int], tuple[torch.Tensor, list[torch.Tensor]]] = {}
        self.nbytes = self._a.nbytes + sum(part.nbytes for part in self._b)

    def write(self, slot: int, part: int, a: torch.Tensor, b: torch.Tensor) -> None:
        """Put a [r, in] and b [out, r] into an empty slot."""
        rank = a.shape[0]
        if self.place.embedding:
            self._a[slot, :, :rank].copy_(a.T)
        else:
            self._a[slot, part, :rank].copy_(a)
        self._b[part][:, slot, :rank].copy_(b)

    def clear(self, slot: int) -> None:
        self._a[slot].zero_()
        for part in self._b:
            part[:, slot].zero_()

    def add(self, x: torch.Tensor, y: torch.Tensor, rows: StepRows) -> None:
        """Add each row's delta to `y` [..., out] in place; x [..., in], or token ids for an embedding."""
        x = x.reshape(-1) if self.place.embedding else x.reshape(-1, self._width)
        y = y.view(-1, self._ends[-1])
        if len(x) != len(rows):
            raise RuntimeError(f"{self.place.parts[0][0]} got {len(x)} rows of a step of {len(rows)}")
        if not len(x):  # a step that wants no logits
            return
        if rows.segments is None or rows.spared <= self._segment_price:
            a, b = self._window(rows.first, rows.last)
            slots = rows.last - rows.first
            if self.place.embedding:  # each row's own, repeated
                down = a[rows.slots, x][:, None, None].expand(-1, slots, -1, -1)
            else:
                down = linear(x, a).view(len(x), slots, -1, self._rank)
            self._up(rows.choose(down), b, y)
            return
        for begin, end, slot in rows.segments:
            a, b = self._window(slot, slot + 1)
            if self.place.embedding:
                a = a[slot]
                down = embedding(x[begin:end], a)
            else:
                down = linear(x[begin:end], a)
            self._up(list(torch.split(down, self._rank, dim=1)), b, y[begin:end])

    def _window(self, first: int, last: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Views of slots [first, last): a [slots * parts * rank, in] (an embedding's whole table) and each B^T."""
        found = self._windows.get((first, last))
        if found is None:
            if len(self._windows) == _KEPT_WINDOWS:
                self._windows.clear()
            a = self._a if self.place.embedding else self._a[first:last].view(-1, self._width)
            found = self._windows[first, last] = a, [part[:, first:last].flatten(1).T for part in self._b]
        return found

    def _up(self, downs: list[torch.Tensor], b: list[torch.Tensor], y: torch.Tensor) -> None:
        """y += down @ B^T, part by part."""
        if len(b) == 1:
            y.addmm_(downs[0], b[0])
            return
        for index, (down, part) in enumerate(zip(downs, b, strict=True)):
            y[:, self._ends[index] : self._ends[index + 1]].addmm_(down, part)
