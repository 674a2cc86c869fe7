"""Decoder layers in few calls, each swapped in only after it gave the same numbers as the family's own.

What a layer adds to the residual stream comes in two branches, attention and MLP. Where norms stand, and what is done
to a branch before it is added, differs by family; a few forms cover most of them. The sum that ends a branch and the
norm that begins the next are one operation here, also from layer to layer.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from asyncengine.attention.base import LayerSpec
from asyncengine.models.attention_function import Recorder, attach
from asyncengine.models.fused_attention import FusedAttention, fuse_attention
from asyncengine.models.linears import RMSNorm
from asyncengine.models.probing import Context, random_like, same

logger = logging.getLogger("asyncengine")

_MAGNITUDES = (1.0, 0.01)
"""Of the input: in the first the residual shows, in the second the branches, which norms make as large as ever."""
_NOTHING = (nn.Dropout, nn.Identity)


class Form(NamedTuple):
    """Names of a layer's norms: before each branch, and on what the branch gives."""

    before_attention: str | None
    after_attention: str | None
    before_mlp: str | None
    after_mlp: str | None
    parallel: bool = False
    """Both branches begin with the same input."""


_FORMS = (
    Form("input_layernorm", None, "post_attention_layernorm", None),  # Llama and most others
    Form(  # Gemma 2 and 3
        "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"
    ),
    Form(None, "post_attention_layernorm", None, "post_feedforward_layernorm"),  # OLMo 2
    Form("input_layernorm", None, None, None, parallel=True),  # Cohere
)

Junction = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor | None]]
"""(residual, branch) -> (their sum, what the next branch reads: None if that is not known here)."""


class FusedLayer:
    """One layer: `branches` up to the last sum, `junction` for that sum and the norm of whatever follows."""

    def __init__(self, layer: Any, form: Form, attention: FusedAttention) -> None:
        self.attention = attention
        self.first = _norm(layer, form.before_attention)
        self.middle = None if form.parallel else _norm(layer, form.before_mlp)
        self.mlp = layer.mlp
        self.scale = float(getattr(layer, "residual_multiplier", 1.0))
        self.common = form is _FORMS[0]
        """Norms stand before the branches and nowhere else."""
        self._last = _norm(layer, form.after_mlp)
        self._parallel = form.parallel
        self._mlp_parts = list(layer.mlp.modules())
        self._middle = junction(_norm(layer, form.after_attention), self.scale, self.middle)

    def branches(
        self, h: torch.Tensor, x: torch.Tensor | None, context: Context, rows: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(residual, what is to be added to it) from the residual `h` [1, T, width] and its norm `x`, if known.

        `rows`: those of the result that are wanted; None: all. The MLP computes no others, unless somebody hooked
        onto it expects all of a step's (adapters do).
        """
        if x is None:
            x = h if self.first is None else self.first(h)
        h, between = self._middle(h, self.attention(x, context))
        if not self._parallel:
            x = h if between is None else between
        if rows is not None:
            h = h.index_select(1, rows)
            if any(part._forward_hooks for part in self._mlp_parts):
                return h, self._added(x).index_select(1, rows)
            x = x.index_select(1, rows)
        return h, self._added(x)

    def _added(self, x: torch.Tensor) -> torch.Tensor:
        branch = self.mlp(x)
        out: torch.Tensor = branch[0] if isinstance(branch, tuple) else branch  # some say what their router chose, too
        return out

    def junction(self, following: Any) -> Junction:
        """What ends this layer and begins `following`, the norm before what comes next (None: not known)."""
        return junction(self._last, self.scale, following)

    def __call__(self, h: torch.Tensor, context: Context) -> torch.Tensor:
        """The whole layer."""
        return self.junction(None)(*self.branches(h, None, context))[0]


def junction(own: Any, scale: float, following: Any) -> Junction:
    """Residual plus branch, the branch normalised by `own` and scaled first, then normalised by `following`."""

    def fused(residual: torch.Tensor, branch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        found: tuple[torch.Tensor, torch.Tensor]
        found = following.add(residual, branch if own is None else own(branch), scale)
        return found

    def plain(residual: torch.Tensor, branch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        if own is not None:
            branch = own(branch)
        total = residual + (branch if scale == 1.0 else branch * scale)
        return total, None if following is None else following(total)

    return fused if isinstance(following, RMSNorm) else plain


def fuse_layer(
    layer: Any, attention: Any, spec: LayerSpec, contexts: Sequence[Context], like: torch.Tensor
) -> FusedLayer | None:
    """`FusedLayer`, or None if no form gives what `layer` gives.

    `attention` is the module that calls the attention function, `contexts` what the layer was called with at several
    positions, `like` an input [1, T, width].
    """
    if getattr(layer, "self_attn", None) is not attention or not isinstance(getattr(layer, "mlp", None), nn.Module):
        return None
    norms = {name for name, child in layer.named_children() if not isinstance(child, _NOTHING)} - {"self_attn", "mlp"}
    form = next((each for each in _FORMS if {name for name in each[:4] if name is not None} == norms), None)
    if form is None:
        return None
    x = random_like(like, tuple(like.shape))
    try:
        candidate = FusedLayer(layer, form, fuse_attention(attention, spec, contexts, x))
        attach(attention, Recorder())
        for context in contexts:
            for magnitude in _MAGNITUDES:
                if not same(layer(x * magnitude, **context), candidate(x * magnitude, context)):
                    return None
    except Exception as error:  # a layer that is called in another way
        logger.debug("a decoder layer keeps its own form: %s: %s", type(error).__name__, error)
        return None
    finally:
        attach(attention, None)
    return candidate


def _norm(layer: Any, name: str | None) -> Any:
    return None if name is None else getattr(layer, name)
