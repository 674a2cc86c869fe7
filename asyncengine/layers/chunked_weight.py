"""Weights that stay as their checkpoint stores them on an NVIDIA GPU: Triton kernels dequantize what they read."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from asyncengine.device.output_buffers import OutputBufferPool
from asyncengine.device.share_out import share_out
from asyncengine.kernels.cuda import triton_missing
from asyncengine.layers.stored import NumberForm, StoredForm, StoredMatrix

_GROUPS = (128, 64, 32, 16)
"""Inputs that can share a scale; a larger group becomes several of equal scales."""
_AT_ONCE = 2**24
"""Numbers that are brought to the device at once, a byte each."""
_PLANES = ("scales", "steps", "zeros", "minima", "minimum_steps")


def chunks_missing(dtype: torch.dtype, device: torch.device) -> str | None:
    """Why no matrix can stay as it is stored on this device; None: those of a `chunk_group` can."""
    if dtype not in (torch.bfloat16, torch.float16):
        return f"kernels for stored matrices take bfloat16 and float16, not {str(dtype).removeprefix('torch.')}"
    return triton_missing(device)


def chunk_group(form: NumberForm) -> int | None:
    """Inputs of a group as kernels have it; None: there is no kernel for this form."""
    if form.block and (form.below == "zeros" or not form.group):
        return None
    return next((size for size in _GROUPS if form.group % size == 0 and form.block % size == 0), None)


class ChunkedWeight:
    """As it is stored, in chunks (`kernels.cuda.packed_matmul`): two numbers of 4 bits in a byte, others one each."""

    waiting = None

    def __init__(self, outputs: int, inputs: int, stored: StoredForm, dtype: torch.dtype, device: torch.device) -> None:
        """Raises `ValueError` for a form that there is no kernel for (`chunk_group`)."""
        from asyncengine.kernels.cuda import packed_matmul

        form, group = stored.numbers, chunk_group(stored.numbers)
        if group is None:
            raise ValueError(f"there is no kernel for {form}")
        self.outputs, self.inputs, self.bias_dtype, self.name = outputs, inputs, torch.float32, stored.name
        self._kernels, self._stored, self._dtype, self._device = packed_matmul, stored, dtype, device
        self.order = torch.arange(inputs, device=device) if stored.ordered else None
        bits, each = (4, 2) if form.bits == 4 else (8, 1)
        chunks = -(-inputs // (each * group))
        self._group, self._each = group, each

        def plane(there: bool, dtype: torch.dtype, size: int = group) -> torch.Tensor | None:
            count = -(-chunks * each * group // size)
            return torch.zeros((count, outputs), dtype=dtype, device=device) if there else None

        wide, minima = getattr(torch, form.scale_dtype), form.below == "minima"
        size, steps = form.block or group, form.block > 0
        self._blocks = ("scales", "minima") if steps else ()
        self.planes = packed_matmul.Planes(
            torch.zeros((chunks, outputs, group), dtype=torch.uint8, device=device),
            torch.ones(outputs, dtype=torch.float32, device=device),
            plane(form.group > 0 or form.below != "middle", wide, size), plane(steps, torch.int8),
            plane(form.below == "zeros", torch.uint8), plane(minima, wide, size),
            plane(steps and minima, torch.int8),
            torch.tensor(form.table, dtype=torch.float32, device=device) if form.table else None,
        )  # fmt: skip
        middle = 1 << (form.bits - 1) if form.below == "middle" else 0
        self._matrix = packed_matmul.ChunkedMatrix(self.planes, inputs, bits, form.block, middle)

    @property
    def nbytes(self) -> int:
        parts = (*self.planes, self.order)
        return sum(part.nbytes for part in parts if part is not None)

    def takes(self, first: int) -> StoredForm | None:
        return self._stored

    def load(self, first: int, weight: torch.Tensor | StoredMatrix) -> None:
        """Raises `ValueError` for a matrix that is stored otherwise than was said."""
        if isinstance(weight, torch.Tensor) or not self._stored.takes(weight):
            found = "plain numbers" if isinstance(weight, torch.Tensor) else f"{weight.name}: {weight.form}"
            raise ValueError(f"{found} cannot be loaded as {self.name}: {self._stored.numbers}")
        if self.order is not None:
            order = np.arange(self.inputs) if weight.order is None else weight.order
            self.order.copy_(torch.from_numpy(order))
        count, matrix = weight.shape[0], weight
        rows = max(1, _AT_ONCE // self.inputs)

        def take(begin: int) -> None:
            end = min(begin + rows, count)
            self._pack(first + begin, matrix.rows(begin, end))
            if end < count:
                matrix.release(begin, end)

        share_out(take, range(0, count, rows))
        weight.release(0, count)

    def _pack(self, first: int, rows: Any) -> None:
        """Write `GroupedRows` from row `first` on."""
        own = slice(first, first + len(rows.numbers))
        numbers = torch.from_numpy(rows.numbers).to(self._device)
        size = self._each * self._group
        chunks = torch.nn.functional.pad(numbers, (0, -self.inputs % size)).view(
            len(numbers), -1, self._each, self._group
        )
        packed = chunks[:, :, 0] | chunks[:, :, 1] << 4 if self._each == 2 else chunks[:, :, 0]
        self.planes.numbers[:, own].copy_(packed.transpose(0, 1))
        if rows.row_scales is not None:
            self.planes.row_scales[own].copy_(torch.from_numpy(rows.row_scales))
        for name in _PLANES:
            plane, part = getattr(self.planes, name), getattr(rows, name)
            if plane is None:
                continue
            if part is None and name != "scales":
                raise ValueError(f"{self.name} has no {name}")
            given = torch.ones(1, 1) if part is None else torch.from_numpy(part)
            wanted = -(-self.inputs // (self._stored.numbers.block if name in self._blocks else self._group))
            times = -(-wanted // given.shape[1])  # groups may be larger than those of the kernel
            plane[:wanted, own].copy_(given.to(self._device).repeat_interleave(times, 1)[:, :wanted].T)

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor | None = None) -> torch.Tensor:
        found = x.new_empty((*x.shape[:-1], self.outputs)) if out is None else out
        self._kernels.multiply(self._rows(x), self._matrix, found.view(-1, self.outputs), bias)
        return found

    def _rows(self, x: torch.Tensor) -> torch.Tensor:
        """x [rows, inputs] in the order of the numbers."""
        x = x.reshape(-1, self.inputs)
        if self.order is not None:
            return x.index_select(1, self.order)
        return x if x.stride(1) == 1 else x.contiguous()

    def logits(self, x: torch.Tensor, bias: torch.Tensor | None, memory: OutputBufferPool) -> torch.Tensor:
        if len(x) > self._kernels.SOME:
            return self.multiply(x, bias).float()
        return self.multiply(x, bias, x.new_empty((*x.shape[:-1], self.outputs), dtype=torch.float32))

    def read_rows(self, ids: torch.Tensor, out: torch.Tensor) -> None:
        found = self._kernels.read_rows(self._matrix, out if self.order is None else torch.empty_like(out), ids=ids)
        if self.order is not None:
            out[:, self.order] = found

    def products(self, bias: torch.Tensor | None) -> None:
        return None
