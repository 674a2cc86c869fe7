"""Tiny random checkpoints of models that read images or sounds as well, each with a tower of its own."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from support.tiny_models import FAMILIES, VOCAB, common, randomize, save

IMAGE, VIDEO = VOCAB - 1, VOCAB - 2
"""Tokens that stand for others in `multimodal_models.json`; no prompt of a test has them."""


def _maker(fields: Mapping[str, Any]) -> Callable[[], Any]:
    def make() -> Any:
        own = deepcopy({name: value for name, value in fields.items() if name not in ("class", "text")})
        text = fields["text"]
        text = FAMILIES[text]() if isinstance(text, str) else common(**deepcopy(text))
        if fields["class"] == "Gemma4Config":
            text.use_bidirectional_attention = "vision"
        return getattr(hf, fields["class"])(text_config=text, **own)

    return make


_KNOWN = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
CONFIGS: Mapping[str, Callable[[], Any]] = {name: _maker(fields) for name, fields in _KNOWN.items()}
"""Classes of transformers with their fields and text parts: those of a tiny family, or fields beside `common`'s."""


def make_multimodal(name: str, seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
    """A random model of all its parts."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = hf.AutoModelForMultimodalLM.from_config(CONFIGS[name](), dtype=torch.float32).eval()
    randomize(model, name, torch.Generator().manual_seed(seed))
    return model.to(dtype)


def save_multimodal(name: str, folder: Path, **fields: Any) -> Any:
    """Write such a checkpoint as transformers does, and return the model."""
    model = make_multimodal(name)
    save(model, folder, **fields)
    return model
