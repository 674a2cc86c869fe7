"""Shapes of well-known models in bfloat16, without weights, and what a step of them must read from memory at least."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_ITEM = 2
"""Bytes of a bfloat16."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A model with `fields` of transformers' configuration class `family`."""

    name: str
    family: str
    fields: Mapping[str, Any]

    @property
    def config(self) -> Any:
        import transformers

        return getattr(transformers, self.family)(**self.fields, dtype="bfloat16")

    def write(self, folder: Path) -> Path:
        """A folder with config.json alone, for `load_format="dummy"`."""
        self.config.save_pretrained(folder)
        return folder

    @property
    def plain(self) -> bool:
        """Each step reads all weights: no experts, no states. What a step reads is known of such shapes alone."""
        return self.family == "Qwen3Config"

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """Numbers of a token's hidden state, of the inner part, of queries and of keys."""
        query, key = (self.fields[name] * self.fields["head_dim"] for name in _HEADS)
        return self.fields["hidden_size"], self.fields["intermediate_size"], query, key

    @property
    def weights_read(self) -> int:
        """Bytes of weights that every step reads: the layers and the output head, of the input embedding nothing."""
        hidden, inner, query, key = self.sizes
        layer = hidden * 2 * (query + key) + 2 * self.fields["head_dim"] + 3 * hidden * inner + 2 * hidden
        return _ITEM * (self.fields["num_hidden_layers"] * layer + hidden + self.fields["vocab_size"] * hidden)

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values of one token."""
        return _ITEM * 2 * self.fields["num_hidden_layers"] * self.sizes[3]

    def bytes_read(self, steps: int, lengths: Sequence[tuple[int, int]]) -> int:
        """Bytes that `steps` steps read which decode sequences of (prompt, output) tokens.

        Each output token but the first reads the keys and values of all before it and its own; what prompts read of
        each other is left out.
        """
        tokens = sum((count - 1) * prompt + (count - 1) * count // 2 for prompt, count in lengths)
        return steps * self.weights_read + tokens * self.kv_bytes


_HEADS = ("num_attention_heads", "num_key_value_heads")
_KNOWN = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
SHAPES = {key: Shape(each["name"], each["family"], each["fields"]) for key, each in _KNOWN.items()}
TINY = {key: Shape(each["name"], each["family"], each["fields"] | each["tiny"]) for key, each in _KNOWN.items()}
"""Each of them in a size that a CPU runs at once, to see that everything runs."""
