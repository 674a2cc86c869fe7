"""Any other causal language model, run through transformers' own modules, unfused.

A family without a file in `families` runs as its authors wrote it, but for its attention, which goes through
transformers' attention interface into the engine's paged attention. What is loaded is *tried*: a short forward records
each layer's attention (heads, scale, window, soft-capping, sinks) and must agree with the same forward under
transformers' own eager attention. A family that ignores the interface, hides something in masks or keeps other state
than keys and values is refused here instead of answering wrongly later. Code from a model's folder
(`trust_remote_code`) runs only here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from asyncengine.attention.base import AttentionBackend, LayerSpec
from asyncengine.errors import UnsupportedModel
from asyncengine.layers.places import Place
from asyncengine.layers.step import StepContext
from asyncengine.lora.layers.targets import find_places
from asyncengine.models.attention_function import NAME, LayerAttention, Recorder, attach, register
from asyncengine.models.checkpoint import first_line
from asyncengine.models.probing import agree

_PROBE_TOKENS = 7


class TransformersModel:
    """A `CausalLM` that is transformers' own module, with the engine's attention."""

    compiled = False

    def __init__(self, module: Any, probed: Probed) -> None:
        parameter = next(iter(module.parameters()))
        self.module = module
        self.specs = probed.layers
        self.dtype, self.device = parameter.dtype, parameter.device
        self.vocab_size = probed.logits.shape[-1]
        self.input_vocab_size = int(module.get_input_embeddings().weight.shape[0])
        self._attention_modules = probed.modules
        self._bound: AttentionBackend | None = None

    def forward(self, ids: torch.Tensor, step: StepContext, rows: torch.Tensor) -> torch.Tensor:
        """Logits [N, vocab] of `rows` (int64 [N], ascending) of ids [T]."""
        if step.backend is not self._bound:
            for index, part in enumerate(self._attention_modules):
                attach(part, LayerAttention(index, step.backend))
            self._bound = step.backend
        output = self.module(
            input_ids=ids[None], position_ids=step.positions[None], use_cache=False, logits_to_keep=rows
        )
        logits: torch.Tensor = output.logits[0]
        return logits

    def places(self) -> list[Place]:
        """Where adapters may act, in the model's order."""
        return find_places(self.module)

    def unbind(self) -> None:
        """Let go of the attention backend of earlier forwards. Idempotent."""
        for part in self._attention_modules:
            attach(part, None)
        self._bound = None


@dataclass(frozen=True, slots=True)
class Probed:
    """What a short forward of the loaded model showed."""

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
    if not agree(expected, found):
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
