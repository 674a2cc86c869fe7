"""Random weights for a configuration, made where they will run: for measuring speed, which does not depend on them.

The setting is vLLM's: `load_format="dummy"`. Nothing is read or downloaded but configuration and tokenizer files.
"""

from __future__ import annotations

from typing import Any

import torch

from asyncengine.config import ModelSettings

_SEED = 0


def make_random(hf_config: Any, config: ModelSettings, dtype: torch.dtype, device: torch.device) -> Any:
    """A model of `hf_config` with weights as its family initialises them, the same at every call on one device.

    The process's random state is left as it was.
    """
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), torch.device(device):
        torch.manual_seed(_SEED)
        return _build(hf_config, config, dtype)


def count_elements(hf_config: Any, config: ModelSettings, dtype: torch.dtype) -> int:
    """Elements of the weights of such a model, without making them."""
    with torch.device("meta"):
        return sum(part.numel() for part in _build(hf_config, config, dtype).parameters())


def _build(hf_config: Any, config: ModelSettings, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_config(
        hf_config, dtype=dtype, attn_implementation="eager", trust_remote_code=config.trust_remote_code
    )
