"""Our attention in a transformers model, and a try of it on a few tokens: does it give what the layers' own gives?"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from asyncengine.errors import UnsupportedModel
from asyncengine.execution.attention.base import LayerSpec, StepAttention
from asyncengine.execution.attention.torch_paged import causal_bias, masked_attention
from asyncengine.execution.models.formats import first_line

# The one attention function registered with transformers, and the object behind it in each attention module.
#
# transformers looks up attention functions by name in a process-wide table. Ours holds no state: it calls the object
# attached to the attention module it is given, so any number of engines can run side by side. Its name is left out of
# the mask table, which makes transformers build no mask at all. Keyword arguments are read once, while a short forward
# is recorded at load time, because some families drop them on the way.

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


_PROBE_TOKENS = 7
_PROBE_ERROR = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.05}
"""Largest difference of a whole model, relative to the largest logit."""
_LAYER_ERROR = {torch.float32: 1e-4, torch.bfloat16: 0.03, torch.float16: 0.01}
"""The largest error of one layer's attention, relative to its largest number."""


def agree(expected: torch.Tensor, found: torch.Tensor) -> bool:
    """Equal up to the rounding that a whole model accumulates in its type."""
    return _within(expected, found, _PROBE_ERROR)


def _within(expected: torch.Tensor, found: torch.Tensor, errors: Mapping[torch.dtype, float]) -> bool:
    difference = float((expected.float() - found.float()).abs().max())
    return difference <= errors[expected.dtype] * float(expected.float().abs().max())


@dataclass(frozen=True, slots=True)
class Probed:
    """The results of a short forward of the loaded model."""

    layers: list[LayerSpec]
    modules: list[Any]
    logits: torch.Tensor
    """[tokens, vocab] of the probe."""
    weights_bytes: int


def probe(module: Any, device: torch.device) -> Probed:
    """Run a few tokens under eager attention and under ours and record the layers. Leaves ours set.

    Raises `UnsupportedModel` if ours is not called once per layer or the logits differ.
    """
    family = module.config.model_type
    try:
        with torch.inference_mode():
            tokens, positions = _probe_input(module, device)
            expected = module(input_ids=tokens, position_ids=positions, use_cache=False).logits[0]
        register()
        module.set_attn_implementation(NAME)
        found, recorder = run_recorded(module, device)
    except (TypeError, ValueError, RuntimeError, IndexError, KeyError, AttributeError) as error:
        raise UnsupportedModel(
            f"family {family!r} does not run on flat, unpadded batches: {first_line(error)}"
        ) from error
    if module.config.get_text_config()._attn_implementation != NAME:
        raise UnsupportedModel(f"family {family!r} does not let its attention be set")
    _check_layers(module, recorder)
    if not agree(expected, found) and not _each_agrees(module, recorder.modules, device):
        raise UnsupportedModel(f"family {family!r} computes more in its attention than the interface passes on")
    weights = {part.data_ptr(): part.numel() * part.itemsize for part in module.parameters()}
    return Probed(recorder.specs, recorder.modules, found, sum(weights.values()))


def run_recorded(module: Any, device: torch.device) -> tuple[torch.Tensor, Recorder]:
    """A short forward through our attention function, outside of any runner: logits [tokens, vocab]."""
    recorder = Recorder()
    for part in module.modules():
        attach(part, recorder)
    try:
        with torch.inference_mode():
            tokens, positions = _probe_input(module, device)
            keep = torch.arange(_PROBE_TOKENS, device=device)
            output = module(input_ids=tokens, position_ids=positions, use_cache=False, logits_to_keep=keep)
            logits: torch.Tensor = output.logits[0]
    finally:
        for part in module.modules():
            attach(part, None)
    return logits, recorder


def _each_agrees(module: Any, parts: list[Any], device: torch.device) -> bool:
    """Whether each layer's attention `parts` gives the same as eager attention does for the same input.

    A mixture's router may choose otherwise for a difference in rounding: nothing after that can be compared. Leaves
    our attention set.
    """
    calls: list[tuple[Any, ...]] = []

    def note(part: Any, arguments: Any, keywords: Any, output: Any) -> None:
        calls.append((part, arguments, keywords, _first(output)))

    hooks = [part.register_forward_hook(note, with_kwargs=True) for part in parts]
    try:
        module.set_attn_implementation("eager")
        with torch.inference_mode():
            tokens, positions = _probe_input(module, device)
            module(input_ids=tokens, position_ids=positions, use_cache=False)
    finally:
        module.set_attn_implementation(NAME)
        for hook in hooks:
            hook.remove()
    recorder = Recorder()
    for part in parts:
        attach(part, recorder)
    try:
        with torch.inference_mode():
            found = [_first(part(*arguments, **keywords)) for part, arguments, keywords, _ in calls]
    finally:
        for part in parts:
            attach(part, None)
    return len(calls) == len(parts) and all(
        _within(call[-1], own, _LAYER_ERROR) for call, own in zip(calls, found, strict=True)
    )


def _first(output: Any) -> torch.Tensor:
    return output[0] if isinstance(output, tuple) else output


def _probe_input(module: Any, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    vocabulary = module.get_input_embeddings().weight.shape[0]
    tokens = torch.arange(1, _PROBE_TOKENS + 1, device=device).remainder_(vocabulary)[None]
    return tokens, torch.arange(_PROBE_TOKENS, device=device)[None]


def _check_layers(module: Any, recorder: Recorder) -> None:
    family, text_config = module.config.model_type, module.config.get_text_config()
    modules = recorder.modules
    if len(modules) != text_config.num_hidden_layers or len({id(part) for part in modules}) != len(modules):
        raise UnsupportedModel(
            f"family {family!r} calls attention {len(modules)} times in {text_config.num_hidden_layers} layers"
        )
    kinds = getattr(text_config, "layer_types", None)
    slides = getattr(text_config, "use_sliding_window", True)
    for spec in recorder.specs:
        sliding = slides if kinds is None else kinds[spec.index] == "sliding_attention"
        if sliding and getattr(text_config, "sliding_window", None) and spec.window is None:
            raise UnsupportedModel(f"family {family!r} does not say which of its layers slide")
