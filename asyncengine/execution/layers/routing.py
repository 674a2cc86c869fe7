"""Routing of rows to experts (Shazeer et al. 2017): scores, top-k choice and weights, in the variants of all families.

Logits and everything computed from them are float32. Among equal scores the expert with the lowest number is chosen.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch

from asyncengine.execution.device.arena import OutputBufferPool
from asyncengine.execution.layers.options import LayerOptions
from asyncengine.execution.layers.stored import Layer, TensorSlot
from asyncengine.kernels.api import triton_missing


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """A router, with the checkpoint's names."""

    experts: int
    chosen: int
    """Experts of a row."""
    scores: Literal["softmax", "sigmoid", "sparsemixer"] = "softmax"
    """Scores of all logits. "sparsemixer": each expert's softmax is over those near it (Phi-MoE, Liu et al. 2024)."""
    name: str = "mlp.gate.weight"
    bias: str | None = None
    """The checkpoint's name of the logits' bias (gpt-oss)."""
    exact: bool = False
    """Weights are float32 in a model of any type (GLM 4, ERNIE 4.5)."""
    correction: str | None = None
    """A bias of scores, for the choice alone (DeepSeek V3)."""
    correction_rows: int = 0
    """Further dimension of that tensor, of one row (ERNIE 4.5)."""
    groups: int = 1
    """Number of equal groups of experts; a row uses the `groups_kept` groups with the largest sum of their two best
    scores."""
    groups_kept: int = 1
    groups_by_best: bool = False
    """Whether groups are ranked by their best single score instead (DeepSeek V2)."""
    normalised: bool = True
    """Whether a row's weights are divided by their sum; with softmax, it is then over the chosen experts only."""
    least_sum: float = 0.0
    """Lower bound of the sum that weights are divided by."""
    scale: float = 1.0
    """A factor of the weights."""
    by_expert: str | None = None
    """Checkpoint name of a factor of each expert's weight (Gemma 4)."""
    spread: float = 0.0
    """Jitter of sparsemixer: logits whose relative distance from the largest exceeds twice this are left out."""


class Router(Layer):
    """x [rows, width] -> (experts int64 [rows, chosen], weights float32 alike, best first; logits of the gate).

    `gate`: checkpoint name of a further row of the same product, the gate of shared experts (Qwen 2).
    """

    def __init__(
        self, options: LayerOptions, config: RouterConfig, prefix: str, width: int, gate: str | None = None
    ) -> None:
        self.config = config
        self._prefix, self._width, self._gate = prefix, width, gate
        dtype = torch.float32 if config.exact else options.dtype
        plain = replace(options, bits=None, dtype=dtype, ranks=None)
        self.weight = plain.weight(config.experts + (gate is not None), width)
        self._exact, self._kernels = dtype != options.dtype, options.kernels
        self.bias: torch.Tensor | None = None
        if config.bias is not None:
            self.bias = options.zeros(self.weight.outputs, dtype=self.weight.bias_dtype)

        def vector(name: str | None) -> torch.Tensor | None:
            return None if name is None else options.zeros(config.experts, dtype=torch.float32).fill_(1.0)

        self.correction, self.by_expert = vector(config.correction), vector(config.by_expert)
        self._memory = OutputBufferPool()
        self._route: Any = None
        self.settings: Any = None
        """Settings of the compiled choice, if there is one."""
        sparse = config.scores == "sparsemixer"
        if options.compiled:
            from asyncengine.kernels.api import routing

            self._route = routing.route
            self.settings = routing.RouteSettings(
                config.experts, config.chosen, config.scores == "sigmoid", config.groups, config.groups_kept,
                config.normalised, config.least_sum, config.scale, config.spread if sparse else -1.0,
                config.groups_by_best,
            )  # fmt: skip
        elif triton_missing(options.device) is None and not sparse and config.groups == 1:
            from asyncengine.kernels.api import gpu

            self._route, self.settings = gpu.route, config

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        logits = self.weight.logits(self._kernels.widened(x) if self._exact else x, self.bias, self._memory)
        gate = None if self._gate is None else logits[:, self.config.experts]
        if self._route is not None:
            return *self._route(logits, self.correction, self.by_expert, self.settings), gate
        return *route(logits[:, : self.config.experts], self.correction, self.by_expert, self.config), gate

    def slots(self) -> Iterator[tuple[str, TensorSlot]]:
        config, prefix = self.config, self._prefix
        shape = (config.experts, self._width)
        yield prefix + config.name, TensorSlot(shape, partial(self.weight.load, 0))
        if self._gate is not None:
            yield prefix + self._gate, TensorSlot((1, self._width), partial(self.weight.load, config.experts))
        if self.bias is not None and config.bias is not None:
            yield prefix + config.bias, TensorSlot.into(self.bias[: config.experts], initial=0.0)
        if self.correction is not None and config.correction is not None:
            target = self.correction[None] if config.correction_rows else self.correction
            yield prefix + config.correction, TensorSlot.into(target, initial=0.0)
        if self.by_expert is not None and config.by_expert is not None:
            yield prefix + config.by_expert, TensorSlot.into(self.by_expert, initial=1.0)


def route(
    logits: torch.Tensor, correction: torch.Tensor | None, by_expert: torch.Tensor | None, config: RouterConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    """(experts, weights) [rows, chosen] of logits float32 [rows, experts], by torch's operations."""
    if config.scores == "sparsemixer":
        return _sparsemixer(logits, config)
    scores = logits.softmax(-1) if config.scores == "softmax" else logits.sigmoid()
    choice = scores if correction is None else scores + correction
    if config.groups_kept < config.groups:
        grouped = choice.view(*choice.shape[:1], config.groups, config.experts // config.groups)
        kept = _best(grouped.topk(1 if config.groups_by_best else 2, dim=-1).values.sum(-1), config.groups_kept)
        out = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter_(1, kept, False)
        choice = grouped.masked_fill(out[..., None], -torch.inf).flatten(1)
    ids = _best(choice, config.chosen)
    weights = scores.gather(1, ids)
    if config.normalised:
        weights = weights / weights.sum(-1, keepdim=True).clamp_min(config.least_sum)
    weights = weights * config.scale
    return ids, weights if by_expert is None else weights * by_expert[ids]


def _best(values: torch.Tensor, count: int) -> torch.Tensor:
    """Indices of the `count` largest, best first, the lowest index among equal ones; `topk` would take any of these."""
    return values.sort(dim=-1, descending=True, stable=True).indices[:, :count]


def _sparsemixer(logits: torch.Tensor, config: RouterConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose one expert after the other; its weight is its softmax among remaining experts with logits near its own."""
    remaining = logits
    ids: list[torch.Tensor] = []
    weights: list[Any] = []
    for _ in range(config.chosen):
        best = _best(remaining, 1)
        largest = remaining.gather(1, best)
        far = (largest - logits) / logits.abs().clamp(min=largest) > 2 * config.spread
        weights.append(remaining.masked_fill(far, -torch.inf).softmax(-1).gather(1, best))
        ids.append(best)
        remaining = remaining.scatter(1, best, -torch.inf)
    return torch.cat(ids, dim=1), torch.cat(weights, dim=1)
