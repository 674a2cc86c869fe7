"""Weights that stay as their checkpoint stores them, and several forms side by side in one linear layer."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from asyncengine.device.output_buffers import OutputBufferPool
from asyncengine.device.share_out import share_out
from asyncengine.kernels.arena import Empty, ordinary
from asyncengine.kernels.cpu import compiler_missing
from asyncengine.layers.chunked_weight import ChunkedWeight, chunk_group, chunks_missing
from asyncengine.layers.stored import GroupedRows, NumberForm, StoredForm, StoredMatrix
from asyncengine.layers.weight_forms import PanelWeight, WeightForm

_AT_ONCE = 2**20
"""Numbers that are unpacked at once: they stay in the second-level cache until they are in their panels."""


def on_gpu(device: torch.device) -> bool:
    """Whether matrices stay in chunks there (`ChunkedWeight`), not in panels."""
    return device.type == "cuda"


def stored_missing(dtype: torch.dtype, device: torch.device) -> str | None:
    """Why no quantized matrix can stay as it is stored here; None: those can that there is a kernel for."""
    return chunks_missing(dtype, device) if on_gpu(device) else compiler_missing(dtype, device)


def panel_form(form: NumberForm) -> Any:
    """The `kernels.cpu.panel_form.PanelForm` for it; None: there is no kernel. Groups may become several, alike."""
    from asyncengine.kernels.cpu.panel_form import GROUPS, PanelForm

    group = form.group
    if form.below in ("zeros", "minima") and group == 0:
        group = GROUPS[0]
    elif group:
        group = next((size for size in GROUPS if group % size == 0), -1)
    try:
        return PanelForm(form.bits, group, form.below, form.block, form.scale_dtype, tuple(form.table))
    except ValueError:
        return None


class GroupedWeight(PanelWeight):
    """As it is stored: the same numbers and scales, in another order."""

    def __init__(
        self, outputs: int, inputs: int, stored: StoredForm, dtype: torch.dtype, empty: Empty = ordinary
    ) -> None:
        """Raises `ValueError` for a form that there is no kernel for (`panel_form`)."""
        from asyncengine.kernels.cpu.panel_form import PANEL

        form = panel_form(stored.numbers)
        if form is None:
            raise ValueError(f"there is no kernel for {stored.numbers}")
        super().__init__(outputs, inputs, form, True, stored.ordered, dtype, empty)
        self.name = stored.name
        self._stored, self._numbers = stored, stored.numbers
        self._rows = max(_AT_ONCE // inputs // PANEL, 1) * PANEL

    def takes(self, first: int) -> StoredForm | None:
        return self._stored

    def load(self, first: int, weight: torch.Tensor | StoredMatrix) -> None:
        """`first` is a multiple of 16; so is the number of rows, or they are the last ones.

        Raises `ValueError` for a matrix that is stored otherwise than was said.
        """
        if isinstance(weight, torch.Tensor):
            raise ValueError(f"a weight stored as {self.name} takes quantized matrices only")
        if not self._stored.takes(weight):
            raise ValueError(f"{weight.name}: {weight.form} is not {self.name}: {self._numbers}")
        if self.order is not None:
            order = np.arange(self.inputs) if weight.order is None else weight.order
            self.order.copy_(torch.from_numpy(order))
        assert self.row_scales is not None
        count, row_scales = weight.shape[0], self.row_scales

        def take(begin: int) -> None:
            end = min(begin + self._rows, count)
            rows = weight.rows(begin, end)
            self._packing.pack_rows(self._form, self.panels, first + begin, rows.numbers, **self._planes(rows))
            if rows.row_scales is not None:
                row_scales[first + begin : first + end].copy_(torch.from_numpy(rows.row_scales))
            if end < count:
                weight.release(begin, end)

        share_out(take, range(0, count, self._rows))
        weight.release(0, count)

    def _planes(self, rows: GroupedRows) -> Mapping[str, Any]:
        """What groups have, of the kernel's groups; a missing scale is 1."""
        found = {}
        for name, (_, _, count) in self._form.planes.items():
            part = getattr(rows, name)
            wanted = -(-self.inputs * count // self._form.chunk)
            if part is None and name == "scales":
                part = np.ones((len(rows.numbers), wanted), dtype=np.float32)
            if part is None:
                raise ValueError(f"{self.name} has no {name}")
            if part.shape[1] < wanted:  # its groups are larger than those of the kernel
                times = self._numbers.group // self._form.group if self._numbers.group else wanted
                part = np.repeat(part, times, axis=1)[:, :wanted]
            found[name] = part
        return found


def stored_weight(
    paths: Sequence[str], forms: Mapping[str, StoredForm], outputs: int, inputs: int, bounds: Sequence[int],
    dtype: torch.dtype, device: torch.device, other: Any, empty: Empty = ordinary,
) -> WeightForm | None:  # fmt: skip
    """The weight [outputs, inputs] of matrices stored as `forms` has it by path; None: none of them is there, or there
    is no kernel for one, or for any here (`stored_missing`).

    `bounds`: rows at which one matrix ends and the next begins. Neighbours of one form are one matrix, unless each has
    an order of its own, or fills no panels. `other(outputs, inputs)`: the weight of one that is stored plainly.
    """
    stored = [forms.get(path) for path in paths]
    known = [each for each in stored if each is not None]
    if not known or stored_missing(dtype, device) is not None:
        return None
    in_chunks, panel = on_gpu(device), 1
    if any((chunk_group if in_chunks else panel_form)(each.numbers) is None for each in known):
        return None
    if not in_chunks:
        from asyncengine.kernels.cpu.panel_form import PANEL

        panel = PANEL
    spans: list[tuple[StoredForm | None, int]] = []
    ends = [*bounds, outputs]
    for each, first, last in zip(stored, [0, *bounds], ends, strict=True):
        if spans and spans[-1][0] == each and spans[-1][1] % panel == 0 and not (each is not None and each.ordered):
            spans[-1] = (each, spans[-1][1] + last - first)
        else:
            spans.append((each, last - first))

    def make(form: StoredForm | None, count: int) -> Any:
        if form is None:
            return other(count, inputs)
        if in_chunks:
            return ChunkedWeight(count, inputs, form, dtype, device)
        return GroupedWeight(count, inputs, form, dtype, empty)

    made = [make(form, count) for form, count in spans]
    return made[0] if len(made) == 1 else SideBySide(made)


class SideBySide:
    """Several forms, whose outputs follow each other."""

    def __init__(self, forms: Sequence[WeightForm]) -> None:
        self.forms = tuple(forms)
        self.inputs, self.outputs = forms[0].inputs, sum(form.outputs for form in forms)
        self.bias_dtype = torch.float32
        self.waiting = next((form.waiting for form in forms if form.waiting is not None), None)
        self._firsts = [0, *accumulate(form.outputs for form in forms)]

    @property
    def name(self) -> str:
        return " + ".join(dict.fromkeys(form.name for form in self.forms))

    @property
    def nbytes(self) -> int:
        return sum(form.nbytes for form in self.forms)

    def load(self, first: int, weight: torch.Tensor | StoredMatrix) -> None:
        """Raises `ValueError` for rows of several forms."""
        for form, begin in zip(self.forms, self._firsts, strict=False):
            if begin <= first and first + weight.shape[0] <= begin + form.outputs:
                return form.load(first - begin, weight)
        raise ValueError(f"rows {first} to {first + weight.shape[0]} are of several forms")

    def takes(self, first: int) -> StoredForm | None:
        place = bisect_right(self._firsts, first) - 1
        return self.forms[place].takes(first - self._firsts[place])

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor | None = None) -> torch.Tensor:
        found = x.new_empty((*x.shape[:-1], self.outputs)) if out is None else out
        for form, begin in zip(self.forms, self._firsts, strict=False):
            own = None if bias is None else bias[begin : begin + form.outputs].to(form.bias_dtype)
            form.multiply(x, own, found[..., begin : begin + form.outputs])
        return found

    def logits(self, x: torch.Tensor, bias: torch.Tensor | None, memory: OutputBufferPool) -> torch.Tensor:
        return self.multiply(x, bias).float()

    def read_rows(self, ids: torch.Tensor, out: torch.Tensor) -> None:
        raise RuntimeError("rows of several forms side by side cannot be read")

    def products(self, bias: torch.Tensor | None) -> list[Any] | None:
        found = []
        for form, begin in zip(self.forms, self._firsts, strict=False):
            own = form.products(None if bias is None else bias[begin : begin + form.outputs])
            if own is None:
                return None
            found += [each._replace(first=begin + each.first) for each in own]
        return found
