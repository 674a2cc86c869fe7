"""Small random models of several families, with heads of 64 dimensions, which is the least that FlashInfer takes.

Weights are large enough that greedy outputs wander instead of repeating one token, and sliding windows are short enough
that outputs cross them.
"""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from support.peft_checkpoints import make_peft
from support.tiny_configs import maker_of
from support.tiny_models import randomize, save

from asyncengine.demo import MODEL_PATH

from .engines import CASES, ON_GPU

NEEDS_FLASHINFER = pytest.mark.skipif(
    not ON_GPU or importlib.util.find_spec("flashinfer") is None, reason="needs an NVIDIA GPU and asyncengine[cuda]"
)
TEXT_VOCAB = 2048
"""Size of the demo model's vocabulary."""
RANK = 8


@dataclass(frozen=True, slots=True)
class Family:
    """`fields` of its configuration beside `_SIZES` and the common ones; `half`: other ones for 16-bit weights."""

    name: str
    fields: Mapping[str, Any]
    half: Mapping[str, Any] = field(default_factory=dict)

    def make(self, half: bool) -> Any:
        return maker_of({**_SIZES, **self.fields, **(self.half if half else {})})()


_SIZES = {"hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2, "head_dim": 64}
FAMILIES = [Family(**each) for each in CASES["families"]]
"""In 16 bits every token of a mixture takes all experts: where rounding may choose others nothing is near."""


def family_called(name: str) -> Family:
    return next(family for family in FAMILIES if family.name == name)


def text_config() -> Any:
    """A Qwen3 whose vocabulary is that of the demo model's tokenizer."""
    return maker_of({**_SIZES, "class": "Qwen3Config", "vocab_size": TEXT_VOCAB})()


def make_checkpoint(config: Any, folder: Path, dtype: torch.dtype, seed: int, *, tokenizer: bool = False) -> Path:
    """Write a random model of `config`, and the demo model's tokenizer beside it if asked for."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = hf.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    randomize(model, str(config.model_type), torch.Generator().manual_seed(seed))
    save(model.to(dtype), folder)
    if tokenizer:
        for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            shutil.copy(MODEL_PATH / name, folder / name)
    return folder


def make_adapter(model_folder: Path, folder: Path, seed: int) -> Path:
    """A random adapter on every linear of the layers, saved by peft."""
    model = hf.AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.bfloat16)
    make_peft(model, seed, r=RANK, lora_alpha=6 * RANK, target_modules="all-linear").save_pretrained(folder)
    return folder
