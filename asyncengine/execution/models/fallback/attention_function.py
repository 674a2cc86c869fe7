"""The one attention function registered with transformers, and the object behind it in each attention module.

transformers looks up attention functions by name in a process-wide table. Ours holds no state: it calls the object
attached to the attention module it is given, so any number of engines can run side by side. Its name is left out of
the mask table, which makes transformers build no mask at all. Keyword arguments are read once, while a short forward
is recorded at load time, because some families drop them on the way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from asyncengine.execution.attention.base import LayerSpec, StepAttention
from asyncengine.execution.attention.torch_paged import causal_bias, masked_attention

NAME = "asyncengine"
_ATTRIBUTE = "asyncengine_attention"


AttentionHandler = Callable[[Any, torch.Tensor, torch.Tensor, torch.Tensor, dict[str, Any]], torch.Tensor]
"""Attached to an attention module: (module, query [1, heads, T, dim], key and value [1, kv heads, T, dim], further
arguments) -> [1, T, heads, value dim], contiguous."""


def attention_function(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any, **arguments: Any
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface. The module must carry a handler (`attach`)."""
    handler: AttentionHandler = getattr(module, _ATTRIBUTE)
    return handler(module, query, key, value, arguments), None


def register() -> None:
    """Make `NAME` known to transformers. Idempotent."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, attention_function)


def attach(module: Any, handler: AttentionHandler | None) -> None:
    """Give `module` its handler, or take it away with None."""
    if handler is None:
        module.__dict__.pop(_ATTRIBUTE, None)
    else:
        module.__dict__[_ATTRIBUTE] = handler


class LayerAttention:
    """Handler of one layer during execution: hands the flat tokens to the backend."""

    __slots__ = ("backend", "layer")

    def __init__(self, layer: int, backend: StepAttention) -> None:
        self.layer = layer
        self.backend = backend

    def __call__(
        self, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, arguments: dict[str, Any]
    ) -> torch.Tensor:
        self.backend.write(self.layer, key[0].transpose(0, 1), value[0].transpose(0, 1))
        return self.backend.attend(self.layer, query[0].transpose(0, 1))[None]


class Recorder:
    """Handler that learns each layer's `LayerSpec` from one forward, in call order, and answers correctly meanwhile."""

    def __init__(self) -> None:
        self.modules: list[Any] = []
        self.specs: list[LayerSpec] = []

    def __call__(
        self, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, arguments: dict[str, Any]
    ) -> torch.Tensor:
        sinks = arguments.get("s_aux")
        scale = arguments.get("scaling")
        window = arguments.get("sliding_window")
        spec = LayerSpec(
            index=len(self.specs),
            num_heads=query.shape[1],
            num_kv_heads=key.shape[1],
            key_dim=query.shape[-1],
            value_dim=value.shape[-1],
            scale=query.shape[-1] ** -0.5 if scale is None else float(scale),
            window=None if window is None else int(window),
            softcap=arguments.get("softcap") or None,
            sinks=None if sinks is None else sinks.detach(),
        )
        self.modules.append(module)
        self.specs.append(spec)
        return _plain_attention(spec, query, key, value)


def _plain_attention(spec: LayerSpec, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Causal attention of one unpaged sequence, [1, T, heads, value dim]."""
    length = query.shape[2]
    bias = causal_bias(0, length, 0, length, spec.window, query)
    grouped = query[0].view(spec.num_kv_heads, -1, length, spec.key_dim)
    sinks = None if spec.sinks is None else spec.sinks.view(spec.num_kv_heads, -1, 1, 1)
    out = masked_attention(spec, grouped, key[0][:, None], value[0][:, None], bias, sinks)
    return out.flatten(0, 1).transpose(0, 1)[None].contiguous()
