"""A mixture of experts beside a layer's feed-forward part: each with norms of its own, and added (Gemma 4)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from asyncengine.execution.layers.experts import Experts, ExpertsConfig
from asyncengine.execution.layers.norm import Norm, NormConfig
from asyncengine.execution.layers.options import LayerOptions
from asyncengine.execution.layers.routing import Router, RouterConfig
from asyncengine.execution.layers.slots import TensorSlot
from asyncengine.execution.layers.stored import StoredMatrix, dense


@dataclass(frozen=True, slots=True)
class SideExpertsConfig:
    """With the checkpoint's names."""

    router: RouterConfig
    experts: ExpertsConfig
    scale: str
    """The checkpoint's name of a scale: of a row, once it is normalised for the router; it is then times width^-0.5."""
    before: str
    """Norm of what experts take: the stream."""
    after: str
    """Norm of what they give."""
    after_mlp: str
    """Norm of what the feed-forward part gives, before the two are added."""


class SideExperts:
    """(stream, what the feed-forward part gives) [rows, width] -> [rows, width]."""

    def __init__(
        self, options: LayerOptions, config: SideExpertsConfig, norm: NormConfig, prefix: str, width: int
    ) -> None:
        self.router = Router(options, config.router, prefix, width)
        self.experts = Experts(options, config.experts, prefix, width)
        self.before, self.after, self.after_mlp = (
            Norm(options, norm, prefix + name, width) for name in (config.before, config.after, config.after_mlp)
        )
        self._scaled = Norm(options, replace(norm, weight=False), prefix + config.scale, width)
        self._factor, self._kernels = width**-0.5, options.kernels

    def __call__(self, residual: torch.Tensor, branch: torch.Tensor) -> torch.Tensor:
        chosen, weights, _ = self.router(self._scaled(residual))
        made = self.experts(self.before(residual), chosen, weights)
        return self._kernels.add(self.after_mlp(branch), self.after(made))

    def chosen(self, residual: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        """The experts of each row of the stream, int64 [rows, experts of a row], best first."""
        return self.router(self._scaled(residual))[0]

    @property
    def norms(self) -> list[Norm]:
        """Norms that have a weight of a norm's name."""
        return [self.before, self.after, self.after_mlp]

    @property
    def nbytes(self) -> int:
        """Bytes of everything outside its linears and norms."""
        return self.router.nbytes + self.experts.nbytes + self._scaled.nbytes

    def slots(self) -> Iterator[tuple[str, TensorSlot]]:
        """Tensors of the checkpoint that it takes, by name; norms apart."""
        weight = self._scaled.weight

        def load(tensor: torch.Tensor | StoredMatrix) -> None:
            weight.copy_(tensor if isinstance(tensor, torch.Tensor) else dense(tensor).view(weight.shape))
            weight.mul_(self._factor)

        yield self._scaled.path, TensorSlot(tuple(weight.shape), load, initial=1.0)
        yield from self.router.slots()
        yield from self.experts.slots()
