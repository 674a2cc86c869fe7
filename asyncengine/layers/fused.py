"""All layers of a step of few tokens in one call of a compiled kernel (`kernels.cpu.fused_layers`).

Calling kernels one by one from Python is a tenth of a decoding step for one token; CUDA graphs save the same on a GPU.
The kernels are those of the layers themselves and give the same bits. It serves models whose layers are all of the
commonest shape: an RMS norm before attention and before a feed-forward part or a mixture, nothing after them. A layer
that keeps a state may stand in the place of attention, or beside it. Where layers are a mixer or a feed-forward part
alone (Nemotron-H), a mixer and what follows it are one layer here (`_spans`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol
from weakref import ref

import numpy as np
import torch
from numpy.typing import NDArray

from asyncengine.attention.base import MergedHeads
from asyncengine.device.output_buffers import new_tensor
from asyncengine.layers.attention import Attention
from asyncengine.layers.experts import SparseMLP
from asyncengine.layers.linear import Linear
from asyncengine.layers.mlp import MLP
from asyncengine.layers.norm import Norm
from asyncengine.layers.options import LayerOptions
from asyncengine.layers.rotary import Angles
from asyncengine.layers.states import FusableState, FusedMix, StatePools
from asyncengine.layers.step import StepContext

MOST_TOKENS = 64
"""Tokens of a step up to which the time of calls shows."""


class LayerParts(Protocol):
    """The parts of a decoder layer that fused layers look at."""

    config: Any
    attention: Any
    state: Any
    mlp: Any
    before_attention: Norm | None
    before_mlp: Norm | None
    merged: MergedHeads | None
    inputs: Any
    scalar: Any
    side: Any


class FusedLayers:
    """From embedded tokens to what the output layer reads."""

    def __init__(self, chain: Any, scratch: torch.Tensor, paths: tuple[str, ...], mixers: Sequence[Mixers]) -> None:
        """`paths`: of the products in the order in which they are made, as adapters name them. `mixers`: what each
        layer mixes tokens by."""
        from asyncengine.kernels.cpu.state_segments import segment_places

        self._chain, self._segment_places = chain, segment_places
        self._mixers = mixers
        self._known: _Known | None = None
        self._keeps_states = any(own.state is not None for own in mixers)
        self.forms = chain.forms
        """Forms of the chain's weights, as `kernels.cpu.fused_layer.run_fused_layer` takes them."""
        self._scratch = scratch
        self._paths = paths

    def serves(self, tokens: int, step: StepContext, angles: Sequence[Angles]) -> bool:
        """True if a step of so many tokens can be run here."""
        if tokens > MOST_TOKENS or not hasattr(step.backend, "place"):
            return False
        if self._keeps_states and step.states is None:
            return False
        if step.adapters is not None and step.adapters.records(self._paths) is None:
            return False
        return all(own.query_scale is None for own in angles)

    def __call__(self, h: torch.Tensor, step: StepContext, angles: Sequence[Angles]) -> torch.Tensor:
        """[T, width] of embedded tokens `h` [T, width], which are overwritten; `angles` are those of each rotary
        embedding of the model, and last those of layers that have none."""
        backend: Any = step.backend
        out = new_tensor(tuple(h.shape), h.dtype)
        adapters = None if step.adapters is None else step.adapters.records(self._paths)
        segments = None
        if self._keeps_states and step.states is not None:
            segments = np.array(self._segment_places(step.states.segments), dtype=np.int64)
        places = self._places(backend, step, angles)
        self._chain(h, out, places, backend.tile_types, self._scratch, adapters or (0, 0, 0), segments)
        return out

    def _places(self, backend: Any, step: StepContext, angles: Sequence[Angles]) -> NDArray[np.int64]:
        """Addresses of each layer's keys, values, angles and states: mostly those of the step before."""
        turned = [(own.cos.data_ptr(), own.sin.data_ptr(), own.cos.shape[-1]) for own in angles]
        pools = None if step.states is None else step.states.pools
        known = self._known
        if known is not None and known.placed is backend.placed and known.turned == turned and known.pools() is pools:
            return known.places
        places = [(*_attended_at(own.attention, backend, turned), *_pools_of(own.state, step)) for own in self._mixers]
        held: Callable[[], StatePools | None] = (lambda: None) if pools is None else ref(pools)
        self._known = _Known(backend.placed, turned, held, np.array(places, dtype=np.int64))
        return self._known.places


