"""Training batches: conversations as tokens with loss weights, packed in rows, plus rows of pure recall.

A batch depends only on the seed and the step number, so a resumed run continues with the data that it would have
seen anyway.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from makers.demo_model.conversations import stream
from makers.demo_model.dialogue import Conversation

PROMPT_WEIGHT = 0.03
"""Loss weight of tokens that the model never writes; they still teach the language of the prompts."""
FIRST_PLAIN_ID = 3
LAST_PLAIN_ID = 2039


@dataclass(frozen=True)
class Batch:
    """Rows of tokens; ``weights`` and ``targets`` belong to the next token of every position."""

    inputs: Tensor
    targets: Tensor
    weights: Tensor
    documents: Tensor


@dataclass
class Row:
    """A row under construction."""

    ids: list[int]
    weights: list[float]
    documents: list[int]

    def append(self, ids: list[int], weights: list[float]) -> None:
        number = self.documents[-1] + 1 if self.documents else 0
        self.ids += ids
        self.weights += weights
        self.documents += [number] * len(ids)


class Encoder:
    """Turns conversations into tokens through the very chat template that serves the model."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.pad = int(tokenizer.convert_tokens_to_ids("<|endoftext|>"))
        self.end = int(tokenizer.convert_tokens_to_ids("<|im_end|>"))
        self.header = tokenizer.encode("<|im_start|>assistant\n", add_special_tokens=False)

    def conversation(self, item: Conversation) -> tuple[list[int], list[float]]:
        """Tokens and the loss weight of each: 1 for what the assistant writes, its end of turn included."""
        text = self.tokenizer.apply_chat_template(item.messages, tools=item.tools, tokenize=False)
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        weights = [PROMPT_WEIGHT] * len(ids)
        size, index = len(self.header), 0
        while index < len(ids):
            if ids[index : index + size] != self.header:
                index += 1
                continue
            weights[index : index + size] = [0.0] * size
            index += size
            while index < len(ids):
                weights[index] = 1.0
                index += 1
                if ids[index - 1] == self.end:
                    break
        weights[0] = 0.0
        return ids, weights

    def batch(self, seed: int, step: int, rows: int, length: int, recall: float) -> Batch:
        """A packed batch of which about the share ``recall`` is recall practice."""
        rng = random.Random(f"batch/{seed}/{step}")
        packed = [Row([], [], []) for _ in range(rows)]
        source = stream(rng.getrandbits(48), long=0.0 if length <= 512 else 0.5 if length <= 1024 else 0.9)
        misses = 0
        while misses < 6:
            ids, weights = recall_practice(rng, length) if rng.random() < recall else self.conversation(next(source))
            row = next((row for row in packed if len(row.ids) + len(ids) <= length + 1), None)
            if row is None:
                misses += 1
                continue
            row.append(ids, weights)
        return self._tensors(packed, length)

    def _tensors(self, packed: list[Row], length: int) -> Batch:
        for row in packed:
            missing = length + 1 - len(row.ids)
            row.append([self.pad] * missing, [0.0] * missing)
        ids = torch.tensor([row.ids for row in packed])
        weights = torch.tensor([row.weights for row in packed])
        documents = torch.tensor([row.documents for row in packed])
        return Batch(
            ids[:, :-1].contiguous(),
            ids[:, 1:].contiguous(),
            weights[:, 1:].contiguous(),
            documents[:, :-1].contiguous(),
        )


def recall_practice(rng: random.Random, length: int) -> tuple[list[int], list[float]]:
    """Random tokens that only looking back can predict, which forms induction heads (Olsson et al. 2022)."""
    if rng.random() < 0.5:
        span = [rng.randint(FIRST_PLAIN_ID, LAST_PLAIN_ID) for _ in range(rng.randint(6, 50))]
        ids, weights = list(span), [0.0] * len(span)
        for _ in range(rng.randint(1, 3)):
            start = rng.randrange(len(span) // 2)
            part = span[start : start + rng.randint(4, len(span))]
            gap = [rng.randint(FIRST_PLAIN_ID, LAST_PLAIN_ID) for _ in range(rng.randint(0, 4))]
            ids += gap + part
            weights += [0.0] * (len(gap) + 1) + [1.0] * (len(part) - 1)
        return ids[: length + 1], weights[: length + 1]
    keys = rng.sample(range(FIRST_PLAIN_ID, LAST_PLAIN_ID), rng.randint(3, 16))
    mark, stop = rng.randint(FIRST_PLAIN_ID, LAST_PLAIN_ID), rng.randint(FIRST_PLAIN_ID, LAST_PLAIN_ID)
    table = {key: [rng.randint(FIRST_PLAIN_ID, LAST_PLAIN_ID) for _ in range(rng.randint(1, 4))] for key in keys}
    ids, weights = [], []
    for turn in range(2):
        for key in keys:
            ids += [key, mark, *table[key], stop]
            weights += [0.0, 0.0, *[float(turn)] * (len(table[key]) + 1)]
        rng.shuffle(keys)
    return ids[: length + 1], weights[: length + 1]
