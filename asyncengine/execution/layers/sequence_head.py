"""The head of a classifier: from the hidden states of a sequence to a logit for each label."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from asyncengine.execution.layers.kernels import ACTIVATIONS
from asyncengine.execution.layers.linear import Linear, Part
from asyncengine.execution.layers.norm import Norm, NormConfig
from asyncengine.execution.layers.options import LayerOptions
from asyncengine.execution.layers.slots import TensorSlot


@dataclass(frozen=True, slots=True)
class SequenceHeadConfig:
    """A family's head, with the checkpoint's names for its matrices."""

    num_labels: int
    out: str
    """The last product."""
    dense: str | None = None
    """One before it, as wide as the model (BERT calls it the pooler)."""
    dense_bias: bool = True
    activation: str = "tanh"
    """Behind that: a name in `ACTIVATIONS`, or "tanh"."""
    norm: str | None = None
    """Behind that (ModernBERT)."""
    pooling: Literal["first", "mean", "late"] = "first"
    """The first token, the mean of all, or the mean of the logits of all (EuroBERT)."""


class SequenceHead:
    """out(norm(act(dense(pooled))))."""

    def __init__(self, options: LayerOptions, config: SequenceHeadConfig, norm: NormConfig, width: int) -> None:
        self.config = config
        self.dense: Linear | None = None
        if config.dense is not None:
            self.dense = Linear(options, [Part(config.dense, width)], width, bias=config.dense_bias)
        self.norm = None if config.norm is None else Norm(options, norm, config.norm, width)
        self.out = Linear(options, [Part(config.out, config.num_labels)], width, bias=True)
        self._activation = torch.tanh if config.activation == "tanh" else ACTIVATIONS[config.activation]

    def __call__(self, hidden: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """Logits [sequences, labels] of hidden states [T, width] of `counts` tokens each, >= 1."""
        sequences = torch.split(hidden, list(counts))
        if self.config.pooling == "late":
            logits = torch.split(self._logits(hidden), list(counts))
            return torch.stack([each.float().mean(0).to(each.dtype) for each in logits])
        if self.config.pooling == "mean":
            return self._logits(torch.stack([each.float().mean(0).to(each.dtype) for each in sequences]))
        return self._logits(torch.stack([each[0] for each in sequences]))

    def _logits(self, x: torch.Tensor) -> torch.Tensor:
        if self.dense is not None:
            x = self._activation(self.dense(x))
        if self.norm is not None:
            x = self.norm(x)
        return self.out(x)

    def linears(self) -> list[Linear]:
        return [self.out] if self.dense is None else [self.dense, self.out]

    def slots(self) -> Iterator[tuple[str, TensorSlot]]:
        """Tensors of the checkpoint that it takes, by name."""
        for part in (self.dense, self.norm, self.out):
            yield from () if part is None else part.slots()

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in (self.dense, self.norm, self.out) if part is not None)
