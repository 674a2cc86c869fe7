"""Models of real shapes with random weights: what they are, what a step of them costs, and writing them to disk."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.peers.mixed_shapes import BYTES, MIXED, MixedShape

CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
"""A chat is its contents, so that a chat of ids written out has these ids."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A decoder with tied embeddings, without its weights."""

    name: str
    family: str
    """"qwen3" or "llama"."""
    vocab: int
    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    context: int
    rate: float
    """Requests a second of the arrivals workload, where the caller does not say."""

    @property
    def layer_parameters(self) -> int:
        """Elements of the matrices of all layers."""
        attention = self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.inner)

    @property
    def parameters(self) -> int:
        """Elements that every step reads: layers and output head; of norms, which are small, nothing."""
        return self.layer_parameters + self.vocab * self.hidden

    def kv_bytes(self, dtype: str) -> int:
        """Bytes of keys and values of one token."""
        return BYTES[dtype] * 2 * self.layers * self.kv_heads * self.head_dim

    def read_bytes(self, weights: float, rows: int, dtype: str) -> float:
        """Bytes among `weights` that a step of so many rows reads: all of them."""
        return weights

    def operations(self, tokens: int, attended: int, sampled: int) -> int:
        """Multiplications and additions of a step: `tokens` in all, which attend to `attended` positions together,
        `sampled` of which need logits.
        """
        attention = 4 * self.layers * self.heads * self.head_dim * attended
        return 2 * self.layer_parameters * tokens + attention + 2 * self.vocab * self.hidden * sampled

    def config(self, dtype: str) -> Any:
        from transformers import LlamaConfig, Qwen3Config

        made = Qwen3Config if self.family == "qwen3" else LlamaConfig
        return made(
            vocab_size=self.vocab, hidden_size=self.hidden, intermediate_size=self.inner,
            num_hidden_layers=self.layers, num_attention_heads=self.heads, num_key_value_heads=self.kv_heads,
            head_dim=self.head_dim, max_position_embeddings=self.context, tie_word_embeddings=True, dtype=dtype,
            bos_token_id=None, eos_token_id=self.vocab - 1, pad_token_id=None,
        )  # fmt: skip


SHAPES: dict[str, Shape | MixedShape] = {
    "qwen3-0.6b": Shape("qwen3-0.6b", "qwen3", 151936, 1024, 3072, 28, 16, 8, 128, 40960, 0.8),
    "llama-110m": Shape("llama-110m", "llama", 32000, 768, 2048, 12, 12, 12, 64, 4096, 3.0),
    "smollm2-135m": Shape("smollm2-135m", "llama", 49152, 576, 1536, 30, 9, 3, 64, 40960, 3.0),
    "tiny": Shape("tiny", "llama", 1000, 128, 256, 2, 4, 2, 32, 4096, 8.0),
    **MIXED,
}
"""`tiny` only shows that everything runs."""


def write_checkpoint(shape: Shape | MixedShape, dtype: str, folder: Path, gguf: str | None = None) -> Path:
    """Random weights, the same at every call, or those of a GGUF file, with a tokenizer of numbers; written once, then
    read again.
    """
    import torch
    from transformers import AutoModelForCausalLM

    done = folder / "complete"
    if not done.exists():
        torch.manual_seed(0)
        kept = getattr(torch, dtype)
        if gguf is None:
            model = AutoModelForCausalLM.from_config(shape.config(dtype), dtype=kept)
        else:
            model = read_expanded(Path(gguf).resolve(), kept)
        model.save_pretrained(folder, max_shard_size="100GB")
        write_tokenizer(shape.vocab, folder)
        done.write_text(dtype, encoding="utf-8")
    return folder


def read_expanded(file: Path, dtype: Any) -> Any:
    """The model in a GGUF file as transformers reads it, its weights dense."""
    import transformers

    settings: dict[str, Any] = {}
    if hasattr(transformers, "GgufConfig"):  # from 5.24 on it keeps the file's blocks unless told otherwise
        settings["quantization_config"] = transformers.GgufConfig(dequantize=True)
    made = transformers.AutoModelForCausalLM
    model = made.from_pretrained(file.parent, gguf_file=file.name, dtype=dtype, **settings)
    model.config.__dict__.pop("quantization_config", None)
    return model


def write_tokenizer(vocab: int, folder: Path) -> None:
    """A tokenizer whose tokens are numbers: the text of ids is the ids, written out with blanks between them."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"▁{token}": token for token in range(vocab)}, unk_token="▁0"))
    words.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    words.decoder = decoders.Metaspace(prepend_scheme="first")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token=f"▁{vocab - 1}")
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)


def as_text(tokens: Sequence[int]) -> str:
    """The text that the tokenizer above turns into `tokens`."""
    return " ".join(map(str, tokens))


def weight_bytes(folder: Path) -> int:
    """Bytes of the tensors of a checkpoint in one safetensors file."""
    with (folder / "model.safetensors").open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    return sum(
        entry["data_offsets"][1] - entry["data_offsets"][0] for name, entry in header.items() if name != "__metadata__"
    )
