"""Forms of linear layers that are faster than `torch.nn.Linear` and equal to it: merged, and packed for oneDNN."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear

from asyncengine.kernels.cpu import compiler_missing
from asyncengine.models.reused_memory import ReusedMemory

Apply = Callable[[torch.Tensor], torch.Tensor]
AddNorm = Callable[[torch.Tensor, torch.Tensor, float, torch.Tensor, float], tuple[torch.Tensor, torch.Tensor]]
"""(residual, branch, scale, weight, epsilon) -> (residual + branch * scale, its RMS norm)."""


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """True if oneDNN has a packed linear for this type on this CPU."""
    available: Any = torch.backends.mkldnn.is_available  # untyped in torch
    if device.type != "cpu" or not available():
        return False
    operators = torch.ops.mkldnn
    if not hasattr(operators, "_reorder_linear_weight") or not hasattr(operators, "_linear_pointwise"):
        return False
    if dtype == torch.bfloat16:
        return bool(operators._is_mkldnn_bf16_supported())
    return dtype == torch.float32


class FastLinear(nn.Module):
    """x -> x W^T + b with a weight that exists once: packed in oneDNN's blocked layout where it can, else plain.

    At one row stock bf16 `linear` moves weights at half of memory speed or less because of their layout; packed ones
    reach it.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, pack: bool) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.packed = pack
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous()) if pack else weight
        self._bias = bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.packed:
            out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
            return out
        return linear(x, self._weight, self._bias)


class PanelLinear(FastLinear):
    """The same with a weight, or several side by side, in the panels of `kernels.cpu.packed`.

    `memory`, if given, is where float32 results go; `read` is told of what was read of the weights, part by part.
    A row's result depends neither on the rows beside it nor on the number of threads.
    """

    def __init__(
        self,
        weight: torch.Tensor | Sequence[torch.Tensor],
        bias: torch.Tensor | None,
        memory: ReusedMemory | None = None,
        read: Callable[[torch.Tensor], object] | None = None,
    ) -> None:
        from asyncengine.kernels.cpu import packed as panels

        nn.Module.__init__(self)  # there is no weight to keep as it is
        weights = (weight,) if isinstance(weight, torch.Tensor) else tuple(weight)
        self.out_features, self.in_features = sum(part.shape[0] for part in weights), weights[0].shape[1]
        self.packed = True
        self._product = panels.gemm
        self._read_rows = panels.read_rows
        self._weight = panels.pack_weight(*weights, read=read)
        self._bias = None if bias is None else bias.detach().float().clone()
        self._memory = memory

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shape = (*x.shape[:-1], self.out_features)
        out = x.new_empty(shape) if self._memory is None else self._memory.take(shape)
        self._product(x, self._weight, out, self._bias)
        return out

    @property
    def bits(self) -> int:
        """Of a rounded weight: none is."""
        return 0

    def memory(self) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Weights, scales, bias."""
        return self._weight, None, self._bias

    def read_rows(self, ids: torch.Tensor, out: torch.Tensor) -> None:
        """out [..., in_features] = rows `ids` of the weight."""
        self._read_rows(ids, self._weight, out)


def panels_serve(*weights: torch.Tensor) -> bool:
    """True if `PanelLinear` takes these weights side by side, and is the fastest form of them here."""
    dtype, outputs = weights[0].dtype, sum(weight.shape[0] for weight in weights)
    if compiler_missing(dtype, weights[0].device) is not None:
        return False
    from asyncengine.kernels.cpu import packed as panels

    return panels.packing_pays(dtype) and panels.packing_fits(dtype, outputs, weights[0].shape[1])


class MergedQKV(nn.Module):
    """Takes the place of `q_proj`: computes queries, keys and values in one product and keeps the latter for `Held`.

    Sound only where the attention calls q_proj, k_proj and v_proj once each, in that order, on the same tensor.
    """

    sizes: tuple[int, ...]
    """Widths of queries, keys and values in `merged`'s output."""

    def __init__(self, merged: FastLinear, sizes: tuple[int, ...]) -> None:
        super().__init__()
        self.merged = merged
        self.sizes = sizes
        self._held: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, *rest = self.merged(x).split(self.sizes, dim=-1)
        self._held = rest
        out: torch.Tensor = first
        return out

    def take(self) -> torch.Tensor:
        return self._held.pop(0)


class Held(nn.Module):
    """Takes the place of `k_proj` or `v_proj`: hands out what `MergedQKV` computed."""

    def __init__(self, take: Callable[[], torch.Tensor]) -> None:
        super().__init__()
        self._take = take

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._take()


class GatedMLP(nn.Module):
    """down(act(gate(x)) * up(x)) with gate and up in one product.

    `gated`, if given, does the activation and the multiplication: [..., 2 * width] -> [..., width].
    """

    def __init__(self, gate_up: FastLinear, down: nn.Module, activation: Apply, gated: Apply | None = None) -> None:
        super().__init__()
        self.gate_up = gate_up
        self.down_proj = down
        self.gated = gated
        self._activation = activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        both = self.gate_up(x)
        if self.gated is not None:
            inner = self.gated(both)
        else:
            gate, up = both.chunk(2, dim=-1)
            inner = self._activation(gate).mul_(up)
        out: torch.Tensor = self.down_proj(inner)
        return out


class RMSNorm(nn.Module):
    """x / rms(x) * weight in one operation (Zhang and Sennrich 2019).

    `kernel`, if given, computes it from (x, weight, epsilon); `add_kernel` with the residual sum before it, from
    (residual, branch, scale, weight, epsilon).
    """

    def __init__(
        self,
        weight: torch.Tensor,
        epsilon: float,
        kernel: Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor] | None = None,
        add_kernel: AddNorm | None = None,
    ) -> None:
        super().__init__()
        self._shape = tuple(weight.shape)
        self.epsilon = epsilon
        self._kernel = kernel
        self.add_kernel = add_kernel
        self.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self._kernel is not None:
            return self._kernel(x, self.weight, self.epsilon)
        return nn.functional.rms_norm(x, self._shape, self.weight, self.epsilon)

    def add(self, residual: torch.Tensor, branch: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
        """(sum, its norm) of residual + branch * scale."""
        if self.add_kernel is not None:
            return self.add_kernel(residual, branch, scale, self.weight, self.epsilon)
        total = residual + (branch if scale == 1.0 else branch * scale)
        return total, self(total)
