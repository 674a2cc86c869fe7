"""A model's forward in as few calls as its layers allow: embedding, rotation tables, layers, norm, logits.

transformers' own does the same between decorators, masks that are not built, and output classes, which take longer
than all of a decoding step's arithmetic that is not a matrix product. It is passed by only where watching it shows
that it does nothing else: every layer's input is the last one's output, logits are what the output layer gives (or
what the configuration says is made of that), and the whole gives the same logits, at several positions.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from asyncengine.attention.base import LayerSpec
from asyncengine.models.fused_layer import FusedLayer, fuse_layer
from asyncengine.models.probing import Context, agree, same
from asyncengine.models.rotary import RotaryTable
from asyncengine.models.short_steps import short_steps
from asyncengine.models.watching import Parts, Seen, answering, find_parts, first_positions, louder, watch

logger = logging.getLogger("asyncengine")

_FACTORS = (1.0, 50.0)
"""Of the logits that are compared: soft-capping shows in large ones only."""

_TABLE = 8192
"""Most positions whose cosines and sines are kept: a few MiB."""

Post = Callable[[torch.Tensor], torch.Tensor]


class Output(NamedTuple):
    """What is read of transformers' output class."""

    logits: torch.Tensor


def fuse_forward(module: Any, attention_modules: Sequence[Any], specs: Sequence[LayerSpec], last: int) -> list[str]:
    """Give `module` a faster `forward` where that gives the same; returns what was done, e.g. ["layer x 28"].

    `last` is the last position a request can have.
    """
    parts = find_parts(module, len(attention_modules))
    if parts is None:
        return []
    try:
        with torch.inference_mode():
            forward = _build(module, parts, attention_modules, specs, last)
    except Exception as error:  # a family that is called in another way
        logger.debug("the model keeps its own forward: %s: %s", type(error).__name__, error)
        return []
    if forward is None:
        return []
    module.forward = forward
    merged = sum(layer.attention.merged for layer in forward.fused)
    counts = {"forward": 1, "layer": len(forward.fused), "merged_attention": merged, "span": forward.spans}
    return [f"{name} x {count}" for name, count in counts.items() if count]


def _build(
    module: Any, parts: Parts, attention_modules: Sequence[Any], specs: Sequence[LayerSpec], last: int
) -> FusedForward | None:
    seen = [
        watch(module, parts, attention_modules, first, factor)
        for first, factor in zip(first_positions(parts, last), _FACTORS, strict=False)
    ]
    post = _post(module.config.get_text_config())
    if not all(same(each.logits, each.raw_logits if post is None else post(each.raw_logits)) for each in seen):
        return None
    tables = [RotaryTable(parts.rotary, each.arguments, each.keywords) for each in seen[0].tables]
    layers = [
        fuse_layer(layer, attention, spec, [each.contexts[place] for each in seen], seen[0].embedded)
        for place, (layer, attention, spec) in enumerate(zip(parts.layers, attention_modules, specs, strict=True))
    ]
    forward = FusedForward(module, parts, seen[0], layers, tables, post)
    for each, factor in zip(seen, _FACTORS, strict=False):
        with answering(attention_modules), louder(parts.head, factor):
            for rows in (each.rows, torch.arange(each.ids.shape[1], device=each.rows.device)):
                found = forward(each.ids, each.positions, False, rows).logits
                if not agree(each.logits, found if rows is each.rows else found.index_select(1, each.rows)):
                    return None
    for table in tables if all(isinstance(each, tuple) for each in seen[0].embeddings) else ():
        table.most = min(last + 1, _TABLE)
    return forward


def _post(config: Any) -> Post | None:
    """What becomes of the output layer's logits by the configuration: scaled (Cohere, Granite), capped (Gemma 2)."""
    cap = getattr(config, "final_logit_softcapping", None)
    factor, divisor = getattr(config, "logit_scale", None), getattr(config, "logits_scaling", None)
    if cap is not None:
        return lambda logits: torch.tanh(logits / cap) * cap
    if factor is not None:
        return lambda logits: logits * factor
    return None if divisor is None else lambda logits: logits / divisor


