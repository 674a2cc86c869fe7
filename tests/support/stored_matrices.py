"""Quantized matrices of random numbers, in the forms that checkpoints have."""

from __future__ import annotations

import numpy as np
import torch

from asyncengine.execution.layers.stored import GroupedRows, NumberForm, dense

TABLE = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""MXFP4: twice the number."""
FORMS = {
    "Q4_0": NumberForm(4, 32),
    "Q8_0": NumberForm(8, 32),
    "Q4_1": NumberForm(4, 32, "minima"),
    "Q2_K": NumberForm(4, 16, "minima", 256),
    "Q4_K": NumberForm(4, 32, "minima", 256),
    "Q5_K": NumberForm(6, 32, "minima", 256),
    "Q6_K": NumberForm(6, 16, "middle", 256),
    "IQ4_XS": NumberForm(4, 32, "table", 256, table=tuple(range(-127, 113, 15))),
    "awq": NumberForm(4, 128, "zeros"),
    "w4a16": NumberForm(4, 64, "middle", 0, "bfloat16"),
    "gptq8": NumberForm(8, 128, "zeros", 0, "float32"),
    "w8a8": NumberForm(8, 0),
    "mxfp4": NumberForm(4, 32, "table", 0, "bfloat16", TABLE),
    "nvfp4": NumberForm(4, 16, "table", 0, "float16", TABLE),
}


class RandomMatrix:
    """A `StoredMatrix`: whole numbers, scales of about inputs^-0.5. `order`: in the opposite order."""

    def __init__(self, name: str, outputs: int, inputs: int, *, seed: int = 0, ordered: bool = False) -> None:
        self.name, self.shape, self.form = name, (outputs, inputs), FORMS[name]
        self.order = np.arange(inputs - 1, -1, -1) if ordered else None
        self.released: list[tuple[int, int]] = []
        self.whole = self._make(np.random.default_rng(seed + outputs + inputs))

    def _make(self, generator: np.random.Generator) -> GroupedRows:
        form, (count, inputs) = self.form, self.shape
        groups = -(-inputs // form.group) if form.group else 1
        blocks = inputs // form.block if form.block else groups
        numbers = generator.integers(0, 1 << form.bits, (count, inputs), dtype=np.uint8)
        largest = 100 if form.below == "table" else 1 << form.bits
        dtype = getattr(torch, form.scale_dtype)

        def wide(size: float) -> np.ndarray:
            found = torch.from_numpy(generator.uniform(0.5, 1, (count, blocks)) * size)
            return found.to(dtype).float().numpy()

        steps = generator.integers(-32, 64, (count, groups)).astype(np.int8) if form.block else None
        size = inputs**-0.5 / largest / (40 if form.block else 1)
        row_scales = generator.uniform(0.5, 1, count).astype(np.float32) if form.group in (0, 16) else None
        if form.group == 0:
            return GroupedRows(numbers, row_scales=row_scales)
        zeros = generator.integers(0, 1 << form.bits, (count, groups), dtype=np.uint8)
        minima = form.below == "minima"
        lowest = generator.integers(0, 64, (count, groups)).astype(np.int8) if minima and form.block else None
        return GroupedRows(
            numbers, wide(size), steps, zeros if form.below == "zeros" else None,
            wide(size * largest / 2) if minima else None, lowest, row_scales,
        )  # fmt: skip

    def rows(self, first: int, last: int) -> GroupedRows:
        return GroupedRows(*(None if part is None else part[first:last].copy() for part in self.whole))  # type: ignore[arg-type]

    def release(self, first: int, last: int) -> None:
        self.released.append((first, last))

    def dense(self) -> torch.Tensor:
        """float32: what it stands for."""
        return dense(self)


class FloatMatrix(RandomMatrix):
    """One of e4m3 floats, whose scale `shared` inputs share; 0: each row has one."""

    def __init__(self, outputs: int, inputs: int, shared: int) -> None:
        FORMS["e4m3"] = NumberForm(8, 32, scale_dtype="float32", floats=shared)
        try:
            super().__init__("e4m3", outputs, inputs)
        finally:
            del FORMS["e4m3"]

    def _make(self, generator: np.random.Generator) -> GroupedRows:
        (count, inputs), shared = self.shape, self.form.floats
        values = torch.from_numpy(generator.standard_normal((count, inputs))).to(torch.float8_e4m3fn)
        bits = values.view(torch.uint8).numpy()
        size = (count, -(-inputs // shared)) if shared else (count,)
        scales = (generator.uniform(0.5, 1, size) * inputs**-0.5).astype(np.float32)
        named = {"float_scales": scales} if shared else {"row_scales": scales}
        return GroupedRows(np.zeros_like(bits), np.zeros((count, inputs // 32), np.float32), floats=bits, **named)

    def dense(self) -> torch.Tensor:
        """float32: what it stands for."""
        floats, scales = self.whole.floats, self.whole.float_scales
        assert floats is not None
        if scales is None:
            assert self.whole.row_scales is not None
            scales = self.whole.row_scales[:, None]
        wide = np.repeat(scales, self.form.floats or self.shape[1], axis=1)[:, : self.shape[1]]
        return torch.from_numpy(floats).view(torch.float8_e4m3fn).float() * torch.from_numpy(wide)


def rounded(x: torch.Tensor, shared: int) -> torch.Tensor:
    """float64: x in groups of `shared`, each number the nearest of 255 steps, as quantized products round it."""
    padded = torch.nn.functional.pad(x.float(), (0, -x.shape[-1] % shared)).unflatten(-1, (-1, shared))
    scale = padded.abs().amax(-1, keepdim=True) / 127
    steps = (padded * torch.where(scale > 0, 1 / scale, 0)).round()
    return (steps.double() * scale.double()).flatten(-2)[..., : x.shape[-1]]
