"""The facts about a loaded model that do not depend on what computes it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch


@dataclass(slots=True, kw_only=True)
class Loaded:
    """A model ready to run."""

    name: str
    folder: Path
    hf_config: Any
    """A `ModelConfig`, or transformers' config object."""
    vocab_size: int
    """Width of the logits; of an encoder, token ids are below it."""
    max_model_len: int
    dtype: torch.dtype
    device: torch.device
    weights_bytes: int
    eos_token_ids: list[int] = field(default_factory=list)
    """None: it writes no text."""
    generation_defaults: dict[str, Any] = field(default_factory=dict)
    """The settings of generation_config.json (temperature, top_p, top_k, ...)."""
    stored: dict[str, str] = field(default_factory=dict)
    """Storage types of quantized matrices, by name."""
    fused: list[str] = field(default_factory=list)
    """Forms in which it runs, e.g. "decoder x 1", "packed x 113"; empty: through transformers' modules as they are."""
    left_out: tuple[str, ...] = ()
    """Parts of the checkpoint that were not read, e.g. "vision_tower x 437"."""
    placeholders: dict[int, str] = field(default_factory=dict)
    """Tokens in whose place an image or a sound would go, and which of them."""
