"""Shapes of well-known models, and what a step of them must read from memory at least."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
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


@dataclass(frozen=True, slots=True)
class MixedShape:
    """A model whose layers are no plain decoder's: `fields` of transformers' configuration class `family`."""

    name: str
    family: str
    fields: Mapping[str, Any] = field(default_factory=dict)

    def write(self, folder: Path) -> Path:
        """A folder with config.json alone, for `load_format="dummy"`."""
        import transformers

        getattr(transformers, self.family)(**self.fields, dtype="bfloat16").save_pretrained(folder)
        return folder


HYBRID = MixedShape("Qwen3.5-0.8B shape", "Qwen3_5TextConfig", {
    "vocab_size": 248320, "hidden_size": 1024, "intermediate_size": 3584, "num_hidden_layers": 24,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256, "linear_num_key_heads": 16,
    "linear_num_value_heads": 16, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4, "tie_word_embeddings": True, "max_position_embeddings": 8192,
})  # fmt: skip
"""Shape of a hybrid: three layers of four keep states instead of keys and values."""
MIXTURE = MixedShape("Qwen3-30B-A3B shape, 8 of its 48 layers", "Qwen3MoeConfig", {
    "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768,
    "num_hidden_layers": 8, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128,
    "num_experts_per_tok": 8, "decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True,
    "tie_word_embeddings": False, "max_position_embeddings": 40960,
})  # fmt: skip
GPT_OSS = MixedShape("gpt-oss-20b shape", "GptOssConfig", {
    "vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 24, "head_dim": 64,
    "num_attention_heads": 64, "num_key_value_heads": 8, "num_local_experts": 32, "num_experts_per_tok": 4,
    "sliding_window": 128, "max_position_embeddings": 131072, "tie_word_embeddings": False,
})  # fmt: skip
_FEW = {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 96, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 64}  # fmt: skip
TINY: Mapping[str, Shape | MixedShape] = {
    SMALL.name: Shape("Qwen3-0.6B shape", 128, 96, 2, 4, 2, tied=True, head_dim=64, vocab=512),
    LARGE.name: Shape("Qwen3-8B shape", 128, 96, 2, 4, 2, tied=False, head_dim=64, vocab=512),
    HYBRID.name: MixedShape(HYBRID.name, HYBRID.family, {
        **HYBRID.fields, **_FEW, "num_hidden_layers": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 2,
        "linear_key_head_dim": 32, "linear_value_head_dim": 32}),
    MIXTURE.name: MixedShape(MIXTURE.name, MIXTURE.family, {
        **MIXTURE.fields, **_FEW, "num_hidden_layers": 2, "num_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 64}),
    GPT_OSS.name: MixedShape(GPT_OSS.name, GPT_OSS.family, {
        **GPT_OSS.fields, **_FEW, "num_hidden_layers": 2, "num_local_experts": 4, "sliding_window": 32}),
}  # fmt: skip
"""Each of them in a size that a CPU runs at once, to see that everything runs."""
