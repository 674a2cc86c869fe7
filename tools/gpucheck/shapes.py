"""Shapes of well-known models, and what a step of them must read from memory at least."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_ITEM = 2
"""Bytes of a bfloat16."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A Qwen3 in bfloat16, without its weights."""

    name: str
    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    tied: bool
    head_dim: int = 128
    vocab: int = 151936

    @property
    def config(self) -> Any:
        from transformers import Qwen3Config

        return Qwen3Config(
            vocab_size=self.vocab, hidden_size=self.hidden, intermediate_size=self.inner,
            num_hidden_layers=self.layers, num_attention_heads=self.heads, num_key_value_heads=self.kv_heads,
            head_dim=self.head_dim, tie_word_embeddings=self.tied, max_position_embeddings=40960, dtype="bfloat16",
        )  # fmt: skip

    def write(self, folder: Path) -> Path:
        """A folder with config.json alone, for `load_format="dummy"`."""
        self.config.save_pretrained(folder)
        return folder

    @property
    def weights_read(self) -> int:
        """Bytes of weights that every step reads: the layers and the output head, of the input embedding nothing."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads) + 2 * self.head_dim
        layer = attention + 3 * self.hidden * self.inner + 2 * self.hidden
        return _ITEM * (self.layers * layer + self.hidden + self.vocab * self.hidden)

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values of one token."""
        return _ITEM * 2 * self.layers * self.kv_heads * self.head_dim

    def bytes_read(self, steps: int, lengths: Sequence[tuple[int, int]]) -> int:
        """Bytes that `steps` steps read which decode sequences of (prompt, output) tokens.

        Each output token but the first reads the keys and values of all before it and its own; what prompts read of
        each other is left out.
        """
        tokens = sum((count - 1) * prompt + (count - 1) * count // 2 for prompt, count in lengths)
        return steps * self.weights_read + tokens * self.kv_bytes


SMALL = Shape("Qwen3-0.6B shape", 1024, 3072, 28, 16, 8, tied=True)
LARGE = Shape("Qwen3-8B shape", 4096, 12288, 36, 32, 8, tied=False)
