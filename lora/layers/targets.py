"""Where low-rank adapters act in a model: the products they change and the paths by which they name them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from torch import nn

from asyncengine.models.linears import FastLinear, GatedMLP, MergedQKV
from asyncengine.models.output_layer import OutputLayer

_QKV = ("q_proj", "k_proj", "v_proj")
_GATE_UP = ("gate_proj", "up_proj")


class ModuleDims(NamedTuple):
    """One module that an adapter may change."""

    inputs: int
    """Features in; rows of the table for an embedding."""
    outputs: int
    kind: Literal["linear", "conv1d", "embedding"] = "linear"
    """conv1d: GPT-2's linear, stored transposed."""
    scale: float = 1.0
    """What the module multiplies its output by (Gemma 3's embedding): what adapters add must be multiplied as well."""


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """One product of the model, and the modules (by their Hugging Face paths) whose outputs lie in it side by side."""

    module: nn.Module
    """What is called with the product's input; its output is where deltas are added."""
    in_features: int
    """Rows of the table for an embedding."""
    parts: tuple[tuple[str, int], ...]
    """(path, width of its output)."""
    kind: Literal["linear", "conv1d", "embedding"] = "linear"
    head: bool = False
    """Gets the rows whose logits are wanted, not all tokens."""
    scale: float = 1.0

    @property
    def embedding(self) -> bool:
        return self.kind == "embedding"


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
            found.append(Place(child, rows, ((path, width),), "embedding", scale=scale))
        elif isinstance(child, MergedQKV):
            parts = tuple((f"{parent}.{name}", size) for name, size in zip(_QKV, child.sizes, strict=True))
            found.append(Place(child.merged, child.merged.in_features, parts))
            inner.add(f"{path}.merged")
        elif isinstance(child, GatedMLP):
            half = child.gate_up.out_features // 2
            found.append(
                Place(child.gate_up, child.gate_up.in_features, tuple((f"{path}.{n}", half) for n in _GATE_UP))
            )
            inner.add(f"{path}.gate_up")
        elif isinstance(child, (nn.Linear, FastLinear, OutputLayer)):
            found.append(Place(child, child.in_features, ((path, child.out_features),), head=child is head))
        elif isinstance(child, Conv1D):  # stores the transpose, but maps in to out like any other
            found.append(Place(child, child.nx, ((path, child.nf),), "conv1d", head=child is head))
    return found