class _Known(NamedTuple):
    """The cached table of addresses of a step, with the key that it was built from."""

    placed: object
    """The attention backend's own key: it changes when its memory moves."""
    turned: list[tuple[int, int, int]]
    """Addresses of cosines and sines, and how many dimensions they turn."""
    pools: Callable[[], StatePools | None]
    """The pools of states, behind a weak reference: nothing here keeps them in memory."""
    places: NDArray[np.int64]


class Mixers(NamedTuple):
    """The parts of a layer that mix tokens: attention, a state layer, or both."""

    attention: Attention | None
    state: FusedMix | None

    @property
    def inputs(self) -> list[Linear]:
        """Linears that read the layer's input."""
        found = [] if self.attention is None else [self.attention.qkv]
        return found if self.state is None else [*found, self.state.inputs]

    @property
    def outs(self) -> list[Linear]:
        found = [] if self.attention is None else [self.attention.out]
        return found if self.state is None else [*found, self.state.out]


class Span(NamedTuple):
    """The work of one `FusedLayerKernel`: a layer, or a mixer alone and the feed-forward part that follows it."""

    mixing: LayerParts
    feeding: LayerParts | None
    """None: a mixer alone, which another follows."""

    @property
    def middle(self) -> Norm | None:
        """The norm before the feed-forward part."""
        if self.feeding is None:
            return None
        return self.mixing.before_mlp if self.feeding is self.mixing else self.feeding.before_attention


def _attended_at(attention: Attention | None, backend: Any, turned: Sequence[tuple[int, int, int]]) -> tuple[int, ...]:
    """Addresses of the layer's keys, values and angles."""
    if attention is None:
        return (0,) * 6
    rotary = attention.config.rotary
    return (*backend.place(attention.index), *turned[-1 if rotary is None else rotary])


def _pools_of(mixer: FusedMix | None, step: StepContext) -> tuple[int, ...]:
    """Addresses of the layer's states and convolution windows."""
    if mixer is None:
        return 0, 0
    assert step.states is not None
    pools = step.states.pools
    found = (pools.recurrent[mixer.place], pools.windows[mixer.place])
    return tuple(0 if own is None else own.data_ptr() for own in found)


def fused_layers(
    layers: Sequence[LayerParts], norm: Norm | None, options: LayerOptions, scale: float
) -> FusedLayers | None:
    """None: a layer is of another shape, or of weights in a form that the kernel does not take."""
    if norm is None or not options.compiled or options.kernels.name != "compiled" or not norm.fusable:
        return None
    from asyncengine.kernels.cpu.fused_layer import NEXT, FusedLayerKernel
    from asyncengine.kernels.cpu.fused_layers import FusedLayersKernel

    spans = _spans(layers)
    if spans is None or not all(_common(span) for span in spans):
        return None
    mixers = [_mixers(span.mixing) for span in spans]
    inputs = [_products(own.inputs) for own in mixers]
    kernels = []
    for place, (span, own) in enumerate(zip(spans, mixers, strict=True)):
        last = place + 1 == len(spans)
        linears = _linears(span, own) | ({} if last else dict(enumerate(inputs[place + 1], NEXT)))
        if any(each is None for each in (*linears.values(), *inputs[place])):
            return None
        after: Any = norm if last else spans[place + 1].mixing.before_attention
        norms = [None if each is None else (each.weight, each.config.epsilon) for each in (span.middle, after)]
        mlp = None if span.feeding is None else span.feeding.mlp
        mixture = mlp.fused() if isinstance(mlp, SparseMLP) else None
        kernels.append(
            FusedLayerKernel(linears, norms, _form(dense_part(mlp)) or 0, scale, options.dtype, mixture, _factors(span))
        )
    first: Any = spans[0].mixing.before_attention
    mixes = [_mix(span.mixing, own, options.dtype) for span, own in zip(spans, mixers, strict=True)]
    chain = FusedLayersKernel((first.weight, first.config.epsilon), inputs[0], kernels, mixes, options.dtype)
    needed = max(kernel.scratch_bytes(MOST_TOKENS, options.dtype.itemsize) for kernel in kernels)
    scratch = torch.empty(needed + chain.scratch_bytes(MOST_TOKENS), dtype=torch.uint8)
    paths = tuple(path for span, own in zip(spans, mixers, strict=True) for path in _paths(span, own))
    return FusedLayers(chain, scratch, paths, mixers)


