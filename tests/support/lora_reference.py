"""Answers of peft over transformers, with random adapters on everything it can change."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from typing import Any

import torch
from support.drive import greedy_reference, prompts
from support.tiny_models import VOCAB, make_model

from asyncengine.seams import LoraWeights

RANKS = [4, 8, 3, 8, 1, 8, 5, 2]
WANT = 6
LENGTHS = [1, 9, 21]
"""The longest answer crosses the end of the tiny models' windows, of 24 tokens."""


@dataclass(frozen=True)
class Weights:
    """A `LoraAdapter`."""

    modules: dict[str, LoraWeights]

    def to(self, dtype: torch.dtype) -> Weights:
        return Weights({path: replace(w, a=w.a.to(dtype), b=w.b.to(dtype)) for path, w in self.modules.items()})


def random_weights(lora: Any, rank: int, ends: str | tuple[str, ...], *, seed: int = 0, size: float = 0.2) -> Weights:
    """Random factors for the modules of a `LoraLayers` whose paths end so, in its type."""
    generator = torch.Generator().manual_seed(seed)
    modules = {}
    for path, dims in lora.modules.items():
        if path.endswith(ends):
            a = torch.randn(rank, dims.inputs, generator=generator) * size
            b = torch.randn(dims.outputs, rank, generator=generator) * size
            modules[path] = LoraWeights(path, a.to(lora.dtype), b.to(lora.dtype), dims.kind == "embedding")
    return Weights(modules)


class Reference:
    """peft's own model with adapters a0 .. a7 on everything it can change, and what it generates."""

    def __init__(self, family: str) -> None:
        import peft
        from peft.tuners.lora import Embedding, LoraLayer
        from transformers.pytorch_utils import Conv1D

        base = make_model(family)
        table = base.get_input_embeddings()
        kinds = (torch.nn.Linear, Conv1D)
        self.targets = [path for path, part in base.named_modules() if isinstance(part, kinds) or part is table]
        self.base = [greedy_reference(base, prompt, WANT) for prompt in prompts(LENGTHS, VOCAB)]
        self.adapters: list[Weights] = []
        self.outputs: list[list[list[int]]] = []
        generator = torch.Generator().manual_seed(5)
        wrapped: Any = None
        for index, rank in enumerate(RANKS):
            config = peft.LoraConfig(
                r=rank, lora_alpha=2 * rank, use_rslora=index % 2 == 1, target_modules=self.targets
            )
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of tied weights, and of Conv1D
                wrapped = peft.get_peft_model(base, config, f"a{index}") if wrapped is None else wrapped
                if index:
                    wrapped.add_adapter(f"a{index}", config)
            modules = {}
            for path, part in wrapped.base_model.model.named_modules():
                if isinstance(part, LoraLayer):
                    modules[path] = self.draw(part, path, f"a{index}", isinstance(part, Embedding), generator)
            assert sorted(modules) == sorted(self.targets)
            self.adapters.append(Weights(modules))
            wrapped.set_adapter(f"a{index}")
            model = wrapped.base_model.model.eval()
            self.outputs.append([greedy_reference(model, prompt, WANT) for prompt in prompts(LENGTHS, VOCAB)])

    @staticmethod
    def draw(part: Any, path: str, name: str, table: bool, generator: torch.Generator) -> LoraWeights:
        """Random factors of a size that changes answers but does not drown the model; what the loader makes of them."""
        a = part.lora_embedding_A[name] if table else part.lora_A[name].weight
        b = part.lora_embedding_B[name] if table else part.lora_B[name].weight
        with torch.no_grad():
            a.copy_(torch.randn(a.shape, generator=generator) * (0.5 if table else a.shape[1] ** -0.5))
            size = 0.02 if table else 0.2 * part.scaling[name] ** -1
            b.copy_(torch.randn(b.shape, generator=generator) * size * a.shape[0] ** -0.5)
        scale = part.scaling[name] * float(getattr(part.base_layer, "embed_scale", 1.0))
        return LoraWeights(path, a.detach().clone(), b.detach() * scale, table)
