"""Any other causal language model, run through transformers' own modules, unfused.

A family without a file in `families` runs as its authors wrote it, but for its attention, which goes through
transformers' attention interface into the engine's paged attention. What is loaded is *tried*: a short forward records
each layer's attention (heads, scale, window, soft-capping, sinks) and must agree with the same forward under
transformers' own eager attention. A family that ignores the interface, hides something in masks or keeps other state
than keys and values is refused here instead of answering wrongly later. Code from a model's folder
(`trust_remote_code`) runs only here.
"""

from __future__ import annotations

from typing import Any

import torch

from asyncengine.attention.base import StepAttention
from asyncengine.layers.places import Place
from asyncengine.layers.step import CausalLM, StepContext
from asyncengine.models.fallback.attention_function import LayerAttention, attach
from asyncengine.models.fallback.places import CurrentStep, adapt
from asyncengine.models.fallback.probing import Probed


class TransformersModel(CausalLM):
    """A family's module in transformers, with the engine's attention."""

    compiled = False
    unsteady: str | None = "it runs through transformers, whose sums depend on what is computed together"

    def __init__(self, module: Any, probed: Probed) -> None:
        parameter = next(iter(module.parameters()))
        self.module = module
        self.specs = probed.layers
        self.dtype, self.device = parameter.dtype, parameter.device
        self.vocab_size = probed.logits.shape[-1]
        self.input_vocab_size = int(module.get_input_embeddings().weight.shape[0])
        self._attention_modules = probed.modules
        self.bound: StepAttention | None = None
        """The attention backend that its modules call; None: none yet, or it was let go."""
        self._current = CurrentStep()
        self._places: list[Place] | None = None

    def forward(self, ids: torch.Tensor, step: StepContext, rows: torch.Tensor) -> torch.Tensor:
        """Logits [N, vocab] of `rows` (int64 [N], ascending) of ids [T]."""
        if step.backend is not self.bound:
            for index, part in enumerate(self._attention_modules):
                attach(part, LayerAttention(index, step.backend))
            self.bound = step.backend
        self._current.context = step
        try:
            output = self.module(
                input_ids=ids[None], position_ids=step.positions[None], use_cache=False, logits_to_keep=rows
            )
        finally:
            self._current.context = None
        logits: torch.Tensor = output.logits[0]
        return logits

    def places(self) -> list[Place]:
        """Products that adapters may change, in the model's order."""
        if self._places is None:
            self._places = adapt(self.module, self._current)
        return list(self._places)

    def unbind(self) -> None:
        """Let go of the attention backend of earlier forwards. Idempotent."""
        for part in self._attention_modules:
            attach(part, None)
        self.bound = None
