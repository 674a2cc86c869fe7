"""A linear layer of one or several checkpoint matrices side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch

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
