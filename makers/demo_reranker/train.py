"""Trains the demo reranker: ``python -m makers.demo_reranker.train``.

Of a query's candidates the right one has to score highest (listwise softmax; Cao et al. 2007), and every score has to
say whether its text answers (binary cross-entropy), so that scores of different queries can be compared. Some minutes
of one CPU core; a budget in steps makes a run repeatable.
"""

from __future__ import annotations

import argparse
import random
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn import functional

from asyncengine.demo import EMBEDDER_PATH, RERANKER_PATH
from makers.demo_embedder.bert import MAX_TOKENS
from makers.demo_embedder.bert import Served as Embedder
from makers.demo_embedder.descent import Descent, run
from makers.demo_embedder.pairs import stream
from makers.demo_reranker.candidates import PER_QUERY, candidates
from makers.demo_reranker.cross_encoder import export, new_model, read, scores


@dataclass
class Options:
    """Settings of a run."""

    minutes: float = 10.0
    steps: int = 0
    seed: int = 0
    queries: int = 20
    pool: int = 60
    matrix_rate: float = 0.02
    other_rate: float = 0.003
    warmup: int = 20
    decay_from: float = 0.4
    output: Path = RERANKER_PATH


class Trainer:
    """Model, optimizers and the source of candidates."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.embedder = Embedder(EMBEDDER_PATH)
        self.model = new_model(options.seed)
        self.descent = Descent(self.model, options, beside=("embeddings", "classifier"))
        self.groups, self.rng = stream(f"reranker/{options.seed}"), random.Random(f"reranker/{options.seed}")
        self.step = 0

    def update(self, done: float) -> float:
        """Do one step at `done` of the budget; the loss."""
        options = self.options
        listed = candidates(self.groups, self.embedder, self.rng, options.queries, options.pool)
        rows = read(self.embedder.tokenizer, [(query, text) for query, texts in listed for text in texts])
        offset = 0 if self.rng.random() < 0.5 else self.rng.randrange(MAX_TOKENS)
        found = scores(self.model, rows, offset).view(len(listed), PER_QUERY)
        answers = torch.zeros_like(found)
        answers[:, 0] = 1.0
        loss = functional.cross_entropy(found, torch.zeros(len(listed), dtype=torch.long))
        loss = loss + functional.binary_cross_entropy_with_logits(found, answers)
        value = self.descent.step(loss, self.step, done)
        self.step += 1
        return value


def parse() -> Options:
    default = Options()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=default.minutes)
    parser.add_argument("--steps", type=int, default=0, help="budget in steps instead of minutes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--matrix-rate", type=float, default=default.matrix_rate, help="peak learning rate of Muon")
    parser.add_argument("--other-rate", type=float, default=default.other_rate, help="peak learning rate of AdamW")
    parser.add_argument("--output", type=Path, default=default.output, help="where the finished model is exported")
    return Options(**vars(parser.parse_args()))


def main() -> None:
    options = parse()
    trainer = Trainer(options)
    run(trainer)
    export(trainer.model, options.output)


if __name__ == "__main__":
    main()
