"""The output layer: logits of a few rows over a large vocabulary, from a weight that is often the embedding as well.

Packing such a weight for oneDNN would make a second copy of the largest matrix of a small model. Compiled kernels keep
it once: in panels, where embeddings are looked up as well, or as it lies. Both give float32, which is what sampling
works in.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear

from asyncengine.kernels.cpu import compiler_missing
from asyncengine.models.linears import PanelLinear, panels_serve
from asyncengine.models.reused_memory import ReusedMemory, new_tensor

logger = logging.getLogger("asyncengine")

_PROBE_ROWS = 5
_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


class OutputLayer(nn.Module):
    """x -> float32 x W^T + b. The parameter `weight` [vocabulary, width] may be the embedding's very own."""

    def __init__(self, weight: Any, bias: Any) -> None:
        from asyncengine.kernels.cpu import gemm_rowmajor as products

        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.weight, self.bias = weight, bias
        self._products = products
        self._memory = ReusedMemory()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.numel() // self.in_features
        if not self._products.gemm_pays(x.dtype, rows):
            return linear(x, self.weight, self.bias).float()
        out = self._memory.take((*x.shape[:-1], self.out_features))
        self._products.gemm(x, self.weight, out)
        return out if self.bias is None else out.add_(self.bias)


class SharedEmbedding(nn.Module):
    """Embeddings of the given type, looked up in an output layer that keeps its weight in a form of its own.

    `head` has `out_features`, `in_features` and `read_rows`.
    """

    def __init__(self, head: Any, dtype: torch.dtype) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = head.out_features, head.in_features
        self._read_rows, self._dtype = head.read_rows, dtype

    @property
    def weight(self) -> torch.Tensor:
        """Shape and type of the table that it stands for, without numbers."""
        return torch.empty((self.num_embeddings, self.embedding_dim), dtype=self._dtype, device="meta")

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out = new_tensor((*ids.shape, self.embedding_dim), self._dtype)
        known = ids.numpy()  # torch's operators let go of the interpreter's lock
        if known.size and not 0 <= known.min() <= known.max() < self.num_embeddings:
            raise IndexError(f"token ids must be in 0 .. {self.num_embeddings - 1}")
        self._read_rows(ids.long().contiguous(), out)
        return out


def replace_output_layer(module: Any, dtype: torch.dtype, release: Callable[[torch.Tensor], None]) -> bool:
    """Give `module` a faster output layer. False: there is none.

    `release` is told of what was read of a weight that is then kept in another form, part by part.

    A weight that is the embedding as well is put in panels only if embeddings can be looked up there.
    """
    head, table = module.get_output_embeddings(), module.get_input_embeddings()
    if type(head) is not nn.Linear or compiler_missing(dtype, head.weight.device) or not head.weight.is_contiguous():
        return False
    tied = head.weight is table.weight
    readers = sum(any(own is head.weight for own in part._parameters.values()) for part in module.modules())
    alone = readers == 1 + tied and (not tied or (type(table) is nn.Embedding and table.max_norm is None))
    faster = _equal_form(head, dtype, release if alone else None)
    if faster is None:
        return False
    module.set_output_embeddings(faster)
    if isinstance(faster, PanelLinear) and tied:
        module.set_input_embeddings(SharedEmbedding(faster, dtype))
    return True


def _equal_form(
    head: nn.Linear, dtype: torch.dtype, release: Callable[[torch.Tensor], None] | None
) -> OutputLayer | PanelLinear | None:
    """The same as `head` by a compiled kernel that gives the same numbers, if there is one for it.

    `release` None: not in panels, somebody else reads the weight.
    """
    from asyncengine.kernels.cpu.gemm_rowmajor import gemm_fits

    forms: list[Callable[[], OutputLayer | PanelLinear]] = []
    if release is not None and panels_serve(head.weight):
        forms.append(lambda: PanelLinear(head.weight.data, head.bias, ReusedMemory(), release))
    if gemm_fits(dtype, head.in_features, head.out_features):
        forms.append(lambda: OutputLayer(head.weight, head.bias))
    x = torch.randn((1, _PROBE_ROWS, head.in_features), generator=torch.Generator().manual_seed(0)).to(dtype)
    expected = head(x).float()
    for make in forms:
        try:
            candidate = make()
            difference = float((expected - candidate(x)).abs().max())
        except Exception as error:  # a compiler that does not know this CPU: torch's own form stays
            logger.warning("the output layer is torch's own: %s: %s", type(error).__name__, error)
            return None
        if difference <= _TOLERANCE[dtype] * max(float(expected.abs().max()), 1e-6):
            return candidate
    return None
