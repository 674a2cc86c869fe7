"""Tiny random models of transformers' that tests write into GGUF files."""

from __future__ import annotations

from typing import Any

import torch
from support.tiny_configs import rope
from transformers import AutoModelForCausalLM

IDS = list(range(3, 14))


def pattern(period: int, layers: int) -> list[str]:
    return ["full_attention" if (index + 1) % period == 0 else "sliding_attention" for index in range(layers)]


YARN = rope("yarn", factor=8.0, original_max_position_embeddings=64, beta_fast=4.0, beta_slow=1.0)


def make_model(config: Any) -> Any:
    """A random model of transformers', norms and biases included."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 1:
                    parameter.add_(0.2 * torch.randn(parameter.shape))
                else:
                    parameter.mul_(4.0)
    return model
