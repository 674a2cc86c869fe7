"""Linear layers and norms: what all other layers are made of.

A linear layer may be several matrices of the checkpoint side by side. A norm may have the residual sum before it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal, NamedTuple

import torch
from torch.nn import functional

from asyncengine.execution.layers.options import LayerOptions
from asyncengine.execution.layers.sharded import LocalWeight, Share, own_rows
from asyncengine.execution.layers.step import RowAdapters
from asyncengine.execution.layers.stored import StoredMatrix, TensorSlot, dense
from asyncengine.execution.layers.weight_forms import WeightForm


class Part(NamedTuple):
    """One matrix of the checkpoint."""

    path: str
    """Its name there, without ".weight"; adapters name it so, too."""
    outputs: int


class Linear:
    """y = x W^T + b. Matrices that multiply the same x are one product: queries, keys and values; gate and up.

    `transposed`: the checkpoint keeps [inputs, outputs] (GPT-2). `share`: the outputs that this rank goes on with; if
    it can, it makes those alone (`local`).
    """

    def __init__(
        self,
        options: LayerOptions,
        parts: Sequence[Part],
        inputs: int,
        *,
        bias: bool = False,
        transposed: bool = False,
        share: Share | None = None,
    ) -> None:
        self.parts = tuple(parts)
        self.path = parts[0].path
        self.inputs, self.outputs = inputs, sum(part.outputs for part in parts)
        self.transposed = transposed
        self._firsts = [0, *accumulate(part.outputs for part in parts)]
        paths = () if transposed else [part.path for part in parts]
        bounds = self._firsts[1:-1]
        local = None if share is None else options.local_weight(share, inputs, bounds, paths)
        self._share, self.local = share, local is not None
        """Whether it gives this rank's outputs alone."""
        self.weight: WeightForm = local or options.weight(self.outputs, inputs, bounds, paths)
        self.outputs = self.weight.outputs
        self.bias = options.zeros(self.outputs, dtype=self.weight.bias_dtype) if bias else None

    def __call__(self, x: torch.Tensor, adapters: RowAdapters | None = None) -> torch.Tensor:
        """[rows, inputs] -> [rows, outputs]."""
        y = self.weight.multiply(x, self.bias)
        if adapters is not None:
            adapters.add(self.path, x, y)
        return y

    def own(self, x: torch.Tensor, adapters: RowAdapters | None = None) -> torch.Tensor:
        """[rows, inputs] -> [rows, the outputs that this rank goes on with]; without `share`, all."""
        y = self(x, adapters)
        return y if self._share is None or self.local else self._share.columns(y)

    def slots(self) -> Iterator[tuple[str, TensorSlot]]:
        """Tensors of the checkpoint that it takes, by name."""
        memory = self.weight.tensors()
        for part, first in zip(self.parts, self._firsts, strict=False):
            shape = (self.inputs, part.outputs) if self.transposed else (part.outputs, self.inputs)
            takes, waiting = self.weight.takes(first), self.weight.waiting
            yield (
                f"{part.path}.weight",
                TensorSlot(shape, self._loader(first), waits_with=waiting, memory=memory, takes=takes),
            )
            if self.bias is not None:
                yield f"{part.path}.bias", self._bias_slot(self.bias, first, part.outputs)

    def kept_outputs(self) -> tuple[tuple[slice, ...], ...] | None:
        """The outputs of each part that this rank has; None: all of them."""
        if not isinstance(self.weight, LocalWeight):
            return None
        firsts = zip(self.parts, self._firsts, strict=False)
        return tuple(tuple(given for given, _ in own_rows(self.weight.spans, at, part.outputs)) for part, at in firsts)

    def _bias_slot(self, bias: torch.Tensor, first: int, count: int) -> TensorSlot:
        if not isinstance(self.weight, LocalWeight):
            return TensorSlot.into(bias[first : first + count], initial=0.0)
        return TensorSlot.some(bias, count, own_rows(self.weight.spans, first, count), 0.0)

    def _loader(self, first: int) -> Callable[[torch.Tensor | StoredMatrix], None]:
        def load(tensor: torch.Tensor | StoredMatrix) -> None:
            if self.transposed:
                tensor = (tensor if isinstance(tensor, torch.Tensor) else dense(tensor)).T.contiguous()
            self.weight.load(first, tensor)

        return load

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)


