"""All layers of a step of few tokens in one call of a compiled kernel (`kernels.cpu.fused_layers`).

Calling kernels one by one from Python is a tenth of a decoding step for one token; CUDA graphs save the same on a GPU.
The kernels are those of the layers themselves and give the same bits. It serves models whose layers are all of the
commonest shape: an RMS norm before attention and before a gated feed-forward part, nothing after them. A layer that
keeps a state may stand in the place of attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch

from asyncengine.attention.base import MergedHeads
from asyncengine.device.output_buffers import new_tensor
from asyncengine.layers.attention import Attention
from asyncengine.layers.experts import SparseMLP
from asyncengine.layers.linear import Linear
from asyncengine.layers.norm import Norm
from asyncengine.layers.options import LayerOptions
from asyncengine.layers.rotary import Angles
from asyncengine.layers.states import FusableState, FusedMix
from asyncengine.layers.step import StepContext

MOST_TOKENS = 64
"""Tokens of a step up to which the time of calls shows."""
_PRODUCTS = 4
"""Of a layer: queries, keys and values; attention's result; gate and up; down."""


class LayerParts(Protocol):
    """What is looked at in a decoder layer."""

    config: Any
    attention: Any
    state: Any
    mlp: Any
    before_attention: Norm | None
    before_mlp: Norm | None
    merged: MergedHeads | None
    inputs: Any
    scalar: Any

    def linears(self) -> list[Linear]: ...


class FusedLayers:
    """From embedded tokens to what the output layer reads."""

    def __init__(
        self, chain: Any, scratch: torch.Tensor, paths: tuple[str, ...], mixers: Sequence[Attention | FusedMix]
    ) -> None:
        """`paths`: of the products in the order in which they are made, as adapters name them. `mixers`: what each
        layer mixes tokens by."""
        from asyncengine.kernels.cpu.state_segments import segment_places

        self._chain, self._segment_places = chain, segment_places
        self._mixers = mixers
        self._keeps_states = any(isinstance(mixer, FusedMix) for mixer in mixers)
        self.forms = chain.forms
        """As `kernels.cpu.fused_layer.run_fused_layer` takes them."""
        self._scratch = scratch
        self._paths = paths

    def serves(self, tokens: int, step: StepContext, angles: Sequence[Angles]) -> bool:
        """True if a step of so many tokens, all of them wanted, can be run here."""
        if tokens > MOST_TOKENS or not hasattr(step.backend, "place"):
            return False
        if self._keeps_states and step.states is None:
            return False
        if step.adapters is not None and step.adapters.records(self._paths) is None:
            return False
        return all(own.query_scale is None for own in angles)

    def __call__(self, h: torch.Tensor, step: StepContext, angles: Sequence[Angles]) -> torch.Tensor:
        """[T, width] of embedded tokens `h` [T, width], which are overwritten; `angles` are those of each layer."""
        backend: Any = step.backend
        places = [
            _pools_of(mixer, step)
            if isinstance(mixer, FusedMix)
            else (*backend.place(mixer.index), own.cos.data_ptr(), own.sin.data_ptr(), own.cos.shape[-1])
            for mixer, own in zip(self._mixers, angles, strict=True)
        ]
        out = new_tensor(tuple(h.shape), h.dtype)
        adapters = None if step.adapters is None else step.adapters.records(self._paths)
        segments = None
        if self._keeps_states and step.states is not None:
            segments = np.array(self._segment_places(step.states.segments), dtype=np.int64)
        self._chain(
            h, out, np.array(places, dtype=np.int64), backend.tile_types, self._scratch, adapters or (0, 0, 0), segments
        )
        return out


def _pools_of(mixer: FusedMix, step: StepContext) -> tuple[int, ...]:
    """Where the layer's states and windows lie, in the places of what attention has."""
    assert step.states is not None
    pools = step.states.pools
    found = (pools.recurrent[mixer.place], pools.windows[mixer.place])
    states, windows = (0 if own is None else own.data_ptr() for own in found)
    return states, windows, 0, 0, 0, 0


