"""Weights that keep their checkpoint's quantization, and several weight forms side by side in one linear layer."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from itertools import accumulate
from typing import Any, TypeVar

import numpy as np
import torch

from asyncengine.execution.device.arena import Empty, OutputBufferPool, ordinary
from asyncengine.execution.device.cores import torch_threads
from asyncengine.execution.layers.stored import GroupedRows, NumberForm, StoredForm, StoredMatrix
from asyncengine.execution.layers.weight_forms import PanelWeight, WeightForm
from asyncengine.kernels.api import compiler_missing, team, triton_missing

# Independent pieces of Python work in parallel, on as many threads as an engine's kernels may use.

Item = TypeVar("Item")


def share_out(work: Callable[[Item], object], items: Sequence[Item]) -> None:
    """Call `work` for each item in any order, on this thread and on as many others as its team has
    (`device.cores.Cores.loading`). Raises the first exception of a call; items not begun by then are skipped.

    Kernels and torch's operators within a call use one thread, so that calls do not compete for the team.
    """
    helpers = min(team.team_threads()[0], len(items)) - 1
    if helpers < 1:
        for item in items:
            work(item)
        return
    left, errors = iter(items), list[BaseException]()
    inference = torch.is_inference_mode_enabled()

    def take() -> None:
        try:
            with torch.inference_mode(inference), torch_threads(1), team.alone():
                for item in left:  # threads share the iterator of a sequence: each item is taken once
                    if errors:
                        return
                    work(item)
        except BaseException as error:
            errors.append(error)

    with ThreadPoolExecutor(helpers, "asyncengine-load") as pool:
        with suppress(RuntimeError):  # the system has no more threads: the others do all of the work
            for _ in range(helpers):
                pool.submit(take)
        take()
    if errors:
        raise errors[0]


_AT_ONCE = 2**20
"""Numbers that are unpacked at once: few enough to stay in the second-level cache until they are packed."""
_BROUGHT_AT_ONCE = 2**24
"""Numbers that are copied to a GPU at once, a byte each."""
_CHUNK_GROUPS = (128, 64, 32, 16)
"""Group sizes (inputs that share a scale) of the GPU kernels; a larger group becomes several with equal scales."""


def on_gpu(device: torch.device) -> bool:
    """Whether stored matrices are kept in chunks on this device (`ChunkedWeight`), not in panels."""
    return device.type == "cuda"


def stored_missing(dtype: torch.dtype, device: torch.device) -> str | None:
    """Why no quantized matrix can keep its stored form here; None: those with a kernel can."""
    if not on_gpu(device):
        return compiler_missing(dtype, device)
    if dtype not in (torch.bfloat16, torch.float16):
        return f"kernels for stored matrices take bfloat16 and float16, not {str(dtype).removeprefix('torch.')}"
    return triton_missing(device)


def chunk_group(form: NumberForm) -> int | None:
    """Group size of the GPU kernel for this form; None: there is no kernel for it."""
    if form.block and (form.below == "zeros" or not form.group):
        return None
    return next((size for size in _CHUNK_GROUPS if form.group % size == 0 and form.block % size == 0), None)


def as_kept(form: NumberForm, device: torch.device) -> NumberForm:
    """The form on a GPU: matrices of e4m3 floats are kept as floats if the GPU's kernels can read them."""
    if form.floats is None or (device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9)):
        return form
    return replace(form, group=form.floats, below="floats")


def panel_form(form: NumberForm) -> Any:
    """The `kernels.cpu.panel_form.PanelForm` for this form, in which a large group may become several with equal
    scales; None: there is no kernel for it."""
    from asyncengine.kernels.api import panel_form as forms

    group = form.group
    if form.below in ("zeros", "minima") and group == 0:
        group = forms.GROUPS[0]
    elif group:
        group = next((size for size in forms.GROUPS if group % size == 0), -1)
    try:
        return forms.PanelForm(form.bits, group, form.below, form.block, form.scale_dtype, tuple(form.table))
    except ValueError:
        return None


