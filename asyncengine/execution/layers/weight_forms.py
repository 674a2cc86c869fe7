"""Forms in which the matrix of a linear layer is kept in memory, one class for each.

A form is made empty, at its final address, and filled by blocks of rows: when loading, and by later updates, which
then reach graphs and records that hold the address. `load` takes rows [first, first + n) of the matrix [outputs,
inputs].
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.nn.functional import linear

from asyncengine.execution.device.arena import Empty, OutputBufferPool, ordinary
from asyncengine.execution.layers.stored import StoredForm, StoredMatrix, Weighted, dense
from asyncengine.kernels.api import triton_missing

Release = Callable[[torch.Tensor], object]
_SLICE = 4096
"""Rows that are copied at once: bounds how much of a mapped file is in memory beside the weight itself."""


def keep_all(rows: torch.Tensor) -> None:
    """A `Release` that does nothing."""


def row_chunks(weight: torch.Tensor | StoredMatrix, release: Release) -> Iterator[tuple[int, torch.Tensor]]:
    """Iterate over chunks of rows: (first row, rows). `release` is called with each chunk before the next one.

    Rows of a quantized matrix are dequantized to float32.
    """
    if not isinstance(weight, torch.Tensor):
        for first in range(0, weight.shape[0], _SLICE):
            last = min(first + _SLICE, weight.shape[0])
            yield first, dense(weight, first, last)
            weight.release(first, last)
        return
    for first in range(0, len(weight), _SLICE):
        chunk = weight[first : first + _SLICE]
        yield first, chunk
        release(chunk)


class WaitingRows:
    """Rows of a matrix [outputs, inputs] that can only be packed all at once, collected here in ordinary memory."""

    def __init__(self, outputs: int, inputs: int, dtype: torch.dtype) -> None:
        self._shape, self._dtype = (outputs, inputs), dtype
        self._rows: torch.Tensor | None = None
        self._missing = 0

    def add(self, first: int, weight: torch.Tensor | StoredMatrix) -> torch.Tensor | None:
        """Take rows from `first` on. Returns the whole matrix with the last of them, and forgets it; None before."""
        if self._rows is None:
            self._rows, self._missing = torch.empty(self._shape, dtype=self._dtype), self._shape[0]
        for begin, chunk in row_chunks(weight, keep_all):
            self._rows[first + begin : first + begin + len(chunk)].copy_(chunk)
        self._missing -= weight.shape[0]
        if self._missing:
            return None
        whole, self._rows = self._rows, None
        return whole


class WeightForm(Weighted, ABC):
    """The matrix [outputs, inputs] of one linear layer. `load` writes to all of its tensors."""

    name: str
    """Name of the form, for `info`."""
    outputs: int
    inputs: int
    bias_dtype: torch.dtype
    """The dtype of the bias that `multiply` takes."""
    compiled = False
    """Whether a compiled kernel multiplies, so that a row's result does not depend on the rows beside it."""
    waiting: WaitingRows | None = None
    """Collects rows that can only be packed together; None: rows are packed as they come."""

    @abstractmethod
    def load(self, first: int, weight: torch.Tensor | StoredMatrix) -> None:
        """Load rows from `first` on: weight [n, inputs] of any float dtype or quantized, perhaps mapped from a file."""

    def takes(self, first: int) -> StoredForm | None:
        """The only stored form that rows from `first` on may have; None: any, and plain numbers."""
        return None

    @abstractmethod
    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor | None = None) -> torch.Tensor:
        """x W^T + bias, [..., inputs] -> [..., outputs], in x's dtype; into `out`, whose rows may lie apart."""

    def multiply_from(self, first: int, x: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
        """The same into `out`, at least for the outputs from `first` on; a form may compute the others as well."""
        self.multiply(x, bias, out)

    def logits(self, x: torch.Tensor, bias: torch.Tensor | None, memory: OutputBufferPool) -> torch.Tensor:
        """x W^T + bias in float32, in `memory` if a kernel can write there."""
        return self.multiply(x, bias).float()

    @abstractmethod
    def read_rows(self, ids: torch.Tensor, out: torch.Tensor) -> None:
        """out [n, inputs] = rows `ids` (int64 [n], contiguous, in range)."""


class DenseWeight(WeightForm):
    """An ordinary torch matrix: for GPUs, and for dtypes without compiled kernels."""

    name = "dense"

    def __init__(
        self, outputs: int, inputs: int, dtype: torch.dtype, device: torch.device, release: Release = keep_all,
        empty: Empty = ordinary,
    ) -> None:  # fmt: skip
        self.outputs, self.inputs, self.bias_dtype = outputs, inputs, dtype
        on_cpu = device.type == "cpu"
        shape = (outputs, inputs)
        self.weight = empty(shape, dtype) if on_cpu else torch.empty(shape, dtype=dtype, device=device)
        self._release = release
        self._few: Any = None
        """Kernels for a few rows; None: there are none here."""
        if dtype.itemsize == 2 and triton_missing(device) is None:
            from asyncengine.kernels.api import gpu

            self._few = gpu

    def load(self, first: int, weight: torch.Tensor | StoredMatrix) -> None:
        for begin, chunk in row_chunks(weight, self._release):
            self.weight[first + begin : first + begin + len(chunk)].copy_(chunk)

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor | None = None) -> torch.Tensor:
        if self._few is not None and out is None and self._few.few_rows_pay(x, self.weight):
            return self._few.few_rows(x, self.weight, bias)
        result = linear(x, self.weight, bias)
        return result if out is None else out.copy_(result)

    def multiply_gated(self, x: torch.Tensor) -> torch.Tensor | None:
        """silu of the first half of the outputs times the second; None: no kernel does both for this number of rows."""
        if self._few is None or not self._few.few_rows_pay(x, self.weight, gated=True):
            return None
        return self._few.few_rows(x, self.weight, None, gated=True)

    def logits(self, x: torch.Tensor, bias: torch.Tensor | None, memory: OutputBufferPool) -> torch.Tensor:
        if self._few is not None and self._few.few_rows_pay(x, self.weight):
            return self._few.few_rows(x, self.weight, bias, dtype=torch.float32)
        return linear(x, self.weight, bias).float()

    def read_rows(self, ids: torch.Tensor, out: torch.Tensor) -> None:
        torch.index_select(self.weight, 0, ids, out=out)


