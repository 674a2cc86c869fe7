"""Tiny random checkpoints of the models in `tiny_configs`, in ordinary Hugging Face format."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers as hf
from support.tiny_configs import FAMILIES, GROUPS, HYBRID, OPTIONS, VOCAB, WHOLE, WINDOW, common

__all__ = [
    "FAMILIES", "GROUPS", "HYBRID", "OPTIONS", "VOCAB", "WHOLE", "WINDOW", "common", "make_checkpoint", "make_model",
    "randomize", "save",
]  # fmt: skip


def make_model(
    name: str, seed: int = 0, dtype: torch.dtype = torch.float32, heavy: bool = False, epsilon: float | None = None
) -> Any:
    """A random model of the family with every parameter drawn anew, norms near one, sinks and biases not zero.

    Weights are large enough that greedy outputs wander instead of repeating one token.
    `heavy`: some weights are several times as large as the others, as trained ones are; clamps and bounds show.
    `epsilon` of all norms, None: the family's own, which is too small to show.
    """
    config = (FAMILIES.get(name) or OPTIONS[name])()
    if epsilon is not None:
        for field in ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "layernorm_epsilon"):
            if hasattr(config, field):
                setattr(config, field, epsilon)
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = hf.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    randomize(model, name, generator, heavy)
    return model.to(dtype)


def randomize(model: Any, name: str, generator: torch.Generator, heavy: bool = False) -> None:
    """Draw all parameters anew. `name` of the family: some scale what they multiply."""
    tied = 0.1 if getattr(model.config, "tie_word_embeddings", False) else 1.0
    if name.startswith("gemma"):
        tied = 0.02  # this family scales its embeddings up
    elif name == "opt-350m":
        tied = 0.3
    with torch.no_grad():
        for key, buffer in model.named_buffers():
            if key.endswith("layer_scalar"):
                buffer.copy_(1.0 + 0.3 * torch.randn(1, generator=generator))
            elif key.endswith(("e_score_correction_bias", "expert_bias")):
                buffer.copy_(0.2 * torch.randn(buffer.shape, generator=generator))
        for key, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if key.endswith("A_log"):  # what a state forgets with each token: some heads little, some much
                parameter.copy_(noise - 2.0)
                continue
            if heavy:
                noise *= 1 + 4 * (torch.rand(parameter.shape, generator=generator) < 0.02)
            if (parameter.dim() == 1 and "norm" in key and "weight" in key) or ("ln_" in key and "weight" in key):
                parameter.add_(0.2 * noise)
                if name.startswith("gemma4") and ("q_norm" in key or "k_norm" in key):
                    parameter.mul_(0.4)  # its scores are not scaled
            elif parameter.dim() == 1 or "bias" in key:
                parameter.copy_(
                    (0.1 if name.startswith("gpt2") else 0.3) * noise
                )  # GPT-2 has so many that they drown the tokens
            elif "wpe" in key or "embed_positions" in key:
                parameter.copy_(noise * (2.0 if name == "opt-350m" else 1.0))  # its last norm leaves tokens little room
            elif "embed" in key or "wte" in key:
                parameter.copy_(noise * tied)  # else a tied output just repeats its input
            else:
                inputs = parameter.shape[0 if name.startswith("gpt2") else -1]  # GPT-2 stores the transpose
                parameter.copy_(noise * 1.6 / inputs**0.5)


def make_checkpoint(
    name: str,
    folder: Path,
    sharded: bool = False,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    heavy: bool = False,
) -> Path:
    """Write a random checkpoint of the family into `folder` (made if needed); several small shards if `sharded`."""
    return save(make_model(name, seed, dtype, heavy), folder, sharded)


def save(model: Any, folder: Path, sharded: bool = False, **fields: Any) -> Path:
    """Write `model` into `folder`, which is made if needed, without a progress bar. `fields`: of `save_pretrained`."""
    from transformers.utils import logging

    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    model.save_pretrained(folder, max_shard_size="60KB" if sharded else "1GB", **fields)
    if bars:
        logging.enable_progress_bar()
    return folder
