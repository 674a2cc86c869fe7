"""Weights in 8 or 4 bits for CPUs: each linear is replaced as soon as its layer is fused, and its own weight dropped.

At no time are there two copies of more than one layer's weights. The output layer is kept in 8 bits with either
setting: it is one matrix, and its errors go straight into the answer. Where it is the embedding as well, embeddings
are looked up in its 8 bits, so that the table exists once.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import nn

from asyncengine.config import EngineConfig
from asyncengine.errors import InvalidParameter, UnsupportedModel
from asyncengine.kernels.cpu import compiler_missing
from asyncengine.models.linears import FastLinear, GatedMLP, MergedQKV
from asyncengine.models.mapped import MappedFiles
from asyncengine.models.output_layer import SharedEmbedding
from asyncengine.models.probing import random_like
from asyncengine.models.reused_memory import ReusedMemory

_PROBE_ROWS = 5
_ERROR = {8: 0.05, 4: 0.3}
"""Of a linear's output on random input, relative: on ordinary weights it is 0.01 and 0.1."""
_LOGITS_ERROR = {8: 0.3, 4: 0.8}
"""The same for the logits of a whole model. Made-up weights are far more sensitive than trained ones."""


class QuantizedLinear(FastLinear):
    """x -> x W^T + b, with W in 8 or 4 bits and x rounded to 8 as it comes. The result has x's type, or float32.

    A row's result depends neither on the rows beside it nor on the number of threads.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, bits: int, logits: bool = False) -> None:
        from asyncengine.kernels.cpu import gemm_quantized as quantized
        from asyncengine.kernels.cpu import quantize as quantizing

        nn.Module.__init__(self)  # there is no weight to keep as it is
        self.out_features, self.in_features = weight.shape
        self.packed = True
        self.bits = bits
        self._product = quantized.gemm
        self._read_rows = quantizing.read_rows
        self.numbers, self.scales = quantizing.quantize(weight, bits)
        self._bias = None if bias is None else bias.detach().float().clone()
        self._memory = ReusedMemory() if logits else None

    @property
    def nbytes(self) -> int:
        return int(self.numbers.nbytes + self.scales.nbytes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shape = (*x.shape[:-1], self.out_features)
        out = x.new_empty(shape) if self._memory is None else self._memory.take(shape)
        self._product(x, self.numbers, self.scales, self.bits, out, self._bias)
        return out

    def memory(self) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Weights, scales, bias."""
        return self.numbers, self.scales, self._bias

    def read_rows(self, ids: torch.Tensor, out: torch.Tensor) -> None:
        """out [..., in_features] = rows `ids` of a weight in 8 bits."""
        self._read_rows(ids, self.numbers, self.scales, out)


class Quantizer:
    """Replaces the linears of one model and counts what it did."""

    def __init__(self, module: Any, bits: int, files: MappedFiles) -> None:
        self.done: Counter[str] = Counter()
        self.bits = bits
        self._module = module
        self._head = module.get_output_embeddings()
        self._files = files
        self._kept: list[Any] = []
        """Linears whose rounded forms were too far from them."""

    def replace_children(self, parent: Any) -> None:
        """The linears right below `parent`, and those inside its fused parts. Not if it was itself replaced."""
        if not any(part is parent for part in self._module.modules()):
            return
        for name, child in list(parent.named_children()):
            if isinstance(child, (MergedQKV, GatedMLP)):
                self.replace_children(child)
            elif type(child) in (nn.Linear, FastLinear) and not self._stays(child):
                faster = self._quantized(child, self.bits)
                if faster is not None:
                    setattr(parent, name, faster)
                    self._drop(child)

    def finish(self) -> None:
        """Whatever linears are left; the output layer, and with it the embedding if they are one."""
        for parent in list(self._module.modules()):
            self.replace_children(parent)
        head, table = self._head, self._module.get_input_embeddings()
        if type(head) is not nn.Linear:
            return
        faster = self._quantized(head, 8, logits=True)
        if faster is None:
            return
        self._module.set_output_embeddings(faster)
        if head.weight is not table.weight:
            self._drop(head)
        elif type(table) is nn.Embedding:
            self._module.set_input_embeddings(SharedEmbedding(faster, head.weight.dtype))
            self.done["int8_embedding"] += 1
            self._drop(head)

    def _stays(self, linear: Any) -> bool:
        return linear is self._head or any(linear is kept for kept in self._kept)

    def _drop(self, linear: Any) -> None:
        for part in _weight_of(linear):
            if part is not None:
                self._files.release(part)

    def _quantized(self, linear: Any, bits: int, logits: bool = False) -> QuantizedLinear | None:
        """None: its rounded form is too far from it."""
        weight, bias = _weight_of(linear)
        x = random_like(weight, (1, _PROBE_ROWS, weight.shape[1]))
        expected = linear(x).float()
        candidate = QuantizedLinear(weight, bias, bits, logits)
        if not relative_error(expected, candidate(x)) <= _ERROR[bits]:
            self.done["linear kept as it is"] += 1
            self._kept.append(linear)
            return None
        self.done[f"int{bits}_linear"] += 1
        return candidate

    def summary(self) -> list[str]:
        """What was done, e.g. ["int4_linear x 112", "int8_linear x 1"]."""
        return [f"{name} x {count}" for name, count in sorted(self.done.items())]


def quantization_bits(config: EngineConfig, dtype: torch.dtype, device: torch.device) -> int | None:
    """Bits of a weight, None if they are to stay as they are. Raises `InvalidParameter` where it cannot be done."""
    if config.quantization is None:
        return None
    missing = compiler_missing(dtype, device)
    if missing is not None:
        raise InvalidParameter("quantization", f"cannot be used here: {missing}", config.quantization)
    return {"int8": 8, "int4": 4}[config.quantization]


def check_quantized(family: str, quantizer: Quantizer, expected: torch.Tensor, found: torch.Tensor) -> None:
    """Raises `UnsupportedModel` if nothing was quantized, or if the logits are too far from what they were."""
    if not any(quantizer.done[f"int{bits}_linear"] for bits in (8, 4)):
        raise UnsupportedModel(f"family {family!r} has no linear layers to quantize: leave quantization out")
    error = relative_error(expected, found)
    if not error <= _LOGITS_ERROR[quantizer.bits]:
        raise UnsupportedModel(f"this model does not stand {quantizer.bits}-bit weights (logits off by {error:.0%})")


def relative_error(expected: torch.Tensor, found: torch.Tensor) -> float:
    """Root of the mean squared difference, relative to that of the values."""
    expected, found = expected.float(), found.float()
    return float((expected - found).norm()) / max(float(expected.norm()), 1e-12)


def resident_bytes(module: Any) -> int:
    """Bytes of all weights, quantized or not, each counted once."""
    held: dict[int, int] = {part.data_ptr(): part.numel() * part.itemsize for part in module.parameters()}
    return sum(held.values()) + sum(part.nbytes for part in module.modules() if isinstance(part, QuantizedLinear))


def _weight_of(linear: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    if isinstance(linear, FastLinear):
        return linear._weight, linear._bias
    return linear.weight.data, None if linear.bias is None else linear.bias.data
