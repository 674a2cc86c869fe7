"""Tiny models with heads of 64 dimensions, the smallest that FlashInfer's kernels take."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import transformers as hf
from support import tiny_models
from support.tiny_models import WINDOW, make_checkpoint

CHUNK = 12
"""Tokens of a chunk of Llama 4's attention: three pages of the tests."""


def _sized(heads: int, kv_heads: int, **changes: Any) -> dict[str, Any]:
    return tiny_models.common(
        num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=64, num_hidden_layers=3, **changes
    )


_GEMMA = {
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "query_pre_attn_scalar": 24,
}

WIDE: dict[str, Callable[[], Any]] = {
    "llama": lambda: hf.LlamaConfig(**_sized(2, 2, rms_norm_eps=1e-3)),
    "qwen3": lambda: hf.Qwen3Config(**_sized(4, 2, tie_word_embeddings=True)),
    "qwen2": lambda: hf.Qwen2Config(**_sized(7, 1, hidden_size=448)),
    "mistral": lambda: hf.MistralConfig(**_sized(4, 1, sliding_window=WINDOW)),
    "gemma2": lambda: hf.Gemma2Config(
        **_sized(4, 2, attn_logit_softcapping=5.0, final_logit_softcapping=30.0, **_GEMMA)
    ),
    "llama4": lambda: hf.Llama4TextConfig(
        **_sized(
            4, 2, intermediate_size_mlp=80, num_local_experts=4, num_experts_per_tok=1, moe_layers=[1],
            no_rope_layers=[1, 0, 1], attention_chunk_size=CHUNK, floor_scale=8,
        )
    ),
}  # fmt: skip
"""Query heads per kv head: 1, 2, 7, 4, 2, 2."""


def make_wide(name: str, folder: Path) -> Path:
    """Write a random checkpoint of `WIDE[name]` into `folder`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(tiny_models.FAMILIES, name, WIDE[name])
        return make_checkpoint(name, folder)


def wide_folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A fixture of a module: the checkpoint of each name, written once."""
    return cache(lambda name: make_wide(name, tmp_path_factory.mktemp("wide") / name))
