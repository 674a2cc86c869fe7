"""A reranker with random weights."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
import transformers

from asyncengine import DEMO_EMBEDDER


def make_reranker(folder: Path) -> Path:
    """A cross-encoder with random weights, which reads words as the demo embedder does."""
    config = transformers.BertConfig(
        vocab_size=4096, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=128, num_labels=1,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(3)
        model = transformers.BertForSequenceClassification(config).eval()
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(torch.randn(parameter.shape) / parameter.shape[-1] ** 0.5)
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO_EMBEDDER / name, folder / name)
    return folder
