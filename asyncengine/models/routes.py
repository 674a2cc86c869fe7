"""Whether a model can say which experts its tokens go to, and the type of their numbers."""

from __future__ import annotations

from typing import Any

import torch

from asyncengine.models.decoder import Decoder


def why_unrouted(model: Any) -> str | None:
    """Why a `CausalLM` cannot say which experts a token goes to; None: it can."""
    if not isinstance(model, Decoder):
        return "its layers are transformers' modules, which do not tell"
    if not any(layer.mixtures() for layer in model.layers):
        return "the model has no experts"
    if model.options.ranks is not None or model.options.stage is not None:
        return "other processes that have a part of the model do not tell"
    return None if model.device.type == "cpu" else "steps on a GPU are graphs, which do not tell"


def expert_type(model: Any) -> torch.dtype | None:
    """The smallest of uint8 and int16 that holds the numbers of its experts; None: it is `why_unrouted`."""
    if why_unrouted(model) is not None:
        return None
    most = max(mixture.router.config.experts for layer in model.layers for mixture in layer.mixtures())
    return torch.uint8 if most <= 256 else torch.int16
