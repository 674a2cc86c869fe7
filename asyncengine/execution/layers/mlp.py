"""Feed-forward layers, gated (Shazeer 2020) and plain, and mixtures of experts instead of them or in addition."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch.nn import functional

from asyncengine.execution.layers.basic import Linear, Matrix, Norm, NormConfig
from asyncengine.execution.layers.experts import Experts, ExpertsConfig
from asyncengine.execution.layers.kernels import Activation
from asyncengine.execution.layers.options import LayerOptions
from asyncengine.execution.layers.routing import Router, RouterConfig
from asyncengine.execution.layers.sharded import cut_rows, gathered, share_of
from asyncengine.execution.layers.step import RowAdapters
from asyncengine.execution.layers.stored import Layer, StoredMatrix, TensorSlot, plain


@dataclass(frozen=True, slots=True)
class MLPConfig:
    """A layer's feed-forward network, with the checkpoint's names for its matrices."""

    width: int
    """Inner width, between the two products."""
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
    """(a matrix's name, its alias in some checkpoints) (Kimi Linear, as transformers saves it)."""


class XIELU(Layer):
    """xIELU (Huang and Schlag 2024), an activation whose two slopes are learned in each layer (Apertus).

    The function is a x^2 + beta x above 0, b (exp(min(x, eps)) - 1 - x) + beta x below, in float32, with a =
    softplus(alpha_p) and b = beta + softplus(alpha_n). The checkpoint has alpha_p, alpha_n, beta and eps.
    """

    def __init__(self, options: LayerOptions, path: str) -> None:
        self._path = path
        self.parameters = options.zeros(4, dtype=torch.float32)
        """a, b - beta, beta and eps, as `LayerKernels.activation` takes them."""

    def _load(self, index: int, tensor: torch.Tensor | StoredMatrix) -> None:
        number = plain(tensor, ()).float().reshape(())
        self.parameters[index] = functional.softplus(number) if index < 2 else number

    def slots(self) -> Iterator[tuple[str, TensorSlot]]:
        initial = {"alpha_p": 0.2, "alpha_n": -1.0, "beta": 0.5, "eps": -1e-6}
        for index, (name, value) in enumerate(initial.items()):
            yield f"{self._path}.{name}", TensorSlot((1,) if index < 2 else (), partial(self._load, index), value)


class MLP(Layer):
    """down(act(gate(x)) * up(x)), or down(act(up(x))) of one that is not gated."""

    def __init__(self, options: LayerOptions, config: MLPConfig, prefix: str, width: int) -> None:
        outputs = config.width * (2 if config.gated else 1) // len(config.up)
        matrices = [Matrix(prefix + name, outputs) for name in config.up]
        self.config, self._prefix, self._kernels = config, prefix, options.kernels
        cuts = None if options.ranks is None else cut_rows(config.width, options.ranks.size, [0])
        share = share_of(options.ranks, cuts, [1, 1] if config.gated else [1], 1)
        self.up = Linear(options, matrices, width, bias=config.bias, transposed=config.transposed, share=share)
        self.share = share if self.up.local else None
        """This rank's share of the inner width; None: it has all of it."""
        inner = self.up.outputs // (2 if config.gated else 1)
        self._scales = [
            None if scale == 1.0 else options.zeros(inner, dtype=torch.float32).fill_(scale) for scale in config.scales
        ]
        self.down = Linear(
            options, [Matrix(prefix + config.down, width)], config.width, transposed=config.transposed,
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
        """The activation of the first product's outputs, between the two products."""
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

    def other_slots(self) -> Iterator[tuple[str, TensorSlot]]:
        """Other names of the same; each slot says which it stands for."""
        own = dict(self.slots()) if self.config.aliases else {}
        for name, other in self.config.aliases:
            here, there = (f"{self._prefix}{path}.weight" for path in (name, other))
            yield there, replace(own[here], replaces=(here,))


# A layer's mixture of experts as its feed-forward network: a router, the experts, and shared experts of all rows.


@dataclass(frozen=True, slots=True)
class LatentExpertsConfig:
    """Projections to the routed experts' width and back, by their checkpoint names (Nemotron 3 Super)."""

    width: int
    """Width of the experts' inputs and outputs."""
    before: str
    behind: str
    bias: bool = False


@dataclass(frozen=True, slots=True)
class MoEConfig:
    """A layer's mixture: a router, its experts, and shared experts of all rows."""

    router: RouterConfig
    experts: ExpertsConfig
    shared: MLPConfig | None = None
    """Shared experts, which every row goes to, as one feed-forward network."""
    shared_gate: str | None = None
    """Checkpoint name of the gate [1, width] whose sigmoid multiplies the shared experts' output (Qwen 2)."""
    scales_inputs: bool = False
    """Whether routing weights multiply the experts' inputs, not their outputs (Llama 4)."""
    aliases: tuple[tuple[str, str], ...] = field(default=())
    """(checkpoint name, its alias) of further tensors (`save_original_format=False`)."""
    latent: LatentExpertsConfig | None = None
    """Projections around experts of another width than the model's."""


class SparseMLP(Layer):
    """x [rows, width] -> [rows, width]: each row's routed experts, plus the shared ones."""

    def __init__(self, options: LayerOptions, config: MoEConfig, prefix: str, width: int) -> None:
        self.config, self._prefix = config, prefix
        self.router = Router(options, config.router, prefix, width, config.shared_gate)
        self.latent: list[Linear] = []
        """Projections before and after the experts; empty if there are none."""
        if (latent := config.latent) is not None:
            before, behind = Matrix(prefix + latent.before, latent.width), Matrix(prefix + latent.behind, width)
            self.latent = [
                Linear(options, [before], width, bias=latent.bias),
                Linear(options, [behind], latent.width, bias=latent.bias),
            ]
        self.experts = Experts(options, config.experts, prefix, width if latent is None else latent.width)
        self.shared = None if config.shared is None else MLP(options, config.shared, prefix, width)
        self._kernels = options.kernels

    def __call__(self, x: torch.Tensor, adapters: RowAdapters | None) -> torch.Tensor:
        chosen, weights, gate = self.router(x)
        y = x if not self.latent else self.latent[0](x, adapters)
        y = self._scaled(y, chosen, weights) if self.config.scales_inputs else self.experts(y, chosen, weights)
        if self.latent:
            y = self.latent[1](y, adapters)
        if self.shared is None:
            return y
        shared = self.shared(x, adapters)
        return self._kernels.add(y, shared) if gate is None else self._kernels.add_gated(y, shared, gate)

    def chosen(self, _: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """The experts of each row of x, int64 [rows, experts of a row], best first."""
        return self.router(x)[0]

    def _scaled(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Run the experts with each (row, expert) pair as a row of its own, multiplied by the routing weight."""
        count = chosen.shape[1]
        y = self.experts(self._kernels.scaled_rows(x, weights), chosen.view(-1, 1), None)
        return y if count == 1 else y.view(len(x), count, x.shape[1]).float().sum(1).to(x.dtype)

    def linears(self) -> list[Linear]:
        """Linears that adapters may target; the routed experts are none of them."""
        return self.latent if self.shared is None else [*self.latent, *self.shared.linears()]

    def inner(self) -> Sequence[Layer]:
        return [self.router, self.experts, *self.latent, *([] if self.shared is None else [self.shared])]

    def other_slots(self) -> Iterator[tuple[str, TensorSlot]]:
        """Other names of the same; each slot says which it stands for."""
        if not self.config.experts.only_stacked:
            yield from self.experts.stacked_slots()
        own = dict(self.slots()) if self.config.aliases else {}
        for name, other in self.config.aliases:
            slot = own[self._prefix + name]
            yield self._prefix + other, replace(slot, replaces=(self._prefix + name,))


# A mixture of experts beside a layer's feed-forward network, each with norms of its own; they are added (Gemma 4).


@dataclass(frozen=True, slots=True)
class SideExpertsConfig:
    """A mixture beside the feed-forward network, by the checkpoint's names."""

    router: RouterConfig
    experts: ExpertsConfig
    scale: str
    """Name of the scale [width] of the router's normalised input, which is also multiplied by width^-0.5."""
    before: str
    """Norm of the experts' input, the residual stream."""
    after: str
    """Norm of the experts' output."""
    after_mlp: str
    """Norm of the feed-forward network's output, before the two are added."""


class SideExperts(Layer):
    """(residual stream, output of the feed-forward network), both [rows, width] -> [rows, width]."""

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
        """Norms with tensors of a norm's name; the router's scale is among `slots`."""
        return [self.before, self.after, self.after_mlp]

    def inner(self) -> Sequence[Layer]:
        return self.router, self.experts

    def slots(self) -> Iterator[tuple[str, TensorSlot]]:
        """Tensors of the checkpoint that it takes, by name; norms apart."""
        yield self._scaled.path, TensorSlot.into(self._scaled.weight, initial=1.0, factor=self._factor)
        yield from super().slots()
