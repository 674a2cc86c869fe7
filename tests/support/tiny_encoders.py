"""Tiny random encoders of transformers, one for each family: weights large enough that every part of them matters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers as hf

VOCAB = 120
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "pad_token_id": 1, "num_labels": 3,
}  # fmt: skip
_ROTARY = {"rope_type": "default", "rope_theta": 1000.0}
FAMILIES: Mapping[str, Callable[[], Any]] = {
    "bert": lambda: hf.BertConfig(**SIZES, max_position_embeddings=96),
    "roberta": lambda: hf.RobertaConfig(**SIZES, max_position_embeddings=98, type_vocab_size=1),
    "xlm-roberta": lambda: hf.XLMRobertaConfig(**{**SIZES, "pad_token_id": 5}, max_position_embeddings=102),
    "camembert": lambda: hf.CamembertConfig(**SIZES, max_position_embeddings=98, hidden_act="gelu_new"),
    "distilbert": lambda: hf.DistilBertConfig(
        vocab_size=VOCAB, dim=64, hidden_dim=96, n_layers=3, n_heads=4, max_position_embeddings=96, num_labels=3
    ),
    "mpnet": lambda: hf.MPNetConfig(**SIZES, max_position_embeddings=98),
    "modernbert": lambda: hf.ModernBertConfig(
        **{**SIZES, "num_hidden_layers": 4}, max_position_embeddings=96, local_attention=16, classifier_bias=True,
        classifier_pooling="mean", classifier_activation="gelu",
    ),
    "modernbert-first": lambda: hf.ModernBertConfig(
        **SIZES, max_position_embeddings=96, local_attention=8, norm_bias=True, attention_bias=True, mlp_bias=True
    ),
    "nomic_bert": lambda: hf.NomicBertConfig(**SIZES, max_position_embeddings=96, rope_parameters=_ROTARY),
    "gte": lambda: hf.GteConfig(**SIZES, max_position_embeddings=96, rope_parameters=_ROTARY, type_vocab_size=2),
    "gte-ntk": lambda: hf.GteConfig(
        **SIZES, max_position_embeddings=96, type_vocab_size=0,
        rope_parameters={"rope_type": "linear", "rope_theta": 1000.0, "factor": 4.0},
    ),
    "jina_embeddings_v3": lambda: hf.JinaEmbeddingsV3Config(**SIZES, max_position_embeddings=96),
    "eurobert": lambda: hf.EuroBertConfig(
        **SIZES, num_key_value_heads=2, max_position_embeddings=96, rope_parameters=_ROTARY
    ),
    "eurobert-bos": lambda: hf.EuroBertConfig(
        **SIZES, max_position_embeddings=96, rope_parameters=_ROTARY, classifier_pooling="bos"
    ),
    "gemma3_text": lambda: hf.Gemma3TextConfig(
        **{**SIZES, "num_hidden_layers": 4}, num_key_value_heads=2, head_dim=16, max_position_embeddings=96,
        query_pre_attn_scalar=16, sliding_window=16, use_bidirectional_attention=True, eos_token_id=2, bos_token_id=0,
        layer_types=["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
    ),
}  # fmt: skip
"""Configurations by name; before a "-", the family's."""


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
