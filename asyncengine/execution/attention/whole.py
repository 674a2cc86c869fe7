"""Attention of encoders: whole sequences of one step, all keys of which are there, and nothing is kept afterwards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch.nn.functional import scaled_dot_product_attention

from asyncengine.errors import UnsupportedModel
from asyncengine.execution.attention.base import LayerSpec, StepAttention


class SequenceAttention(Protocol):
    """The attention of an encoder. Not thread-safe: one step at a time."""

    def plan(self, counts: Sequence[int]) -> StepAttention:
        """The attention of a step of sequences of so many tokens each, >= 1, one behind the other."""
        ...


class TorchSequences:
    """`SequenceAttention` in torch's own operations, on any device: sequence by sequence, each as if it were alone.

    `bias`: of a sequence of so many tokens, what is added to its scores in every layer, [heads, tokens, tokens]. Raises
    `UnsupportedModel` for what `scaled_dot_product_attention` cannot be told: soft caps and sinks.
    """

    def __init__(self, layers: Sequence[LayerSpec], bias: Callable[[int], torch.Tensor] | None = None) -> None:
        if any(spec.softcap is not None or spec.sinks is not None or spec.chunk is not None for spec in layers):
            raise UnsupportedModel("an encoder with soft caps, sinks or chunks is not written down")
        if bias is not None and any(spec.window is not None for spec in layers):
            raise UnsupportedModel("an encoder with windows and a bias by distance is not written down")
        self._bias = bias
        self._layers = tuple(layers)
        self._counts: list[int] = []
        self._kept: tuple[torch.Tensor, torch.Tensor] | None = None
        self._masks: dict[tuple[int, int | None], torch.Tensor] = {}

    def plan(self, counts: Sequence[int]) -> TorchSequences:
        self._counts, self._masks = list(counts), {}
        return self

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        self._kept = key, value

    def attend(self, layer: int, query: torch.Tensor) -> torch.Tensor:
        assert self._kept is not None
        spec, (key, value) = self._layers[layer], self._kept
        self._kept = None
        out = query.new_empty((query.shape[0], spec.num_heads, spec.value_dim))
        parts = [torch.split(part, self._counts) for part in (query, key, value, out)]
        for own, keys, values, found in zip(*parts, strict=True):
            heads = [part.transpose(0, 1)[None] for part in (own, keys, values)]
            attended = scaled_dot_product_attention(
                heads[0], heads[1], heads[2], attn_mask=self._mask(spec, len(own), query.device), scale=spec.scale,
                enable_gqa=spec.num_kv_heads != spec.num_heads,
            )  # fmt: skip
            found.copy_(attended[0].transpose(0, 1))
        return out

    def _mask(self, spec: LayerSpec, count: int, device: torch.device) -> torch.Tensor | None:
        """[count, count], true where a query (row) sees a key, or what is added to its scores; None: it sees all."""
        if self._bias is not None:
            if (count, None) not in self._masks:
                self._masks[count, None] = self._bias(count)
            return self._masks[count, None]
        if spec.window is None or spec.window >= count:
            return None
        if (count, spec.window) not in self._masks:
            places = torch.arange(count, device=device)
            self._masks[count, spec.window] = (places[:, None] - places).abs() < spec.window
        return self._masks[count, spec.window]