class TakesStored(WeightForm):
    """A weight that loads quantized matrices of one form only."""

    order: torch.Tensor | None
    _stored: StoredForm
    rows_at_once: int
    """Rows that are unpacked at once."""

    def takes(self, first: int) -> StoredForm | None:
        return self._stored

    def load(self, first: int, weight: torch.Tensor | StoredMatrix) -> None:
        """Load a matrix as rows from `first` on. In panels, `first` and the number of rows are multiples of 16, except
        for the last rows.

        Raises `ValueError` for a matrix in another form than `takes` says.
        """
        if isinstance(weight, torch.Tensor):
            raise ValueError(f"a weight stored as {self.name} takes quantized matrices only")
        if not self._stored.takes(weight):
            raise ValueError(f"{weight.name}: {weight.form} is not {self.name}: {self._stored.numbers}")
        if self.order is not None:
            order = np.arange(self.inputs) if weight.order is None else weight.order
            self.order.copy_(torch.from_numpy(order))
        count = weight.shape[0]

        def take(begin: int) -> None:
            end = min(begin + self.rows_at_once, count)
            self._pack(first + begin, weight.rows(begin, end))
            if end < count:
                weight.release(begin, end)

        share_out(take, range(0, count, self.rows_at_once))
        weight.release(0, count)

    def _pack(self, first: int, rows: GroupedRows) -> None:
        """Pack rows as those from `first` on."""
        raise NotImplementedError