def _spans(layers: Sequence[LayerParts]) -> list[Span] | None:
    """None: a feed-forward part alone has no mixer alone before it."""
    found: list[Span] = []
    for layer in layers:
        if layer.attention is not None or layer.state is not None:
            found.append(Span(layer, None if layer.mlp is None else layer))
        elif found and found[-1].feeding is None:
            found[-1] = found[-1]._replace(feeding=layer)
        else:
            return None
    return found


def _mixers(layer: LayerParts) -> Mixers:
    return Mixers(layer.attention, None if layer.state is None else layer.state.fused())


def _products(linears: Sequence[Linear]) -> list[Any]:
    return [linear.weight.products(linear.bias) for linear in linears]


def _linears(span: Span, mixers: Mixers) -> dict[int, Any]:
    """The products of a layer but for what the next one reads, by place; None for one that no kernel makes."""
    from asyncengine.kernels.cpu.fused_layer import GATE_UP, OUT

    mlp = dense_part(None if span.feeding is None else span.feeding.mlp)
    found = dict(enumerate(_products(mixers.outs), OUT))
    return found if mlp is None else found | dict(enumerate(_products(mlp.linears()), GATE_UP))


def dense_part(mlp: MLP | SparseMLP | None) -> MLP | None:
    """The part that all rows go through: the feed-forward part, or what a mixture has beside its experts."""
    return mlp.shared if isinstance(mlp, SparseMLP) else mlp


def _factors(span: Span) -> Any:
    """Factors of the layer: of its embeddings, residuals and results."""
    from asyncengine.kernels.cpu.fused_layer import Factors

    mlp = dense_part(None if span.feeding is None else span.feeding.mlp)
    gate, inner = (1.0, 1.0) if mlp is None else mlp.config.scales
    return Factors(gate, inner, span.mixing.config.attention_scale)


def _mix(layer: LayerParts, mixers: Mixers, dtype: torch.dtype) -> Any:
    """The mixer of a layer, as the kernel takes it."""
    from asyncengine.kernels.cpu.fused_layers import Heads, Mix, StateMix

    heads = state = None
    if mixers.state is not None:
        kernel, width = mixers.state.kernel, mixers.state.inputs.outputs
        state = StateMix(kernel.address, kernel.code(dtype), kernel.outputs, width, mixers.state.factors)
    if mixers.attention is not None:
        own: Any = layer.merged
        heads = Heads(
            own.num_heads, own.key_dim, own.value_dim, own.q_norm, own.k_norm, own.epsilon,
            mixers.attention.gate is not None,
        )  # fmt: skip
    return Mix(heads, state)


def _paths(span: Span, mixers: Mixers) -> list[str]:
    """Paths of a layer's products, as adapters name them; "" for a missing one."""
    mlp = dense_part(None if span.feeding is None else span.feeding.mlp)
    pairs = [mixers.inputs, mixers.outs, [] if mlp is None else mlp.linears()]
    return [path for pair in pairs for path in ([linear.path for linear in pair] + ["", ""])[:2]]


def _common(span: Span) -> bool:
    layers = [span.mixing] if span.feeding is None or span.feeding is span.mixing else [span.mixing, span.feeding]
    norms = [span.mixing.before_attention] + ([] if span.feeding is None else [span.middle])
    if not _mixes(span.mixing) or any(each is None or not each.fusable for each in norms):
        return False
    for layer in layers:
        config = layer.config
        if config.parallel or config.post_norm or config.after_attention is not None or config.after_mlp is not None:
            return False
        if layer.inputs is not None or layer.scalar is not None or layer.side is not None:
            return False
        if layer.state is None and config.attention_scale != 1.0:
            return False
    if span.feeding is None:
        return True
    mlp = span.feeding.mlp
    if isinstance(mlp, SparseMLP) and mlp.fused() is None:
        return False
    dense = dense_part(mlp)
    return dense is None or _form(dense) is not None


def _mixes(layer: LayerParts) -> bool:
    """Whether there is a kernel for what stands between the layer's first two products."""
    attention, state = layer.attention, layer.state
    if state is not None and not (isinstance(state, FusableState) and state.fused() is not None):
        return False
    if attention is None:
        return True
    return layer.merged is not None and attention.only_merged and not attention.makes_values


def _form(mlp: MLP | None) -> Any:
    from asyncengine.kernels.cpu import activation

    return None if mlp is None else activation.activation_id(mlp.between)
