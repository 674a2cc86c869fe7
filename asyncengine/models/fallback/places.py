"""Products of a transformers model that low-rank adapters change, and the hooks that do it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from asyncengine.layers.places import Place
from asyncengine.layers.step import StepContext
from asyncengine.models.fallback.quantized import QuantizedLinear


class CurrentStep:
    """The step that a transformers module computes now: its own code passes on no argument of ours."""

    def __init__(self) -> None:
        self.context: StepContext | None = None


class Adapted(nn.Module):
    """A part of the model, followed by what the adapters of a step's rows add. Else it is that part."""

    def __init__(self, inner: nn.Module, path: str, head: bool, current: CurrentStep) -> None:
        super().__init__()
        self.inner = inner
        self._path, self._head, self._current = path, head, current

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)  # some ask a linear for its weight's type

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., inputs] or token ids -> [..., outputs]."""
        y: torch.Tensor = self.inner(x)
        context = self._current.context
        adapters = None if context is None else context.row_adapters if self._head else context.adapters
        if adapters is not None:
            adapters.add(self._path, x, y)
        return y


def adapt(model: Any, current: CurrentStep) -> list[Place]:
    """Let adapters act on every linear and on the embedding of `model`, in its order; once for a model.

    Linears of single experts are left out: they see a part of the tokens, in an order of their own.
    """
    from transformers.pytorch_utils import Conv1D

    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    found: list[Place] = []
    for path, child in list(model.named_modules()):
        if "experts" in path.split("."):
            continue
        if child is table:
            rows, width = child.weight.shape
            scale = float(getattr(child, "embed_scale", 1.0))
            found.append(Place(rows, ((path, width),), "embedding", scale=scale))
        elif isinstance(child, (nn.Linear, QuantizedLinear)):
            found.append(Place(child.in_features, ((path, child.out_features),), head=child is head))
        elif isinstance(child, Conv1D):  # stores the transpose, but maps in to out like any other
            found.append(Place(child.nx, ((path, child.nf),), "conv1d", head=child is head))
        else:
            continue
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, Adapted(child, path, child is head, current))
    return found
