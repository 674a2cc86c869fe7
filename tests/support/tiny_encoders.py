"""Tiny random encoders of transformers, one for each family: weights large enough that every part of them matters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from support.data import cases_of

VOCAB = 120
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "pad_token_id": 1, "num_labels": 3,
}  # fmt: skip


def _maker(fields: Mapping[str, Any]) -> Callable[[], Any]:
    own = {name: value for name, value in fields.items() if name not in ("class", "alone")}
    sizes = {} if "alone" in fields else SIZES
    return lambda: getattr(hf, fields["class"])(**deepcopy(sizes | own))


FAMILIES: Mapping[str, Callable[[], Any]] = {name: _maker(fields) for name, fields in cases_of(__file__).items()}
"""Configurations by name; before a "-", the family's. Fields beside `SIZES`, or all of them ("alone"), are data."""


def make_encoder(
    name: str, folder: Path | None, *, classifies: bool = False, dtype: torch.dtype = torch.float32
) -> Any:
    """A random model of transformers, also saved in `folder`."""
    torch.manual_seed(len(name))
    kind: Any = hf.AutoModelForSequenceClassification if classifies else hf.AutoModel
    model = kind.from_config(FAMILIES[name](), attn_implementation="eager").eval()
    with torch.no_grad():
        for path, weight in model.named_parameters():
            if weight.dim() == 1:
                weight.normal_(0.0 if path.endswith("bias") or "gemma" in name else 1.0, 0.3)
            else:
                weight.normal_(0.0, 0.5 if "embed" in path.lower() else 1.3 * weight.shape[1] ** -0.5)
    model = model.to(dtype)
    if folder is not None:
        model.save_pretrained(folder)
    return model


def texts(*lengths: int, vocab: int = VOCAB) -> list[list[int]]:
    """Random token ids, none of a padding token."""
    generator = torch.Generator().manual_seed(sum(lengths))
    return [torch.randint(6, vocab, (length,), generator=generator).tolist() for length in lengths]
