"""Kernels for norms, gated activations and rotary embedding, in the shapes transformers' models use.

FlashInfer's on CUDA, compiled ones on the CPU. Each does in one call what takes several torch operations. They are
candidates for `fusions`, no more: which of them a model gets is decided by comparison on random input.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable
from typing import Any, Protocol

import torch

from asyncengine.attention.flashinfer import load_flashinfer
from asyncengine.config import EngineConfig
from asyncengine.kernels.cpu import compiler_missing
from asyncengine.models.linears import AddNorm

logger = logging.getLogger("asyncengine")

Gated = Callable[[torch.Tensor], torch.Tensor]
"""[..., 2 * width] -> [..., width]: the activation of the first half times the second."""

_ROTARY_DIMS = (64, 128, 256)


class Kernels(Protocol):
    """What a device offers."""

    @property
    def add_rms_norm(self) -> AddNorm | None: ...

    @property
    def norm_dtype(self) -> torch.dtype | None:
        """Of a norm's weight; None: the model's."""
        ...

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        """x [..., width], weight [width]."""
        ...

    def gated(self) -> list[Gated]:
        """Gated activations there are."""
        ...

    def rotation(self) -> Rotation | None:
        """A rotation for the attention modules of one class."""
        ...


class CompiledKernels:
    """Those of `asyncengine.kernels.cpu`. Rotation is part of its attention."""

    norm_dtype = torch.float32

    def __init__(self) -> None:
        from asyncengine.kernels.cpu import activation, norm

        self.rms_norm, self.add_rms_norm = norm.rms_norm, norm.add_rms_norm
        self._gated: list[Gated] = [activation.silu_and_mul, activation.gelu_tanh_and_mul, activation.gelu_and_mul]

    def gated(self) -> list[Gated]:
        return self._gated

    def rotation(self) -> None:
        return None


class DeviceKernels:
    """FlashInfer's kernels in the engine's shapes."""

    add_rms_norm = None
    norm_dtype = None

    def __init__(self, flashinfer: Any) -> None:
        self._flashinfer = flashinfer

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        # [1, tokens, heads, dim] as a view of a merged projection: in three dimensions any stride will do
        flat = x[0] if x.dim() == 4 and x.shape[0] == 1 else x.reshape(-1, x.shape[-1])
        out: torch.Tensor = self._flashinfer.rmsnorm(flat, weight, eps=epsilon)
        return out.view(x.shape)

    def gated(self) -> list[Gated]:
        names = ("silu_and_mul", "gelu_tanh_and_mul", "gelu_and_mul")
        return [_contiguous(getattr(self._flashinfer, name)) for name in names]

    def rotation(self) -> Rotation:
        return Rotation(self._flashinfer)


class Rotation:
    """Queries and keys rotated by halves in one launch, for the cosines and sines of this step's tokens.

    transformers computes those once per forward and hands the same tensors to every layer; FlashInfer wants them side
    by side in float32. The last conversion is kept, with the tensor it was made from, so that it is done once and
    cannot be mistaken for another's.
    """

    def __init__(self, flashinfer: Any) -> None:
        self._flashinfer = flashinfer
        self._cos: torch.Tensor | None = None
        self._table = self._places = torch.empty(0)

    def fits(self, query: torch.Tensor) -> bool:
        """Whether there is a kernel for queries of this shape."""
        return query.dim() == 4 and query.shape[0] == 1 and query.shape[-1] in _ROTARY_DIMS

    def __call__(
        self, query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """query and key [1, heads, tokens, dim], cos and sin [1, tokens, dim] with equal halves."""
        if cos is not self._cos:
            half = cos.shape[-1] // 2
            self._table = torch.cat((cos[0, :, :half], sin[0, :, :half]), dim=-1).float()
            self._places = torch.arange(cos.shape[1], dtype=torch.int32, device=cos.device)
            self._cos = cos
        flat = [part[0].transpose(0, 1).flatten(1) for part in (query, key)]
        rotated = self._flashinfer.apply_rope_with_cos_sin_cache(
            self._places, flat[0], flat[1], query.shape[-1], self._table, is_neox=True
        )
        parts = [
            out.view(like.shape[2], like.shape[1], like.shape[3]).transpose(0, 1)[None]
            for out, like in zip(rotated, (query, key), strict=True)
        ]
        return parts[0], parts[1]


def compiled_kernels(dtype: torch.dtype, device: torch.device) -> CompiledKernels | None:
    """Those for this CPU, where there is a compiler for this type."""
    if compiler_missing(dtype, device) is not None:
        return None
    try:
        return CompiledKernels()
    except Exception as error:  # a compiler that cannot be imported
        logger.warning("fused kernels are torch's own: importing numba failed: %s", error)
        return None


def device_kernels(config: EngineConfig, dtype: torch.dtype, device: torch.device) -> DeviceKernels | None:
    """FlashInfer's kernels where they can run and nobody chose to do without FlashInfer."""
    if config.attention_backend == "torch" or device.type != "cuda" or dtype == torch.float32:
        return None
    if torch.cuda.get_device_capability(device) < (8, 0) or importlib.util.find_spec("flashinfer") is None:
        return None
    try:
        return DeviceKernels(load_flashinfer())
    except Exception as error:  # it touches compilers, drivers and the home directory on import
        logger.warning("fused kernels are torch's own: importing flashinfer failed: %s", error)
        return None


def _contiguous(kernel: Gated) -> Gated:
    return lambda x: kernel(x.contiguous())