class GroupedWeight(TakesStored, PanelWeight):
    """A weight in its stored form: the checkpoint's numbers and scales, reordered for CPU kernels."""

    def __init__(
        self, outputs: int, inputs: int, stored: StoredForm, dtype: torch.dtype, empty: Empty = ordinary,
        exact: bool = False,
    ) -> None:  # fmt: skip
        """Raises `ValueError` for a form that there is no kernel for (`panel_form`)."""
        from asyncengine.kernels.api import panel_form as forms

        form = panel_form(stored.numbers)
        if form is None:
            raise ValueError(f"there is no kernel for {stored.numbers}")
        super().__init__(outputs, inputs, form, True, stored.ordered, dtype, empty, exact)
        self.name = self._named(stored.name)
        self._stored, self._numbers = stored, stored.numbers
        self.rows_at_once = max(_AT_ONCE // inputs // forms.PANEL, 1) * forms.PANEL

    def _pack(self, first: int, rows: GroupedRows) -> None:
        self._packing.pack_rows(self._form, self.panels, first, rows.numbers, **self._planes(rows))
        if rows.row_scales is not None and self.row_scales is not None:
            self.row_scales[first : first + len(rows.numbers)].copy_(torch.from_numpy(rows.row_scales))

    def _planes(self, rows: GroupedRows) -> Mapping[str, Any]:
        """Scales, zeros and minima for the kernel's group size; a missing scale is 1."""
        planes = {}
        for name, (_, _, count) in self._form.planes.items():
            plane = getattr(rows, name)
            wanted = -(-self.inputs * count // self._form.chunk)
            if plane is None and name == "scales":
                plane = np.ones((len(rows.numbers), wanted), dtype=np.float32)
            if plane is None:
                raise ValueError(f"{self.name} has no {name}")
            if plane.shape[1] < wanted:  # the checkpoint's groups are larger than the kernel's
                times = self._numbers.group // self._form.group if self._numbers.group else wanted
                plane = np.repeat(plane, times, axis=1)[:, :wanted]
            planes[name] = plane
        return planes


class ChunkedWeight(TakesStored):
    """A weight in its stored form on an NVIDIA GPU, whose kernels dequantize it as they read (`cuda.packed_matmul`)."""

    def __init__(self, outputs: int, inputs: int, stored: StoredForm, device: torch.device) -> None:
        """Raises `ValueError` for a form that there is no kernel for (`chunk_group`)."""
        from asyncengine.kernels.api import packed_matmul

        form = as_kept(stored.numbers, device)
        group = chunk_group(form)
        if group is None:
            raise ValueError(f"there is no kernel for {form}")
        self.outputs, self.inputs, self.bias_dtype, self.name = outputs, inputs, torch.float32, stored.name
        self._kernels, self._stored, self._device = packed_matmul, stored, device
        self.rows_at_once = max(1, _BROUGHT_AT_ONCE // inputs)
        self.order = torch.arange(inputs, device=device) if stored.ordered else None
        bits = 4 if form.bits == 4 else 8
        self._group, self._inputs = group, -(-inputs // (8 // bits * group)) * (8 // bits * group)
        wide = {"dtype": getattr(torch, form.scale_dtype), "each": form.block or group}
        scales = form.group > 0 or form.below not in ("middle", "floats")
        minima, steps = form.below == "minima", form.block > 0
        self.planes = packed_matmul.Planes(
            torch.zeros((self._inputs * bits // (8 * group), outputs, group), dtype=torch.uint8, device=device),
            torch.ones(outputs, dtype=torch.float32, device=device),
            self._plane(scales, **wide), self._plane(steps, torch.int8),
            self._plane(form.below == "zeros", torch.uint8),
            self._plane(minima, **wide), self._plane(steps and minima, torch.int8),
            torch.tensor(form.table, dtype=torch.float32, device=device) if form.table else None,
        )  # fmt: skip
        self._floats = form.below == "floats"
        middle = packed_matmul.FLOATS if self._floats else 1 << (form.bits - 1) if form.below == "middle" else 0
        self.matrix = packed_matmul.ChunkedMatrix(self.planes, inputs, bits, form.block, middle, tuple(form.table))

    def _plane(self, present: bool, dtype: torch.dtype, each: int = 0) -> torch.Tensor | None:
        """[inputs / each, outputs]: one number for every `each` inputs (0: a group) of each output."""
        shape = (-(-self._inputs // (each or self._group)), self.outputs)
        return torch.zeros(shape, dtype=dtype, device=self._device) if present else None

    def _pack(self, first: int, rows: GroupedRows) -> None:
        if self._floats and rows.floats is not None:
            rows = GroupedRows(rows.floats, rows.float_scales, row_scales=rows.row_scales)
        arrays = {name: array for name, array in rows._asdict().items() if array is not None}
        self._put(first, **{name: torch.from_numpy(array).to(self._device) for name, array in arrays.items()})
        self._finish()

    def _put(self, first: int, numbers: torch.Tensor, **tensors: torch.Tensor) -> None:
        """Write rows from `first` on, given by the fields of `GroupedRows` that they have, on the device."""
        rows, bits = slice(first, first + len(numbers)), self.matrix.bits
        numbers = torch.nn.functional.pad(numbers, (0, self._inputs - self.inputs))
        halves = numbers.view(len(numbers), -1, 8 // bits, self._group).permute(2, 1, 0, 3)
        self.planes.numbers[:, rows] = halves[0] if bits == 8 else halves[0] | halves[1] << 4
        if "row_scales" in tensors:
            self.planes.row_scales[rows] = tensors["row_scales"]
        for name in ("scales", "steps", "zeros", "minima", "minimum_steps"):
            plane, tensor = getattr(self.planes, name), tensors.get(name)
            if plane is None:
                continue
            if tensor is None and name != "scales":
                raise ValueError(f"{self.name} has no {name}")
            values = numbers.new_ones(1, 1) if tensor is None else tensor
            wanted = -(-self.inputs * len(plane) // self._inputs)
            times = -(-wanted // values.shape[1])  # the checkpoint's groups may be larger than the kernel's
            plane[:wanted, rows] = values.repeat_interleave(times, 1)[:, :wanted].T.to(plane.dtype)

    def _finish(self) -> None:
        """Wait for the copies: steps read the weight on other streams."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor | None = None) -> torch.Tensor:
        result = x.new_empty((*x.shape[:-1], self.outputs)) if out is None else out
        rows = x.reshape(-1, self.inputs)
        if self.order is not None:
            rows = rows.index_select(1, self.order)
        self._kernels.multiply(
            rows if rows.stride(1) == 1 else rows.contiguous(), self.matrix, result.view(-1, self.outputs), bias
        )
        return result

    def multiply_gated(self, x: torch.Tensor) -> torch.Tensor | None:
        """silu of the first half of the outputs times the second; None: no kernel does both for this number of rows."""
        if self.order is not None or x.dim() != 2 or not self._kernels.gates(self.matrix, len(x)):
            return None
        result: torch.Tensor = x.new_empty((len(x), self.outputs // 2))
        return self._kernels.multiply(x.contiguous(), self.matrix, result, gated=True)

    def logits(self, x: torch.Tensor, bias: torch.Tensor | None, memory: OutputBufferPool) -> torch.Tensor:
        if not self._kernels.few_enough(self.matrix, len(x)):
            return self.multiply(x, bias).float()
        return self.multiply(x, bias, x.new_empty((*x.shape[:-1], self.outputs), dtype=torch.float32))

    def read_rows(self, ids: torch.Tensor, out: torch.Tensor) -> None:
        rows = self._kernels.read_rows(self.matrix, out if self.order is None else torch.empty_like(out), ids=ids)
        if self.order is not None:
            out[:, self.order] = rows


def stored_weight(
    paths: Sequence[str], forms: Mapping[str, StoredForm], outputs: int, inputs: int, bounds: Sequence[int],
    dtype: torch.dtype, device: torch.device, other: Any, empty: Empty = ordinary, exact: bool = False,
) -> WeightForm | None:  # fmt: skip
    """The weight [outputs, inputs] of matrices with stored `forms` by path; None: no matrix is quantized, or one has no
    kernel here (`stored_missing`).

    `bounds`: rows at which one matrix ends and the next begins. Neighbours of one form become one weight, unless they
    have activation orders of their own or do not fill whole panels. `other(outputs, inputs)`: makes the weight of a
    matrix that is not quantized. `exact`: as for `PanelWeight`.
    """
    stored = [forms.get(path) for path in paths]
    stored_forms = [form for form in stored if form is not None]
    if not stored_forms or stored_missing(dtype, device) is not None:
        return None
    in_chunks, panel = on_gpu(device), 1
    if any((chunk_group if in_chunks else panel_form)(form.numbers) is None for form in stored_forms):
        return None
    if not in_chunks:
        from asyncengine.kernels.api import panel_form as panel_forms

        panel = panel_forms.PANEL
    spans: list[tuple[StoredForm | None, int]] = []
    ends = [*bounds, outputs]
    for form, first, last in zip(stored, [0, *bounds], ends, strict=True):
        if spans and spans[-1][0] == form and spans[-1][1] % panel == 0 and not (form is not None and form.ordered):
            spans[-1] = (form, spans[-1][1] + last - first)
        else:
            spans.append((form, last - first))

    def make(form: StoredForm | None, count: int) -> Any:
        if form is None:
            return other(count, inputs)
        if in_chunks:
            return ChunkedWeight(count, inputs, form, device)
        return GroupedWeight(count, inputs, form, dtype, empty, exact)

    made = [make(form, count) for form, count in spans]
    return made[0] if len(made) == 1 else SideBySide(made)


class SideBySide(WeightForm):
    """Several weight forms, whose outputs are concatenated."""

    def __init__(self, forms: Sequence[WeightForm]) -> None:
        self.forms = tuple(forms)
        self.name = " + ".join(dict.fromkeys(form.name for form in forms))
        self.inputs, self.outputs = forms[0].inputs, sum(form.outputs for form in forms)
        self.bias_dtype = torch.float32
        self.compiled = all(form.compiled for form in forms)
        self.waiting = next((form.waiting for form in forms if form.waiting is not None), None)
        self._firsts = [0, *accumulate(form.outputs for form in forms)]

    def load(self, first: int, weight: torch.Tensor | StoredMatrix) -> None:
        """Raises `ValueError` for rows of several forms."""
        for form, begin in zip(self.forms, self._firsts, strict=False):
            if begin <= first and first + weight.shape[0] <= begin + form.outputs:
                return form.load(first - begin, weight)
        raise ValueError(f"rows {first} to {first + weight.shape[0]} are of several forms")

    def takes(self, first: int) -> StoredForm | None:
        index = bisect_right(self._firsts, first) - 1
        return self.forms[index].takes(first - self._firsts[index])

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor | None = None) -> torch.Tensor:
        result = x.new_empty((*x.shape[:-1], self.outputs)) if out is None else out
        for form, begin in zip(self.forms, self._firsts, strict=False):
            part_bias = None if bias is None else bias[begin : begin + form.outputs].to(form.bias_dtype)
            form.multiply(x, part_bias, result[..., begin : begin + form.outputs])
        return result

    def read_rows(self, ids: torch.Tensor, out: torch.Tensor) -> None:
        for form, begin in zip(self.forms, self._firsts, strict=False):
            (local,) = ((ids >= begin) & (ids < begin + form.outputs)).nonzero(as_tuple=True)
            if len(local):
                rows = torch.empty_like(out[: len(local)])
                form.read_rows((ids[local] - begin).contiguous(), rows)
                out[local] = rows
