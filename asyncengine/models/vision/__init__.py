"""Models that read pictures: their towers, how a picture is processed for them, and what their prompts hold for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import torch


class Encoded(NamedTuple):
    """A picture as the language model gets it. n tokens."""

    features: torch.Tensor
    """[n, width], in the place of embeddings."""
    deep: tuple[torch.Tensor, ...] = ()
    """[n, width] each, added behind the first layers (Qwen3-VL)."""


class VisionTower(Protocol):
    """The part of a model that encodes pictures, one at a time: each as if it were alone."""

    nbytes: int
    """Bytes of its weights."""

    def encode(self, pixels: Mapping[str, Any]) -> Encoded:
        """The picture of these `pixels` (and grids, masks, sizes), by the names of the tower's arguments. The tensors
        are the caller's own."""
        ...
