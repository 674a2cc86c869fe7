"""Shapes whose layers are not all alike: states beside attention, and mixtures of experts; counted from their modules.

Each is what `shapes.Shape` is to dense decoders: a configuration, and what a step of it reads and computes.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

BYTES = {"bfloat16": 2, "float32": 4}


@dataclass(frozen=True, slots=True)
class Counts:
    """Elements of a model's matrices."""

    all: int
    embedding: int
    experts: int
    """Weights of routed experts among `all`."""


@dataclass(frozen=True, slots=True)
class MixedShape:
    """A decoder that transformers knows as `family`, without its weights."""

    name: str
    family: str
    vocab: int
    context: int
    rate: float
    """Requests a second of the arrivals workload, where the caller does not say."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    attending: int = 0
    """Layers with attention."""
    state: tuple[int, int] = (0, 0)
    """float32 numbers of all recurrent states of a sequence, and those of its windows, of the model's type."""
    experts: tuple[int, int] = (1, 1)
    """Experts of a layer; and those that a token goes to."""

    @property
    def parameters(self) -> int:
        """Elements that a step of one stream reads."""
        found = counts(self)
        return int(found.all - found.experts * (1 - self._share(1)))

    @property
    def layer_parameters(self) -> int:
        """Elements of the matrices of all layers that a token passes."""
        found = counts(self)
        return self.parameters - found.embedding

    def _share(self, rows: int) -> float:
        """Share of the experts that so many rows use, if they spread evenly."""
        each, chosen = self.experts
        return 1.0 - (1.0 - chosen / each) ** rows

    def kv_bytes(self, dtype: str) -> int:
        """Bytes of keys and values of one token."""
        dim = self.fields.get("head_dim") or self.fields["hidden_size"] // self.fields["num_attention_heads"]
        return int(BYTES[dtype] * 2 * self.attending * self.fields["num_key_value_heads"] * dim)

    def read_bytes(self, weights: float, rows: int, dtype: str) -> float:
        """Bytes among `weights` that a step of so many rows reads; and its states, read and written."""
        found, (recurrent, windows) = counts(self), self.state
        read = weights * (1 - found.experts / found.all * (1 - self._share(rows)))
        return read + 2 * rows * (4 * recurrent + BYTES[dtype] * windows)

    def operations(self, tokens: int, attended: int, sampled: int) -> int:
        """Operations as `Shape.operations` counts them, without the recurrence itself, which is small."""
        heads = self.fields["num_attention_heads"]
        dim = self.fields.get("head_dim") or self.fields["hidden_size"] // heads
        attention = 4 * self.attending * heads * dim * attended
        return 2 * self.layer_parameters * tokens + attention + 2 * counts(self).embedding * sampled

    def config(self, dtype: str) -> Any:
        from transformers import AutoConfig

        return AutoConfig.for_model(
            self.family, vocab_size=self.vocab, max_position_embeddings=self.context, dtype=dtype,
            bos_token_id=None, eos_token_id=self.vocab - 1, pad_token_id=None, **self.fields,
        )  # fmt: skip


@functools.cache
def _counts(name: str) -> Counts:
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(MIXED[name].config("bfloat16"))
    matrices = {path: tensor for path, tensor in model.named_parameters() if tensor.ndim > 1}
    experts = sum(tensor.numel() for path, tensor in matrices.items() if ".experts." in path)
    return Counts(
        sum(tensor.numel() for tensor in matrices.values()), model.get_input_embeddings().weight.numel(), experts
    )


def counts(shape: MixedShape) -> Counts:
    """Counts of the modules, without memory for their weights."""
    return _counts(shape.name)


def _every(period: int, layers: int, kind: str, other: str, at: int = -1) -> list[str]:
    return [kind if layer % period == at % period else other for layer in range(layers)]


_QWEN = {
    "hidden_size": 1024, "intermediate_size": 3584, "num_hidden_layers": 24, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 256, "linear_num_key_heads": 16, "linear_num_value_heads": 16,
    "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "tie_word_embeddings": True,
    "layer_types": _every(4, 24, "full_attention", "linear_attention"),
}  # fmt: skip
_LFM = {
    "hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8,
    "intermediate_size": 8192, "block_auto_adjust_ff_dim": False, "conv_L_cache": 3, "tie_word_embeddings": True,
    "layer_types": ["full_attention" if layer in (2, 5, 8, 10, 12, 14) else "conv" for layer in range(16)],
}  # fmt: skip
_GRANITE = {
    "hidden_size": 1536, "num_hidden_layers": 40, "num_attention_heads": 12, "num_key_value_heads": 4,
    "shared_intermediate_size": 4096, "intermediate_size": 4096, "num_local_experts": 0, "num_experts_per_tok": 0,
    "mamba_n_heads": 48, "mamba_d_head": 64, "mamba_d_state": 128, "mamba_n_groups": 1,
    "layer_types": _every(10, 40, "full_attention", "linear_attention", 5), "tie_word_embeddings": True,
    "embedding_multiplier": 12.0, "logits_scaling": 6.0, "residual_multiplier": 0.22,
    "attention_multiplier": 0.0078125, "position_embedding_type": "nope",
}  # fmt: skip
_MIXTURE = {
    "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_hidden_layers": 3,
    "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8,
    "norm_topk_prob": True, "tie_word_embeddings": True,
}  # fmt: skip
_SMALL_MIXTURE = _MIXTURE | {
    "hidden_size": 1024, "moe_intermediate_size": 512, "num_hidden_layers": 12, "num_attention_heads": 16,
    "num_experts": 32, "num_experts_per_tok": 4,
}  # fmt: skip
_TINY_MIXTURE = _SMALL_MIXTURE | {
    "hidden_size": 256, "moe_intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "num_experts": 8, "num_experts_per_tok": 2,
}  # fmt: skip
_CHANNELS, _INNER = 3 * 16 * 128, 48 * 64
MIXED: dict[str, MixedShape] = {
    shape.name: shape
    for shape in (
        MixedShape(
            "qwen3.5-0.8b", "qwen3_5_text", 248320, 8192, 0.8, _QWEN, 6, (18 * 16 * 128 * 128, 18 * 3 * _CHANNELS)
        ),
        MixedShape("lfm2-1.2b", "lfm2", 65536, 8192, 0.8, _LFM, 6, (0, 10 * 2 * 2048)),
        MixedShape(
            "granite-4-h-1b", "granitemoehybrid", 100352, 8192, 0.8, _GRANITE, 4,
            (36 * _INNER * 128, 36 * 3 * (_INNER + 2 * 128)),
        ),
        MixedShape("qwen3-30b-a3b-3l", "qwen3_moe", 32768, 8192, 0.8, _MIXTURE, 3, experts=(128, 8)),
        MixedShape("qwen3-moe-0.7b", "qwen3_moe", 32768, 8192, 0.8, _SMALL_MIXTURE, 12, experts=(32, 4)),
        MixedShape("qwen3-moe-tiny", "qwen3_moe", 4096, 8192, 8.0, _TINY_MIXTURE, 4, experts=(8, 2)),
    )
}  # fmt: skip
"""Shapes by the sizes of published ones; the mixture with three layers of 48, and a fifth of its vocabulary."""
