"""Linears of a transformers model in 8 or 4 bits, and its output layer in 8."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from asyncengine.errors import UnsupportedModel
from asyncengine.execution.device.output_buffers import OutputBufferPool
from asyncengine.execution.layers.options import HEAD_BITS, bits_of, rounded_weight


class QuantizedLinear(nn.Module):
    """x -> x W^T + b with W rounded; logits (`head`) are float32."""

    def __init__(self, linear: nn.Linear, bits: int, head: bool = False, exact: bool = False) -> None:
        super().__init__()
        self.out_features, self.in_features = linear.weight.shape
        weight = linear.weight.data
        shape = (self.out_features, self.in_features)
        self.form = rounded_weight(*shape, bits, weight.dtype, weight.device, exact=exact)
        self.form.load(0, weight)
        self._bias = None if linear.bias is None else linear.bias.data.float().clone()
        self._memory = OutputBufferPool() if head else None

    @property
    def nbytes(self) -> int:
        return self.form.nbytes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self._memory is not None:
            return self.form.logits(x, self._bias, self._memory)
        return self.form.multiply(x, self._bias)


def quantize_module(module: Any, bits: int, exact: bool = False) -> list[str]:
    """Replace every linear; says what was done, e.g. ["int4 x 112", "int8 x 1"].

    An output layer that is the embedding as well stays: it is looked up by the family's own code. Raises
    `UnsupportedModel` if there is nothing to quantize.
    """
    head, table = module.get_output_embeddings(), module.get_input_embeddings()
    counts: dict[str, int] = {}
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is not nn.Linear or child.weight is table.weight or _is_read(parent):
                continue
            own = HEAD_BITS if child is head else bits_of(f".{name}", bits) or bits
            made = QuantizedLinear(child, own, child is head, exact)
            setattr(parent, name, made)
            counts[made.form.name] = counts.get(made.form.name, 0) + 1
    if not counts:
        family = module.config.model_type
        raise UnsupportedModel(f"family {family!r} has no linear layers to quantize: leave quantization out")
    return [f"{name} x {count}" for name, count in sorted(counts.items())]


def _is_read(parent: Any) -> bool:
    """True if a module's own code reads a weight of its children, as HunYuan's router asks for its type."""
    code = getattr(type(parent).forward, "__code__", None)
    return code is not None and "weight" in code.co_names


def resident_bytes(module: Any) -> int:
    """Bytes of all weights, quantized or not, each counted once."""
    held: dict[int, int] = {part.data_ptr(): part.numel() * part.itemsize for part in module.parameters()}
    return sum(held.values()) + sum(part.nbytes for part in module.modules() if isinstance(part, QuantizedLinear))
