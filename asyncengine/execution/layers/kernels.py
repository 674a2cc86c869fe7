"""Norms and gated activations by the best kernels for a device.

These are compiled kernels on the CPU, Triton's and FlashInfer's on CUDA, and torch's operations everywhere else; all
give the same numbers up to rounding.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch.nn import functional

from asyncengine.execution.attention.flashinfer import load_flashinfer
from asyncengine.execution.layers.rotary import Angles, rotate
from asyncengine.kernels.api import compiler_missing, triton_missing

logger = logging.getLogger("asyncengine")

Activation = Callable[[torch.Tensor], torch.Tensor]

ACTIVATIONS: Mapping[str, Activation] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
    "relu": functional.relu,
    "relu2": lambda x: functional.relu(x).square(),
}
"""Activations, by the names that `DecoderConfig` knows."""


def _xielu(parameters: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    up, down, beta, epsilon = parameters
    wide = x.float()
    below = (torch.expm1(torch.minimum(wide, epsilon)) - wide) * (down + beta)
    out: torch.Tensor = torch.where(wide > 0, up * wide * wide, below) + beta * wide
    return out.to(x.dtype)


PARAMETRIC: Mapping[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "clip": lambda limit, x: torch.clamp(x, -limit.to(x.dtype), limit.to(x.dtype)),
    "xielu": _xielu,
}
"""Activations with float32 parameters: clip: the largest absolute value; xielu: slopes above and below 0, beta, eps."""


class LayerKernels:
    """The operations of layers between their products, by torch's operators on any device; subclasses have faster ones.

    A row's result never depends on the rows beside it.
    """

    name = "torch"
    norm_dtype: torch.dtype | None = None
    """The dtype of a norm's weight; None: the model's."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, epsilon: float, offset: float = 0.0) -> torch.Tensor:
        """x / rms(x) * (offset + weight) over the last dimension, the sum in float32 (Zhang and Sennrich 2019).

        x [..., width], weight [width].
        """
        if offset or weight.dtype != x.dtype:
            wide = functional.rms_norm(x.float(), (x.shape[-1],), None, epsilon)
            return (wide * (weight.float() + offset)).to(x.dtype)
        return functional.rms_norm(x, (x.shape[-1],), weight, epsilon)

    def add_rms_norm(
        self, residual: torch.Tensor, branch: torch.Tensor, scale: float, weight: torch.Tensor, epsilon: float,
        offset: float = 0.0,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """(residual + branch * scale, its RMS norm). Neither input is changed."""
        total = residual + (branch if scale == 1.0 else branch * scale)
        return total, self.rms_norm(total, weight, epsilon, offset)

    def layer_norm(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, epsilon: float) -> torch.Tensor:
        """(x - mean) / deviation * weight + bias over the last dimension, in float32 (Ba et al. 2016).

        x [..., width]; weight and bias float32 [width].
        """
        return functional.layer_norm(x.float(), (x.shape[-1],), weight, bias, epsilon).to(x.dtype)

    def add_layer_norm(
        self, residual: torch.Tensor, branch: torch.Tensor, scale: float, weight: torch.Tensor,
        bias: torch.Tensor, epsilon: float, kept: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """(residual + branch * scale, its layer norm). Not `kept`: the first result may be arbitrary."""
        total = torch.add(residual.float(), branch, alpha=scale)
        normed = functional.layer_norm(total, (total.shape[-1],), weight, bias, epsilon)
        return total.to(residual.dtype), normed.to(residual.dtype)

    def add(self, y: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        """y + other, both [rows, width]. y is overwritten and given back."""
        return y.add_(other)

    def add_gated(self, y: torch.Tensor, shared: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
        """y + shared * sigmoid(gate of the row), both [rows, width], gates float32 [rows], in float32 and rounded once.
        y may be overwritten."""
        return torch.addcmul(y.float(), shared.float(), gates.sigmoid()[:, None]).to(y.dtype)

    def add_both(self, residual: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        """residual + first + second, all [rows, width], in float32 and rounded once."""
        return (residual.float() + first + second).to(residual.dtype)

    def add_scaled(self, left: torch.Tensor, factor: float, right: torch.Tensor) -> torch.Tensor:
        """left * factor + right, both [rows, width]; product and sum are rounded. left may be overwritten."""
        return (left if factor == 1.0 else left * factor) + right

    def scale_each(self, x: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
        """x [rows, width] with its first columns times `factors`, float32 [columns], in place."""
        x[:, : len(factors)] *= factors
        return x

    def scale_rows(self, x: torch.Tensor, factors: torch.Tensor, columns: int) -> torch.Tensor:
        """x [rows, width] with the first `columns` of each row times its factor, float32 [rows], in place."""
        x[:, :columns] *= factors[:, None]
        return x

    def scaled_rows(self, x: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
        """[rows * count, width]: each row of x [rows, width] times each of its factors, float32 [rows, count]."""
        return (x[:, None] * factors[..., None]).to(x.dtype).flatten(0, 1)

    def joined(self, *parts: torch.Tensor) -> torch.Tensor:
        """Parts [rows, (heads,) columns of each] side by side."""
        return torch.cat(parts, dim=-1)

    def widened(self, x: torch.Tensor) -> torch.Tensor:
        """x in float32."""
        return x.float()

    def rotated(self, x: torch.Tensor, angles: Angles) -> torch.Tensor:
        """x [T, heads, dim] with its first dimensions rotated; x may be overwritten."""
        return rotate(x, angles)

    def activation(self, name: str, parameters: torch.Tensor | None = None) -> Activation:
        """One of `ACTIVATIONS`, or of `PARAMETRIC` with these, which may overwrite what it is given."""
        return ACTIVATIONS[name] if parameters is None else partial(PARAMETRIC[name], parameters)

    def gated(self, activation: str) -> Activation | None:
        """Kernel [..., 2 * width] -> [..., width], the activation of the first half times the second; None: there is
        none."""
        return None


class CompiledKernels(LayerKernels):
    """The compiled operations of `asyncengine.kernels.cpu`."""

    name = "compiled"
    norm_dtype: torch.dtype | None = torch.float32

    def __init__(self) -> None:
        from asyncengine.kernels.api import operations

        methods: Any = self  # no call of a method lies between a layer and its kernel
        methods.add, methods.add_gated = operations.add, operations.add_gated
        methods.add_both, methods.add_scaled = operations.add_both, operations.add_scaled
        methods.scale_each, methods.widened = operations.scale_each, operations.widened
        methods.scale_rows, methods.scaled_rows = operations.scale_rows, operations.scaled_rows
        methods.joined = operations.joined
        self.rotate_heads, self.norm_heads = operations.rotate_heads, operations.norm_heads
        self._operations = operations

    def rotated(self, x: torch.Tensor, angles: Angles) -> torch.Tensor:
        _, heads, dim = x.shape
        self.rotate_heads(x.flatten(1), angles.cos, angles.sin, heads, dim, angles.style == "interleaved")
        return x

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, epsilon: float, offset: float = 0.0) -> torch.Tensor:
        assert offset == 0.0  # `Norm` adds it to a float32 weight when loading
        return self._operations.rms_norm(x, weight, epsilon)

    def add_rms_norm(
        self, residual: torch.Tensor, branch: torch.Tensor, scale: float, weight: torch.Tensor, epsilon: float,
        offset: float = 0.0,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        assert offset == 0.0
        return self._operations.add_rms_norm(residual, branch, scale, weight, epsilon)

    def layer_norm(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, epsilon: float) -> torch.Tensor:
        if not self._operations.layer_norm_fits(x.shape[-1]):
            return super().layer_norm(x, weight, bias, epsilon)
        return self._operations.layer_norm(x, weight, bias, epsilon)

    def add_layer_norm(
        self, residual: torch.Tensor, branch: torch.Tensor, scale: float, weight: torch.Tensor,
        bias: torch.Tensor, epsilon: float, kept: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        if not self._operations.layer_norm_fits(residual.shape[-1]):
            return super().add_layer_norm(residual, branch, scale, weight, bias, epsilon, kept)
        return self._operations.add_layer_norm(residual, branch, scale, weight, bias, epsilon, kept)

    def activation(self, name: str, parameters: torch.Tensor | None = None) -> Activation:
        return self._operations.elementwise(name, parameters) or super().activation(name, parameters)

    def gated(self, activation: str) -> Activation | None:
        return self._operations.GATED.get(activation)


class CudaKernels(LayerKernels):
    """Norms in Triton, and FlashInfer's gated activations."""

    name = "cuda"
    norm_dtype: torch.dtype | None = torch.float32

    def __init__(self, flashinfer: Any, device: torch.device) -> None:
        self._flashinfer = flashinfer
        if triton_missing(device) is None:
            from asyncengine.kernels.api import gpu

            methods: Any = self  # no call of a method lies between a layer and its kernel
            methods.rms_norm, methods.add_rms_norm = gpu.rms_norm, gpu.add_rms_norm

    def gated(self, activation: str) -> Activation | None:
        names = {"silu": "silu_and_mul", "gelu_tanh": "gelu_tanh_and_mul", "gelu": "gelu_and_mul"}
        if activation not in names:
            return None
        kernel = getattr(self._flashinfer, names[activation])
        return lambda x: kernel(x.contiguous())


def layer_kernels(attention_backend: str, dtype: torch.dtype, device: torch.device) -> LayerKernels:
    """The kernels for this dtype and device. `attention_backend` "torch" asks for torch's own on CUDA."""
    if compiler_missing(dtype, device) is None:
        try:
            return CompiledKernels()
        except Exception as error:  # importing the compiler (numba) may fail with any exception
            logger.warning("layers run on torch's own operations: importing numba failed: %s", error)
    elif attention_backend != "torch" and device.type == "cuda" and dtype != torch.float32:
        served = torch.cuda.get_device_capability(device) >= (8, 0)
        try:
            if served and importlib.util.find_spec("flashinfer") is not None:
                return CudaKernels(load_flashinfer(), device)
        except Exception as error:  # it touches compilers, drivers and the home directory on import
            logger.warning("layers run on torch's own operations: importing flashinfer failed: %s", error)
    return LayerKernels()
