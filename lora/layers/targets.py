"""Where low-rank adapters act in a model: the products they change and the paths by which they name them."""

from __future__ import annotations

from typing import Any

from torch import nn

from asyncengine.layers.places import Place
from asyncengine.models.linears import FastLinear, GatedMLP, MergedQKV
from asyncengine.models.output_layer import OutputLayer

_QKV = ("q_proj", "k_proj", "v_proj")
_GATE_UP = ("gate_proj", "up_proj")


def find_places(model: Any) -> list[Place]:
    """Every place of a transformers model, fused or not, that low-rank weights can be added to.

    Linears of single experts are left out: they see a part of the tokens, in an order of their own.
    """
    from transformers.pytorch_utils import Conv1D

    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    found: list[Place] = []
    inner: set[str] = set()
    for path, child in model.named_modules():
        parent = path.rpartition(".")[0]
        if path in inner or "experts" in path.split("."):
            continue
        if child is table:
            rows, width = child.weight.shape
            scale = float(getattr(child, "embed_scale", 1.0))
            found.append(Place(rows, ((path, width),), "embedding", scale=scale, module=child))
        elif isinstance(child, MergedQKV):
            parts = tuple((f"{parent}.{name}", size) for name, size in zip(_QKV, child.sizes, strict=True))
            found.append(Place(child.merged.in_features, parts, module=child.merged))
            inner.add(f"{path}.merged")
        elif isinstance(child, GatedMLP):
            half = child.gate_up.out_features // 2
            found.append(
                Place(child.gate_up.in_features, tuple((f"{path}.{n}", half) for n in _GATE_UP), module=child.gate_up)
            )
            inner.add(f"{path}.gate_up")
        elif isinstance(child, (nn.Linear, FastLinear, OutputLayer)):
            found.append(Place(child.in_features, ((path, child.out_features),), head=child is head, module=child))
        elif isinstance(child, Conv1D):  # stores the transpose, but maps in to out like any other
            found.append(Place(child.nx, ((path, child.nf),), "conv1d", head=child is head, module=child))
    return found
