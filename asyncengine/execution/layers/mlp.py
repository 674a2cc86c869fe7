"""Feed-forward layers: gated (Shazeer 2020) and plain."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch.nn import functional

from asyncengine.execution.layers.kernels import Activation
from asyncengine.execution.layers.linear import Linear, Part
from asyncengine.execution.layers.options import LayerOptions
from asyncengine.execution.layers.sharded import cut_rows, gathered, share_of
from asyncengine.execution.layers.slots import TensorSlot
from asyncengine.execution.layers.step import RowAdapters
from asyncengine.execution.layers.stored import StoredMatrix, dense


@dataclass(frozen=True, slots=True)
class MLPConfig:
    """A layer's feed-forward part, with the checkpoint's names for its matrices."""

    width: int
    """Numbers between the two products."""
    activation: str
    """A name in `ACTIVATIONS`, or "xielu", which has weights of its own."""
    up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    """Gate and up; one name with `gated`: the checkpoint has them in one matrix."""
    down: str = "mlp.down_proj"
    gated: bool = True
    bias: bool = False
    down_bias: bool | None = None
    """Whether the second product has a bias; None: as the first (GTE has one there only)."""
    transposed: bool = False
    scales: tuple[float, float] = (1.0, 1.0)
    """Factors of the gate before its activation, and of the result (Falcon-H1)."""
    aliases: tuple[tuple[str, str], ...] = ()
    """(a matrix's name, another one) that checkpoints may have instead (Kimi Linear, as transformers saves it)."""


class XIELU:
    """xIELU (Huang and Schlag 2024), an activation whose two slopes are learned in each layer (Apertus).

    It holds the parameters of a x^2 + beta x above 0, b (exp(min(x, eps)) - 1 - x) + beta x below, which is computed in
    float32. a = softplus(alpha_p) and b = beta + softplus(alpha_n) are of the checkpoint, as are beta and eps.
    """

    def __init__(self, options: LayerOptions, path: str) -> None:
        self._path = path
        self.parameters = options.zeros(4, dtype=torch.float32)
        """a, b - beta, beta and eps, as `LayerKernels.activation` takes them."""

    def _load(self, place: int, tensor: torch.Tensor | StoredMatrix) -> None:
        number = (tensor if isinstance(tensor, torch.Tensor) else dense(tensor)).float().reshape(())
        self.parameters[place] = functional.softplus(number) if place < 2 else number

    def slots(self) -> Iterator[tuple[str, TensorSlot]]:
        """Tensors of the checkpoint that it takes, by name."""
        initial = {"alpha_p": 0.2, "alpha_n": -1.0, "beta": 0.5, "eps": -1e-6}
        for place, (name, value) in enumerate(initial.items()):
            yield f"{self._path}.{name}", TensorSlot((1,) if place < 2 else (), partial(self._load, place), value)


class MLP:
    """down(act(gate(x)) * up(x)), or down(act(up(x))) of one that is not gated."""

    def __init__(self, options: LayerOptions, config: MLPConfig, prefix: str, width: int) -> None:
        outputs = config.width * (2 if config.gated else 1) // len(config.up)
        parts = [Part(prefix + name, outputs) for name in config.up]
        self.config, self._prefix, self._kernels = config, prefix, options.kernels
        cuts = None if options.ranks is None else cut_rows(config.width, options.ranks.size, [0])
        share = share_of(options.ranks, cuts, [1, 1] if config.gated else [1], 1)
        self.up = Linear(options, parts, width, bias=config.bias, transposed=config.transposed, share=share)
        self.share = share if self.up.local else None
        """This rank's numbers between the two products; None: it has all of them."""
        inner = self.up.outputs // (2 if config.gated else 1)
        self._scales = [
            None if scale == 1.0 else options.zeros(inner, dtype=torch.float32).fill_(scale) for scale in config.scales
        ]
        self.down = Linear(
            options, [Part(prefix + config.down, width)], config.width, transposed=config.transposed,
            bias=config.bias if config.down_bias is None else config.down_bias,
        )  # fmt: skip
        self.xielu = XIELU(options, prefix + "mlp.act_fn") if config.activation == "xielu" else None
        parameters = None if self.xielu is None else self.xielu.parameters
        self._activation: Activation = options.kernels.activation(config.activation, parameters)
        self.gated = options.kernels.gated(config.activation) if config.gated else None
        silu = config.gated and config.activation == "silu" and config.scales[0] == 1.0 and not config.bias
        self._multiply_gated = getattr(self.up.weight, "multiply_gated", None) if silu else None

    def __call__(self, x: torch.Tensor, adapters: RowAdapters | None) -> torch.Tensor:
        """[rows, width] -> [rows, width]."""
        inner = None
        if self._multiply_gated is not None and (adapters is None or not adapters.changes(self.up.path)):
            inner = self._multiply_gated(x)
        if inner is None:
            inner = self._activated(self.up(x, adapters))
        if self._scales[1] is not None:
            inner = self._kernels.scale_each(inner, self._scales[1])
        return self.down(gathered(self.share, inner), adapters)

    def _activated(self, inner: torch.Tensor) -> torch.Tensor:
        """Compute the activation between the two products, of all outputs of the first."""
        if self._scales[0] is not None:
            inner = self._kernels.scale_each(inner, self._scales[0])
        if self.gated is not None:
            return self.gated(inner)
        if self.config.gated:
            gate, up = inner.chunk(2, dim=-1)
            return self._activation(gate).mul_(up)
        return self._activation(inner)

    def linears(self) -> list[Linear]:
        return [self.up, self.down]

    def slots(self) -> Iterator[tuple[str, TensorSlot]]:
        """Tensors of the checkpoint that it takes, by name."""
        for linear in self.linears():
            yield from linear.slots()
        if self.xielu is not None:
            yield from self.xielu.slots()

    def other_slots(self) -> Iterator[tuple[str, TensorSlot]]:
        """Other names of the same; each slot says which it stands for."""
        own = dict(self.slots()) if self.config.aliases else {}
        for name, other in self.config.aliases:
            here, there = (f"{self._prefix}{path}.weight" for path in (name, other))
            yield there, replace(own[here], replaces=(here,))


def clamped(both: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
    """[..., 2 * width] -> [..., width]: g sigmoid(alpha g) (u + 1) of neighbours g and u, bounded (gpt-oss)."""
    gate, up = both.float()[..., ::2].clamp(max=limit), both.float()[..., 1::2].clamp(-limit, limit)
    return (gate * torch.sigmoid(alpha * gate) * (up + 1)).to(both.dtype)
