"""Where low-rank adapters act in a transformers model."""

from __future__ import annotations

from typing import Any

from torch import nn

from asyncengine.layers.places import Place
from asyncengine.models.fallback.quantized import QuantizedLinear


def find_places(model: Any) -> list[Place]:
    """Every place of a transformers model that low-rank weights can be added to.

    Linears of single experts are left out: they see a part of the tokens, in an order of their own.
    """
    from transformers.pytorch_utils import Conv1D

    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    found: list[Place] = []
    for path, child in model.named_modules():
        if "experts" in path.split("."):
            continue
        if child is table:
            rows, width = child.weight.shape
            scale = float(getattr(child, "embed_scale", 1.0))
            found.append(Place(rows, ((path, width),), "embedding", scale=scale, module=child))
        elif isinstance(child, (nn.Linear, QuantizedLinear)):
            found.append(Place(child.in_features, ((path, child.out_features),), head=child is head, module=child))
        elif isinstance(child, Conv1D):  # stores the transpose, but maps in to out like any other
            found.append(Place(child.nx, ((path, child.nf),), "conv1d", head=child is head, module=child))
    return found
