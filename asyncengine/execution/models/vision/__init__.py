"""Models that read pictures: their towers, how a picture is processed for them, and what their prompts hold for it."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Encoded(NamedTuple):
    """A picture as the language model gets it. n tokens."""

    features: torch.Tensor
    """[n, width], in the place of embeddings."""
    deep: tuple[torch.Tensor, ...] = ()
    """[n, width] each, added behind the first layers (Qwen3-VL)."""