class CompiledWeight(WeightForm):
    """A weight in panels for compiled kernels.

    A row's result depends neither on the rows beside it nor on the number of threads.
    """

    compiled = True
    _matrix: Any
    """The kernels' record of the matrix."""

    def logits(self, x: torch.Tensor, bias: torch.Tensor | None, memory: OutputBufferPool) -> torch.Tensor:
        return self.multiply(x, bias, memory.take((*x.shape[:-1], self.outputs)))

    def product(self, bias: torch.Tensor | None) -> Any:
        """The record of this product for kernels that compute several products."""
        from asyncengine.kernels.api import LinearWeights

        return LinearWeights(self._matrix, bias, self.inputs, self.outputs)


class PackedWeight(CompiledWeight):
    """A weight in panels of thirty-two outputs (`kernels.cpu.packed`)."""

    name = "packed"

    def __init__(
        self, outputs: int, inputs: int, dtype: torch.dtype, release: Release = keep_all, empty: Empty = ordinary
    ) -> None:
        from asyncengine.kernels.api import packed as panels

        self.outputs, self.inputs, self.bias_dtype = outputs, inputs, torch.float32
        self._panels = panels
        self._release = release
        self.weight = self._matrix = panels.empty_panels(outputs, inputs, dtype, empty)

    def load(self, first: int, weight: torch.Tensor | StoredMatrix) -> None:
        for begin, chunk in row_chunks(weight, self._release):
            self._panels.pack_rows(chunk, self.weight, first + begin)

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor | None = None) -> torch.Tensor:
        result = x.new_empty((*x.shape[:-1], self.outputs)) if out is None else out
        self._panels.gemm(x, self.weight, result, bias)
        return result

    def multiply_from(self, first: int, x: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
        panel = first // self._panels.WIDTH
        first = panel * self._panels.WIDTH
        self._panels.gemm(x, self.weight[panel:], out[:, first:], None if bias is None else bias[first:])

    def read_rows(self, ids: torch.Tensor, out: torch.Tensor) -> None:
        self._panels.read_rows(ids, self.weight, out)


class PanelWeight(CompiledWeight):
    """A quantized weight in panels of sixteen outputs (`kernels.cpu.gemm_quantized`). Its inputs x are rounded to 8
    bits as they come, or with `exact` multiplied in float32."""

    def __init__(
        self, outputs: int, inputs: int, form: Any, row_scales: bool, ordered: bool, dtype: torch.dtype,
        empty: Empty = ordinary, exact: bool = False,
    ) -> None:  # fmt: skip
        """`form`: a `kernels.cpu.panel_form.PanelForm`. `row_scales`: outputs have scales. `ordered`: the inputs may be
        permuted against those of x (GPTQ's activation order)."""
        from asyncengine.kernels.api import gemm_quantized as products
        from asyncengine.kernels.api import quantized_panels as packing

        self.outputs, self.inputs, self.bias_dtype = outputs, inputs, torch.float32
        self._form = form = replace(form, exact=exact)
        self._products, self._packing, self._dtype = products, packing, dtype
        self.panels = packing.empty_panels(form, outputs, inputs, empty)
        self.row_scales = empty((outputs,), torch.float32).fill_(1) if row_scales else None
        self.order = empty((inputs,), torch.int64).copy_(torch.arange(inputs)) if ordered else None
        self._matrix = products.QuantizedMatrix(form, self.panels, self.row_scales, inputs, outputs, self.order)
        self._fields = self._matrix.fields()

    def _named(self, name: str) -> str:
        """The form's name, marked "(exact)" if x is not rounded."""
        return f"{name} (exact)" if self._form.exact else name

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor | None = None) -> torch.Tensor:
        result = x.new_empty((*x.shape[:-1], self.outputs)) if out is None else out
        self._products.gemm(x, self._matrix, result, bias, self._fields)
        return result

    def read_rows(self, ids: torch.Tensor, out: torch.Tensor) -> None:
        rows = out if self.order is None else torch.empty_like(out)
        self._packing.read_rows(self._form, self.panels, self.row_scales, ids, rows)
        if self.order is not None:
            out[:, self.order] = rows


