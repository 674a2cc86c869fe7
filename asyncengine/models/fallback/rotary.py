"""Frequencies of rotary embedding that do not change between steps."""

from __future__ import annotations

from typing import Any

import torch


def freeze_rotary(module: Any, max_model_len: int, device: torch.device) -> None:
    """Fix frequencies that transformers would choose anew per step by the longest position in it.

    "dynamic" and "longrope" scaling depend on sequence length; in a flat batch that would be the longest neighbour's,
    and keys cached under one choice would meet queries under another. They are set once, for `max_model_len`, as vLLM
    does. Other types are left alone.
    """
    for part in module.modules():
        kinds = getattr(part, "rope_type", None)
        if kinds is None or not hasattr(part, "original_max_seq_len"):
            continue
        last = torch.tensor([[max_model_len - 1]], device=device)
        sample = torch.zeros(1, dtype=torch.float32, device=device)
        if isinstance(kinds, dict):
            for layer_type, kind in kinds.items():
                if _changes(kind):
                    part(sample, last, layer_type)
            part.rope_type = {key: "default" if _changes(kind) else kind for key, kind in kinds.items()}
        elif _changes(kinds):
            part(sample, last)
            part.rope_type = "default"


def _changes(kind: str) -> bool:
    return "dynamic" in kind or kind == "longrope"
