"""Where layers live and how they keep their weights: the one place where kernels are chosen.

What is chosen follows from dtype, device, sizes and settings, never from comparing numbers. That each form gives what
the others give is what tests are for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from asyncengine.kernels.cpu import compiler_missing
from asyncengine.layers.kernels import LayerKernels
from asyncengine.layers.stored import StoredForm
from asyncengine.layers.weight_forms import (
    DenseWeight,
    OneDnnWeight,
    PackedWeight,
    QuantizedWeight,
    RowMajorWeight,
    WeightForm,
    can_reorder,
    keep_all,
)

HEAD_BITS = 8
"""Of a quantized output layer, with either setting: it is one matrix, and its errors go straight into the answer."""


@dataclass(frozen=True, slots=True, eq=False)
class LayerOptions:
    """What all layers of one model share."""

    dtype: torch.dtype
    device: torch.device
    kernels: LayerKernels
    bits: int | None = None
    """Of the weights of linear layers: 8 or 4; None: those of `dtype`."""
    release: Callable[[torch.Tensor], object] = keep_all
    """Told of each part of a mapped file that has been read and is not needed again."""
    forms: Mapping[str, StoredForm] = field(default_factory=dict)
    """Of matrices that stay as they are stored, by their names in the checkpoint without ".weight". The others, and all
    of them where there are no compiled kernels, are kept as if they came in a float type."""

    @property
    def compiled(self) -> bool:
        """Whether there are compiled CPU kernels for this dtype here."""
        return compiler_missing(self.dtype, self.device) is None

    @property
    def norm_dtype(self) -> torch.dtype:
        """Of the weights of norms: float32 wherever a kernel or plain torch takes it."""
        return self.kernels.norm_dtype or self.dtype

    def weight(self, outputs: int, inputs: int, bounds: Sequence[int] = ()) -> WeightForm:
        """Memory for the weight [outputs, inputs] of a linear layer, in the form that is fastest here.

        `bounds`: rows at which one checkpoint matrix ends and the next begins.
        """
        if self.bits is not None:
            return QuantizedWeight(outputs, inputs, self.bits, self.dtype, bounds, self.release)
        if self._packs(outputs, inputs):
            return PackedWeight(outputs, inputs, self.dtype, self.release)
        if can_reorder(self.dtype, self.device):
            return OneDnnWeight(outputs, inputs, self.dtype)
        return DenseWeight(outputs, inputs, self.dtype, self.device, self.release)

    def head_weight(self, outputs: int, inputs: int, *, tied: bool) -> WeightForm:
        """The same for an output layer, whose logits are float32. `tied`: embeddings are looked up in it."""
        if self.bits is not None:
            return QuantizedWeight(outputs, inputs, HEAD_BITS, self.dtype, release=self.release)
        if self._packs(outputs, inputs):
            return PackedWeight(outputs, inputs, self.dtype, self.release)
        if self.compiled and RowMajorWeight.fits(outputs, inputs, self.dtype):
            return RowMajorWeight(outputs, inputs, self.dtype, self.release)
        return DenseWeight(outputs, inputs, self.dtype, self.device, self.release)

    def _packs(self, outputs: int, inputs: int) -> bool:
        if not self.compiled:
            return False
        from asyncengine.kernels.cpu import packed as panels

        return panels.packing_pays(self.dtype) and panels.packing_fits(self.dtype, outputs, inputs)

    def zeros(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Memory of the model's dtype on its device."""
        return torch.zeros(shape, dtype=dtype or self.dtype, device=self.device)