@dataclass(frozen=True, slots=True)
class NormConfig:
    """A family's norm."""

    kind: Literal["rms", "layer"] = "rms"
    epsilon: float = 1e-6
    offset: float = 0.0
    """A number added to the checkpoint's weight: 1 in Gemma's, in float32."""
    weight: bool = True
    """False: normalisation only (OLMo 1)."""
    bias: bool = False


class Norm:
    """x / rms(x) * weight, or layer normalisation, over the last dimension; rounded once, to x's dtype.

    `heads`: the weight is [heads, width], one row for each head of x [T, heads, width] (Cohere); with "{}" in the path,
    the checkpoint has a tensor [width] for each (StableLM). `kept`: x has these heads of them only.
    """

    def __init__(
        self, options: LayerOptions, config: NormConfig, path: str, width: int, heads: int = 0,
        kept: slice | None = None,
    ) -> None:  # fmt: skip
        self.config = config
        self.path = path
        self.width = width
        self._kernels = options.kernels
        shape = (heads, width) if heads else (width,)
        by_kernel = config.kind == "rms" and not heads
        self._weight = options.zeros(*shape, dtype=options.norm_dtype if by_kernel else torch.float32).fill_(1.0)
        self._bias = options.zeros(*shape, dtype=torch.float32) if config.bias else None
        self.weight, self.bias = self._weight, self._bias
        if kept is not None:
            self.weight, self.bias = self._weight[kept], None if self._bias is None else self._bias[kept]
        self._by_kernel = by_kernel
        self._plain = config.kind == "layer" and not heads
        """A layer norm with one weight for all."""
        self._shift = torch.zeros_like(self.weight) if self._plain and self.bias is None else self.bias
        self._folded = 0.0 if by_kernel and options.norm_dtype != torch.float32 else config.offset
        """The part of the offset that is added to the stored weight: in a narrower type it would be rounded."""
        self._offset = config.offset - self._folded

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        config = self.config
        if self._by_kernel:
            return self._kernels.rms_norm(x, self.weight, config.epsilon, self._offset)
        if self._plain:
            assert self._shift is not None
            return self._kernels.layer_norm(x, self.weight, self._shift, config.epsilon)
        return self._normed(x.float()).to(x.dtype)

    def _normed(self, wide: torch.Tensor) -> torch.Tensor:
        """In float32, without a kernel of ours."""
        config = self.config
        if config.kind == "layer":
            wide = functional.layer_norm(wide, (self.width,), None, None, config.epsilon)
        else:
            wide = functional.rms_norm(wide, (self.width,), None, config.epsilon)
        wide = wide * self.weight
        return wide if self.bias is None else wide + self.bias

    def add(
        self, residual: torch.Tensor, branch: torch.Tensor, scale: float, kept: bool = True
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(residual + branch * scale, its norm). Not `kept`: anything may stand in the sum's place."""
        if self._by_kernel:
            return self._kernels.add_rms_norm(residual, branch, scale, self.weight, self.config.epsilon, self._offset)
        if self._plain:
            assert self._shift is not None
            epsilon = self.config.epsilon
            return self._kernels.add_layer_norm(residual, branch, scale, self.weight, self._shift, epsilon, kept)
        total = torch.add(residual.float(), branch, alpha=scale)
        return total.to(residual.dtype), self._normed(total).to(residual.dtype)

    def slots(self) -> Iterator[tuple[str, TensorSlot]]:
        """Tensors of the checkpoint that it takes, by name."""
        if "{}" in self.path:
            for head, row in enumerate(self._weight):
                yield f"{self.path.format(head)}.weight", TensorSlot.into(row, self._folded, 1.0 - self.config.offset)
        elif self.config.weight:
            yield f"{self.path}.weight", TensorSlot.into(self._weight, self._folded, 1.0 - self.config.offset)
        if self._bias is not None:
            yield f"{self.path}.bias", TensorSlot.into(self._bias, initial=0.0)

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes + (0 if self._shift is None else self._shift.nbytes)
