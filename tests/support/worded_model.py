"""A tiny random Llama under a real tokenizer (the demo model's): its constrained outputs wander, and they are text."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from asyncengine.demo import MODEL_PATH

VOCAB = 2048
EOS = (2, 0)


def make_worded_model(folder: Path, head_dim: int = 12, kind: Any = transformers.LlamaConfig, **more: Any) -> Path:
    """Write the checkpoint and the tokenizer's files into `folder`. `kind`: its configuration, with `more` fields."""
    config = kind(
        vocab_size=VOCAB, hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=head_dim, max_position_embeddings=512, eos_token_id=list(EOS), pad_token_id=0,
        tie_word_embeddings=False, **more,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(3)
    model: Any = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 1.6 / parameter.shape[-1] ** 0.5)
        model.get_input_embeddings().weight.mul_(6)
    model.save_pretrained(folder)
    for path in sorted(Path(MODEL_PATH).glob("tokenizer*")):
        shutil.copy(path, folder / path.name)
    return folder


class Reference:
    """The model as transformers runs it, without cache, batch or engine."""

    def __init__(self, folder: Path) -> None:
        self._model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def logits(self, tokens: list[int]) -> torch.Tensor:
        """float32 [len(tokens), vocab]."""
        with torch.inference_mode():
            return self._model(torch.tensor([tokens])).logits[0]  # type: ignore[no-any-return]

    def choose(self, tokens: list[int], ids: Any) -> list[int]:
        """The likeliest of the allowed `ids`, in their order: as many as a runner offers to a matcher."""
        from asyncengine.execution.sampling.sampler import MOST

        logits = self.logits(tokens)[-1][torch.from_numpy(ids)]
        return [int(ids[place]) for place in logits.argsort(descending=True, stable=True)[:MOST].tolist()]

    def greedy(self, prompt: list[int], max_tokens: int, processors: Sequence[Any] = ()) -> list[int]:
        """The likeliest tokens, up to an end. `processors`: of transformers."""
        tokens = list(prompt)
        while len(tokens) < len(prompt) + max_tokens and tokens[-1] not in EOS:
            scores = self.logits(tokens)[-1:].clone()
            for processor in processors:
                scores = processor(torch.tensor([tokens]), scores)
            tokens.append(int(scores.argmax()))
        return tokens[len(prompt) :]
