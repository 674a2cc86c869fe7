"""A decoding step in two calls per layer: attention, and everything up to the next one (`kernels.cpu.fused_layer`).

Only for models all of whose layers are of the commonest form, in kernels of `cpu` throughout, and only after the one
call gave what the parts give one by one. A step in which somebody hooked onto a part (adapters do) goes the long way.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from asyncengine.kernels.cpu import compiler_missing
from asyncengine.models.attention_function import attached, merged_handler
from asyncengine.models.fused_layer import FusedLayer
from asyncengine.models.linears import GatedMLP, PanelLinear, RMSNorm
from asyncengine.models.probing import Context, random_like, same
from asyncengine.models.quantized import QuantizedLinear
from asyncengine.models.reused_memory import new_tensor

if TYPE_CHECKING:
    from asyncengine.kernels.cpu.fused_layer import FusedLayerKernel, LinearWeights
    from asyncengine.kernels.cpu.fused_layers import FusedLayersKernel

logger = logging.getLogger("asyncengine")

MOST_TOKENS = 64
"""Tokens of a step up to which the time of calls shows."""
_PROBE_ROWS = 3
_INNER = 3
"""Products of a layer after its attention."""


class ShortSteps:
    """The layers of one model, from its embedding to its output layer."""

    def __init__(
        self, layers: Sequence[FusedLayer], spans: Sequence[FusedLayerKernel], parts: Sequence[Any], size: int
    ) -> None:
        """`parts`: whatever is passed by, and may be hooked onto; `size`: bytes of a number."""
        self._layers = layers
        self._spans = spans
        self._parts = parts
        self._chain = _chain(layers, spans)
        needed = max(span.scratch_bytes(MOST_TOKENS, size) for span in spans)
        needed += 0 if self._chain is None else self._chain.scratch_bytes(MOST_TOKENS)
        self._scratch = torch.empty(needed, dtype=torch.uint8)

    def serve(self, tokens: int) -> bool:
        """True if a step of so many tokens, all of them wanted, can be run here now."""
        if tokens > MOST_TOKENS or any(part._forward_hooks for part in self._parts):
            return False
        return all(merged_handler(layer.attention.module) is not None for layer in self._layers)

    def __call__(self, h: torch.Tensor, contexts: Sequence[Context]) -> torch.Tensor:
        """What the output layer reads, of embedded tokens `h` [1, T, width], which are overwritten.

        `contexts` are those of the layers.
        """
        residual = h[0]
        handlers = [attached(layer.attention.module) for layer in self._layers]
        if self._chain is not None and all(hasattr(handler.backend, "place") for handler in handlers):
            places = []
            for layer, handler, context in zip(self._layers, handlers, contexts, strict=True):
                cos, sin = layer.attention.angles(context)
                angles = (cos.data_ptr(), sin.data_ptr(), cos.shape[-1])
                places.append((*handler.backend.place(handler.layer), *angles))
            out = new_tensor((1, *residual.shape), h.dtype)
            forms = handlers[0].backend.tile_types
            self._chain(residual, out, np.array(places, dtype=np.int64), forms, self._scratch)
            return out
        first = self._layers[0]
        assert first.first is not None
        assert first.attention.qkv is not None
        x: torch.Tensor = first.attention.qkv(first.first(h))
        for layer, span, context in zip(self._layers, self._spans, contexts, strict=True):
            x = span(layer.attention.attend(x, context)[0], residual, self._scratch)[None]
        return x


def _chain(layers: Sequence[FusedLayer], spans: Sequence[FusedLayerKernel]) -> FusedLayersKernel | None:
    """All of it in one call, where weights are of the same bits throughout."""
    from asyncengine.kernels.cpu.fused_layers import FusedLayersKernel, Heads

    first: Any = layers[0].first
    product = _product(layers[0].attention.qkv)
    merged = [layer.attention.heads for layer in layers]
    if product is None or not isinstance(first, RMSNorm):
        return None
    heads = [
        Heads(own.num_heads, own.key_dim, own.value_dim, own.q_norm, own.k_norm, own.epsilon)
        for own in merged if own is not None
    ]  # fmt: skip
    try:
        return FusedLayersKernel((first.weight.detach(), first.epsilon), product, spans, heads, first.weight.dtype)
    except ValueError:
        return None


def short_steps(layers: Sequence[FusedLayer | None], norm: Any, like: torch.Tensor) -> ShortSteps | None:
    """None if a layer is of another form, or if the numbers differ.

    `norm` is the model's last; `like` [1, T, width] is what it reads, by type.
    """
    known = [layer for layer in layers if layer is not None and layer.attention.merged and layer.common]
    if not known or len(known) != len(layers) or compiler_missing(like.dtype, like.device) is not None:
        return None
    spans: list[FusedLayerKernel] = []
    parts: list[Any] = [known[0].first, known[0].attention.qkv]
    try:
        for layer, following in zip(known, [*known[1:], None], strict=True):
            after = norm if following is None else following.first
            products = [layer.attention.out, layer.mlp.gate_up, layer.mlp.down_proj]
            products += [] if following is None else [following.attention.qkv]
            span = _span(layer, products, after)
            if span is None or not _equal(span, layer, products, after, like):
                return None
            spans.append(span)
            parts += [layer.mlp, layer.middle, after, *products]
    except Exception as error:  # a part that is called in another way, or a kernel that cannot be compiled
        logger.debug("short steps are run layer by layer: %s: %s", type(error).__name__, error)
        return None
    return ShortSteps(known, spans, parts, like.element_size())


def _span(layer: FusedLayer, products: Sequence[Any], after: Any) -> FusedLayerKernel | None:
    from asyncengine.kernels.cpu import activation
    from asyncengine.kernels.cpu import fused_layer as span
    from asyncengine.kernels.cpu.norm import add_rms_norm

    norms = [norm for norm in (layer.middle, after) if isinstance(norm, RMSNorm)]
    if len(norms) < 2 or any(norm.add_kernel is not add_rms_norm for norm in norms):
        return None
    if not isinstance(layer.mlp, GatedMLP) or (form := activation.activation_id(layer.mlp.gated)) is None:
        return None
    found = [_product(linear) for linear in products]
    described = [product for product in found if product is not None]
    if len(described) < len(found) or any(product.bits != described[0].bits for product in described):
        return None
    return span.FusedLayerKernel(described, [(norm.weight.detach(), norm.epsilon) for norm in norms], form, layer.scale)


def _product(linear: Any) -> LinearWeights | None:
    from asyncengine.kernels.cpu.fused_layer import LinearWeights

    if not isinstance(linear, (PanelLinear, QuantizedLinear)):
        return None
    return LinearWeights(*linear.memory(), linear.in_features, linear.out_features, linear.bits)


def _equal(span: FusedLayerKernel, layer: FusedLayer, products: Sequence[Any], after: Any, like: torch.Tensor) -> bool:
    """Does the one call give what its parts give one by one?"""
    residual = random_like(like, (_PROBE_ROWS, like.shape[-1]))
    attended = random_like(like, (_PROBE_ROWS, products[0].in_features))
    middle: Any = layer.middle
    total, normed = middle.add(residual, products[0](attended), layer.scale)
    total, expected = after.add(total, layer.mlp(normed), layer.scale)
    if len(products) > _INNER:
        expected = products[-1](expected)
    scratch = torch.empty(span.scratch_bytes(_PROBE_ROWS, like.element_size()), dtype=torch.uint8)
    return same(expected, span(attended, residual, scratch)) and same(total, residual)