class QuantizedWeight(PanelWeight):
    """A weight that is rounded to 8 or 4 bits while it is loaded."""

    def __init__(
        self, outputs: int, inputs: int, bits: int, dtype: torch.dtype, bounds: Sequence[int] = (),
        release: Release = keep_all, empty: Empty = ordinary, exact: bool = False,
    ) -> None:  # fmt: skip
        """`bounds`: rows at which one checkpoint matrix ends and the next begins."""
        from asyncengine.kernels.api import panel_form
        from asyncengine.kernels.api import quantize as quantizing

        super().__init__(outputs, inputs, panel_form.int_form(bits), bits == 8, False, dtype, empty, exact)
        self.name, self.bits = self._named(f"int{bits}"), bits
        self._quantizing = quantizing
        self._release = release
        self._panel = panel_form.PANEL
        meets = any(bound % panel_form.PANEL for bound in bounds)  # then rows of two matrices share a panel
        self.waiting = WaitingRows(outputs, inputs, dtype) if meets else None

    def load(self, first: int, weight: torch.Tensor | StoredMatrix) -> None:
        """Raises `ValueError` for rows that share a panel with others where `bounds` has not said so."""
        if self.waiting is None:
            last, panel = first + weight.shape[0], self._panel
            if first % panel or (last % panel and last != self.outputs):
                raise ValueError(f"rows {first} to {last} are no whole panels of {panel}")
            for begin, chunk in row_chunks(weight, self._release):
                self._round(chunk.to(self._dtype), first + begin)
            return
        whole = self.waiting.add(first, weight)
        if whole is not None:
            self._round(whole, 0)

    def _round(self, rows: torch.Tensor, first: int) -> None:
        self._quantizing.quantize_rows(rows, self.panels, self.row_scales, self.bits, first)
