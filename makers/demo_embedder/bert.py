"""The embedder while it is trained: transformers' own BERT, mean pooling and length one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional

MAX_TOKENS = 512
PROMPTS = {"query": "query: ", "document": "document: "}
"""Prefixes of texts, as E5 has it (Wang et al. 2022)."""


def new_model(vocabulary: int, seed: int) -> Any:
    """MiniLM's architecture, a third as wide and half as deep."""
    from transformers import BertConfig, BertModel

    torch.manual_seed(seed)
    config = BertConfig(
        vocab_size=vocabulary,
        hidden_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=384,
        max_position_embeddings=MAX_TOKENS,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        pad_token_id=0,
    )
    return BertModel(config, add_pooling_layer=False)


def padded(rows: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Token ids and where they stand, ``[rows, longest]`` each."""
    longest = max(len(row) for row in rows)
    ids = torch.zeros(len(rows), longest, dtype=torch.long)
    mask = torch.zeros(len(rows), longest, dtype=torch.long)
    for index, row in enumerate(rows):
        ids[index, : len(row)] = torch.tensor(row)
        mask[index, : len(row)] = 1
    return ids, mask


def vectors(model: Any, rows: Sequence[Sequence[int]], offset: int = 0, chunk: int = 64) -> Tensor:
    """The texts' vectors before they are normalized, ``[rows, hidden]``, float32.

    Texts of similar length are computed together. `offset` shifts all positions: what is learned on short texts is
    then known of every position.
    """
    order = sorted(range(len(rows)), key=lambda index: len(rows[index]))
    parts = []
    for start in range(0, len(order), chunk):
        ids, mask = padded([rows[index] for index in order[start : start + chunk]])
        positions = torch.arange(ids.shape[1])[None] + min(offset, MAX_TOKENS - ids.shape[1])
        hidden = model(input_ids=ids, attention_mask=mask, position_ids=positions).last_hidden_state.float()
        kept = mask[:, :, None].float()
        parts.append((hidden * kept).sum(1) / kept.sum(1))
    back = torch.empty(len(order), dtype=torch.long)
    back[torch.tensor(order)] = torch.arange(len(order))
    return torch.cat(parts)[back]


class Served:
    """The exported folder, as transformers loads it: what the tests and the measurements ask."""

    def __init__(self, folder: Path) -> None:
        from transformers import BertModel

        self.model: Any = BertModel.from_pretrained(folder, add_pooling_layer=False, dtype=torch.float32).eval()
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.tokenizer.enable_truncation(MAX_TOKENS)

    @torch.inference_mode()
    def __call__(self, texts: Sequence[str], prompt: str = "") -> Tensor:
        """Vectors of length one, ``[texts, hidden]``."""
        rows = [encoding.ids for encoding in self.tokenizer.encode_batch([prompt + text for text in texts])]
        return functional.normalize(vectors(self.model, rows), dim=-1)