def fused_layers(
    layers: Sequence[LayerParts], norm: Norm | None, options: LayerOptions, scale: float
) -> FusedLayers | None:
    """None: a layer is of another shape, or of weights in a form that the kernel does not take."""
    if norm is None or not options.compiled or options.kernels.name != "compiled":
        return None
    from asyncengine.kernels.cpu.fused_layer import FusedLayerKernel
    from asyncengine.kernels.cpu.fused_layers import FusedLayersKernel

    if not all(_common(layer) for layer in layers) or not norm.fusable:
        return None
    spans = []
    first: Any = layers[0].before_attention
    mixers: Any = [layer.state.fused() if layer.attention is None else layer.attention for layer in layers]
    inputs = [own.inputs if isinstance(own, FusedMix) else own.qkv for own in mixers]
    products = [linear.weight.products(linear.bias) for linear in inputs]
    for layer, mixer, following, product in zip(
        layers, mixers, [*layers[1:], None], [*products[1:], None], strict=True
    ):
        mixture = layer.mlp.fused() if isinstance(layer.mlp, SparseMLP) else None
        linears = (mixer.out, *([] if mixture is not None else layer.mlp.linears()))
        own: Any = [linear.weight.products(linear.bias) for linear in linears]
        own += [] if following is None else [product]
        if any(each is None for each in own):
            return None
        before: Any = layer.before_mlp
        after: Any = norm if following is None else following.before_attention
        norms = [(each.weight, each.config.epsilon) for each in (before, after)]
        form = 0 if mixture is not None else _form(layer)
        spans.append(FusedLayerKernel(own, norms, form, scale, options.dtype, mixture))
    if products[0] is None:
        return None
    mixes = [_mix(layer, mixer, options.dtype) for layer, mixer in zip(layers, mixers, strict=True)]
    chain = FusedLayersKernel((first.weight, first.config.epsilon), products[0], spans, mixes, options.dtype)
    needed = max(span.scratch_bytes(MOST_TOKENS, options.dtype.itemsize) for span in spans)
    scratch = torch.empty(needed + chain.scratch_bytes(MOST_TOKENS), dtype=torch.uint8)
    return FusedLayers(chain, scratch, tuple(path for layer in layers for path in _paths(layer)), mixers)


def _mix(layer: LayerParts, mixer: Attention | FusedMix, dtype: torch.dtype) -> Any:
    """What a layer mixes tokens by, as the kernel takes it."""
    from asyncengine.kernels.cpu.fused_layers import Heads, StateMix

    if isinstance(mixer, FusedMix):
        return StateMix(mixer.kernel.address, mixer.kernel.code(dtype), mixer.kernel.outputs)
    heads: Any = layer.merged
    return Heads(
        heads.num_heads, heads.key_dim, heads.value_dim, heads.q_norm, heads.k_norm, heads.epsilon,
        mixer.gate is not None,
    )  # fmt: skip


def _paths(layer: LayerParts) -> list[str]:
    """Of a layer's four products, as adapters name them; "" for what no adapter acts on."""
    paths = [linear.path for linear in layer.linears()]
    return paths + [""] * (_PRODUCTS - len(paths))


def _common(layer: LayerParts) -> bool:
    config = layer.config
    if layer.mlp is None or not _mixes(layer):
        return False
    before, middle = layer.before_attention, layer.before_mlp
    if config.parallel or config.post_norm or config.after_attention is not None or config.after_mlp is not None:
        return False
    if layer.inputs is not None or layer.scalar is not None:
        return False
    if before is None or middle is None or not (before.fusable and middle.fusable):
        return False
    if isinstance(layer.mlp, SparseMLP):
        return layer.mlp.fused() is not None
    return config.mlp.gated and _form(layer) is not None


def _mixes(layer: LayerParts) -> bool:
    """Whether there is a kernel for what stands between the layer's first two products."""
    attention, state = layer.attention, layer.state
    if attention is None:
        return isinstance(state, FusableState) and state.fused() is not None
    return state is None and layer.merged is not None and attention.only_merged and not attention.makes_values


def _form(layer: LayerParts) -> Any:
    from asyncengine.kernels.cpu import activation

    gated = layer.mlp.gated
    return None if gated is None else activation.activation_id(gated)
