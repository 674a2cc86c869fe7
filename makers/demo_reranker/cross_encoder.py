"""The reranker while it is trained: transformers' own BERT with a head of one number, which reads query and text."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from asyncengine.demo import EMBEDDER_PATH, RERANKER_PATH
from makers.demo_embedder.bert import MAX_TOKENS
from makers.demo_embedder.export import write_json, write_weights

INTERMEDIATE = 176
"""Width between the two products of a layer: less than the embedder's, so that the folder stays below 2 MB."""
KEPT = (
    "architectures", "dtype", "hidden_act", "hidden_size", "id2label", "intermediate_size", "label2id",
    "layer_norm_eps", "max_position_embeddings", "model_type", "num_attention_heads", "num_hidden_layers",
    "pad_token_id", "type_vocab_size", "vocab_size",
)  # fmt: skip
Read = tuple[list[int], list[int]]
"""Token ids of a query and a text, and for each token which of the two it belongs to (0, 1)."""


def new_model(seed: int) -> Any:
    """The embedder with a narrower middle of each layer and a head, which are still to be learned."""
    from transformers import BertConfig, BertForSequenceClassification, BertModel

    torch.manual_seed(seed)
    config = BertConfig.from_pretrained(
        EMBEDDER_PATH, intermediate_size=INTERMEDIATE, id2label={0: "score"}, label2id={"score": 0}
    )
    model = BertForSequenceClassification(config)
    source = BertModel.from_pretrained(EMBEDDER_PATH, add_pooling_layer=False, dtype=torch.float32).state_dict()
    own = model.bert.state_dict()
    for name, tensor in source.items():  # of the middle its first neurons: as good as any
        own[name] = tensor[tuple(slice(0, size) for size in own[name].shape)].clone()
    own["embeddings.token_type_embeddings.weight"][1] = own["embeddings.token_type_embeddings.weight"][0]
    own["embeddings.token_type_embeddings.weight"][1] += 0.02 * torch.randn(config.hidden_size)
    model.bert.load_state_dict(own)
    return model


def read(tokenizer: Tokenizer, pairs: Sequence[tuple[str, str]]) -> list[Read]:
    return [(encoding.ids[:MAX_TOKENS], encoding.type_ids[:MAX_TOKENS]) for encoding in tokenizer.encode_batch(pairs)]


def scores(model: Any, rows: Sequence[Read], offset: int = 0, chunk: int = 64) -> Tensor:
    """The pairs' scores before the sigmoid, ``[rows]``, float32. Pairs of similar length are computed together.

    `offset` shifts all positions: what is learned on short texts is then known of every position.
    """
    order = sorted(range(len(rows)), key=lambda index: len(rows[index][0]))
    parts = []
    for start in range(0, len(order), chunk):
        some = [rows[index] for index in order[start : start + chunk]]
        longest = max(len(ids) for ids, _ in some)
        padded = torch.zeros(3, len(some), longest, dtype=torch.long)
        for index, (ids, kinds) in enumerate(some):
            padded[:, index, : len(ids)] = torch.tensor([ids, kinds, [1] * len(ids)])
        positions = torch.arange(longest)[None] + min(offset, MAX_TOKENS - longest)
        made = model(input_ids=padded[0], token_type_ids=padded[1], attention_mask=padded[2], position_ids=positions)
        parts.append(made.logits[:, 0].float())
    back = torch.empty(len(order), dtype=torch.long)
    back[torch.tensor(order)] = torch.arange(len(order))
    return torch.cat(parts)[back]


def export(model: Any, folder: Path = RERANKER_PATH) -> None:
    """Write weights in bfloat16, the configuration, and the embedder's tokenizer."""
    write_weights(model, folder)
    config = {**model.config.to_dict(), "architectures": ["BertForSequenceClassification"], "dtype": "bfloat16"}
    write_json(folder / "config.json", {name: config[name] for name in KEPT})
    tokenizer = json.loads((EMBEDDER_PATH / "tokenizer.json").read_text(encoding="utf-8"))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer, separators=(",", ":")), encoding="utf-8")
    shutil.copy(EMBEDDER_PATH / "tokenizer_config.json", folder)


class Served:
    """The exported folder, as transformers loads it: the reference of tests and measurements."""

    def __init__(self, folder: Path) -> None:
        from transformers import BertForSequenceClassification

        self.model: Any = BertForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))

    @torch.inference_mode()
    def __call__(self, query: str, texts: Sequence[str]) -> Tensor:
        """Scores from 0 to 1, ``[texts]``."""
        return torch.sigmoid(scores(self.model, read(self.tokenizer, [(query, text) for text in texts])))
