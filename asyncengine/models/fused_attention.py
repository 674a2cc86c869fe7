"""Attention from the merged product of queries, keys and values, where a backend takes that as it is.

Norms of heads, rotation and the writing of keys then happen in the backend's own kernel, and the family's code is
passed by. It may be passed by only if it does nothing else: on random input, of ordinary and of large values, the
queries, keys and values that it hands on must be those the kernel makes, and what it makes of the answer must be what
its output projection makes of it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from asyncengine.attention.base import LayerSpec, MergedHeads
from asyncengine.kernels.cpu import compiler_missing
from asyncengine.models.attention_function import attach, merged_handler
from asyncengine.models.linears import FastLinear, MergedQKV, RMSNorm
from asyncengine.models.probing import Context, random_like, same

logger = logging.getLogger("asyncengine")

_MAGNITUDES = (1.0, 30.0)
"""Of the input: a family that clips its queries shows it in large ones."""


class FusedAttention:
    """One layer's attention: (x [1, T, width], what the layer was called with beside it) -> [1, T, width].

    By the merged entry of the module's handler where it has one and `heads` say how, else by the module itself.
    """

    def __init__(self, module: Any, heads: MergedHeads | None = None, rotated: bool = True) -> None:
        self.merged = heads is not None
        self.module = module
        self.heads = heads
        self._rotated = rotated
        self.qkv = None if heads is None else _merged_product(module)
        self.out = None if heads is None else module.o_proj

    def __call__(self, x: torch.Tensor, context: Context) -> torch.Tensor:
        out: torch.Tensor
        if not self.merged or merged_handler(self.module) is None or self.qkv is None or self.out is None:
            out = self.module(hidden_states=x, **context)[0]
        else:
            out = self.out(self.attend(self.qkv(x), context))
        return out

    def attend(self, qkv: torch.Tensor, context: Context) -> torch.Tensor:
        """[1, T, heads * value dim] of the merged product [1, T, all], by the handler's merged entry."""
        handler = merged_handler(self.module)
        assert handler is not None
        assert self.heads is not None
        return handler(qkv, self.heads, *self.angles(context))

    def angles(self, context: Context) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines [1, T, rotary dim] of what this layer rotates, which may be nothing."""
        cos, sin = context["position_embeddings"]
        return (cos, sin) if self._rotated else (cos[..., :0], cos[..., :0])


def fuse_attention(module: Any, spec: LayerSpec, contexts: Sequence[Context], x: torch.Tensor) -> FusedAttention:
    """`contexts` are what the layer was called with at several positions, `x` [1, T, width] an input for them."""
    plain = FusedAttention(module)
    product, heads, out = _merged_product(module), _heads(module, spec), getattr(module, "o_proj", None)
    if product is None or heads is None or not isinstance(out, (nn.Linear, FastLinear)):
        return plain
    if compiler_missing(x.dtype, x.device) is not None or not all("position_embeddings" in each for each in contexts):
        return plain
    try:
        for rotated in (True, False):
            if all(_agrees(module, spec, heads, context, x, rotated) for context in contexts):
                return FusedAttention(module, heads, rotated)
    except Exception as error:  # a family that is called in another way, or a kernel that cannot be compiled
        logger.debug("attention keeps its own form: %s: %s", type(error).__name__, error)
    return plain


def _merged_product(module: Any) -> Any:
    """The one product of queries, keys and values, if there is one."""
    projection = getattr(module, "q_proj", None)
    if isinstance(projection, MergedQKV):
        return projection.merged
    projection = getattr(module, "qkv_proj", None)
    return projection if isinstance(projection, (nn.Linear, FastLinear)) else None


def _heads(module: Any, spec: LayerSpec) -> MergedHeads | None:
    """How to read that product; None: its heads are normalised in a way of their own."""
    counts = (spec.num_heads, spec.num_kv_heads, spec.key_dim, spec.value_dim)
    query, key = (getattr(module, name, None) for name in ("q_norm", "k_norm"))
    if query is None and key is None:
        return MergedHeads(*counts)
    if not isinstance(query, RMSNorm) or not isinstance(key, RMSNorm) or query.epsilon != key.epsilon:
        return None
    if query.weight.shape != (spec.key_dim,) or key.weight.shape != (spec.key_dim,):
        return None
    if query.weight.dtype != torch.float32 or key.weight.dtype != torch.float32:
        return None
    return MergedHeads(*counts, query.weight, key.weight, query.epsilon)


class _Watch:
    """Handler that keeps what it is given and answers with random numbers."""

    def __init__(self, spec: LayerSpec) -> None:
        self._spec = spec
        self.given: list[torch.Tensor] = []
        self.answer = torch.empty(0)

    def __call__(
        self, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, arguments: dict[str, Any]
    ) -> torch.Tensor:
        self.given = [part[0].transpose(0, 1) for part in (query, key, value)]
        self.answer = random_like(query, (1, query.shape[2], self._spec.num_heads, self._spec.value_dim))
        return self.answer


def _agrees(module: Any, spec: LayerSpec, heads: MergedHeads, context: Context, x: torch.Tensor, rotated: bool) -> bool:
    from asyncengine.attention.cpu import prepare_merged

    cos, sin = context["position_embeddings"]
    if not rotated:
        cos = sin = cos[..., :0]
    for magnitude in _MAGNITUDES:
        watch = _Watch(spec)
        attach(module, watch)
        try:
            found = module(hidden_states=x * magnitude, **context)[0]
        finally:
            attach(module, None)
        ours = prepare_merged(_merged_product(module)(x * magnitude)[0], heads, cos[0], sin[0])
        if not all(same(left, right) for left, right in zip(watch.given, ours, strict=True)):
            return False
        if not same(module.o_proj(watch.answer.flatten(2)), found):
            return False
    return True