class FusedForward:
    """`forward` of a transformers model for what the runner asks of it; anything else goes to the family's own."""

    def __init__(
        self,
        module: Any,
        parts: Parts,
        seen: Seen,
        layers: Sequence[FusedLayer | None],
        tables: Sequence[RotaryTable],
        post: Post | None,
    ) -> None:
        self.fused = [layer for layer in layers if layer is not None]
        self._module = module
        self._parts = parts
        self._scale = seen.scale
        self._tables = tables
        self._post = post
        self._kinds: list[Any] = []
        """How layers are called, each way once."""
        for call in seen.calls:
            if call not in self._kinds:
                self._kinds.append(call)
        norms = [*(None if layer is None else layer.first for layer in layers[1:]), parts.norm]
        self._short = short_steps(layers, parts.norm, seen.embedded)
        self._steps = [
            (own, layer, None if layer is None else layer.junction(norm), self._kinds.index(call))
            for own, layer, norm, call in zip(parts.layers, layers, norms, seen.calls, strict=True)
        ]

    def __call__(
        self,
        input_ids: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        **others: Any,
    ) -> Any:
        """Logits [1, rows, vocabulary] of the tokens `logits_to_keep`, ascending, of one flat batch [1, T]."""
        known = input_ids is not None and position_ids is not None
        if not known or not isinstance(logits_to_keep, torch.Tensor) or others or use_cache is not False:
            given = {"input_ids": input_ids, "position_ids": position_ids, "use_cache": use_cache, **others}
            return type(self._module).forward(self._module, logits_to_keep=logits_to_keep, **given)
        parts = self._parts
        h = parts.embedding(input_ids)
        if self._scale is not None:
            h = h * self._scale
        contexts = self._contexts(h, position_ids)
        logits = parts.head(self._run(h, contexts, logits_to_keep))
        return Output(logits if self._post is None else self._post(logits))

    @property
    def spans(self) -> int:
        """Layers that short steps pass in two calls each."""
        return 0 if self._short is None else len(self.fused)

    def _run(self, h: torch.Tensor, contexts: list[Context], logits_to_keep: torch.Tensor) -> torch.Tensor:
        """What the output layer reads."""
        tokens = h.shape[1]
        if self._short is not None and logits_to_keep.shape[0] == tokens and self._short.serve(tokens):
            return self._short(h, [contexts[kind] for *_, kind in self._steps])
        x: torch.Tensor | None = None
        for own, layer, join, kind in self._steps[:-1]:
            if layer is None or join is None:
                h, x = own(h, **contexts[kind]), None
            else:
                h, x = join(*layer.branches(h, x, contexts[kind]))
        return self._last(h, x, contexts, logits_to_keep)

    def _contexts(self, h: torch.Tensor, positions: Any) -> list[Context]:
        tables = [table(h, positions) for table in self._tables]
        made: list[Context] = []
        for call in self._kinds:
            context = {**call.constants, "position_ids": positions}
            if call.table is not None:
                context["position_embeddings"] = tables[call.table]
            made.append(context)
        return made

    def _last(self, h: torch.Tensor, x: torch.Tensor | None, contexts: list[Context], rows: Any) -> torch.Tensor:
        """The last layer and the final norm, of the wanted rows: as many as there are tokens are all of them."""
        own, layer, join, kind = self._steps[-1]
        some = rows.shape[0] != h.shape[1]
        if layer is None or join is None:
            h = own(h, **contexts[kind])
            found: torch.Tensor = self._parts.norm(h.index_select(1, rows) if some else h)
            return found
        normed = join(*layer.branches(h, x, contexts[kind], rows if some else None))[1]
        assert normed is not None
        return normed
