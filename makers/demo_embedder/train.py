"""Trains the demo embedder: ``python -m makers.demo_embedder.train``.

A batch's texts are every query's possible answers, and the right one has to be the nearest (multiple negatives;
Henderson et al. 2017), also by the first 64 and 32 of the 128 numbers (Kusupati et al. 2022). Twenty minutes of one
CPU core; a budget in steps makes a run repeatable.
"""

from __future__ import annotations

import argparse
import random
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional

from asyncengine.demo import EMBEDDER_PATH
from makers.demo_embedder.bert import MAX_TOKENS, PROMPTS, Served, new_model, vectors
from makers.demo_embedder.descent import Descent, run
from makers.demo_embedder.export import export
from makers.demo_embedder.pairs import Pair, batch, stream

DIMENSIONS = (128, 64, 32)


@dataclass
class Options:
    """Everything that shapes a run."""

    minutes: float = 20.0
    steps: int = 0
    seed: int = 0
    pairs: int = 256
    matrix_rate: float = 0.02
    other_rate: float = 0.004
    warmup: int = 30
    decay_from: float = 0.5
    scale: float = 20.0
    start: Path | None = None
    output: Path = EMBEDDER_PATH


class Trainer:
    """Model, optimizers and the source of pairs."""

    def __init__(self, options: Options, tokenizer: Tokenizer) -> None:
        self.options, self.tokenizer = options, tokenizer
        self.model = new_model(tokenizer.get_vocab_size(), options.seed)
        if options.start is not None:
            self.model.load_state_dict(Served(options.start).model.state_dict())
        self.descent = Descent(self.model, options)
        self.groups, self.rng = stream(options.seed), random.Random(f"embedder/{options.seed}")
        self.step = 0

    def update(self, done: float) -> float:
        """One step at `done` of the budget; the loss."""
        found = self.descent.step(self.loss(batch(self.groups, self.options.pairs)), self.step, done)
        self.step += 1
        return found

    def loss(self, pairs: list[Pair]) -> Tensor:
        """Both ways, over all dimensions."""
        prompted = self.rng.random() < 0.5
        offset = 0 if self.rng.random() < 0.5 else self.rng.randrange(MAX_TOKENS)
        queries = [_prompted("document" if p.symmetric else "query", p.query, prompted) for p in pairs]
        texts = [_prompted("document", p.text, prompted) for p in pairs]
        left, right = (vectors(self.model, self._encode(side), offset) for side in (queries, texts))
        losses = []
        for size in DIMENSIONS:
            near = functional.normalize(left[:, :size], dim=-1) @ functional.normalize(right[:, :size], dim=-1).T
            target = torch.arange(len(pairs))
            scores = self.options.scale * near
            losses += [functional.cross_entropy(scores, target), 0.5 * functional.cross_entropy(scores.T, target)]
        return torch.stack(losses).sum() / (1.5 * len(DIMENSIONS))

    def _encode(self, texts: list[str]) -> list[list[int]]:
        return [encoding.ids[:MAX_TOKENS] for encoding in self.tokenizer.encode_batch(texts)]


def _prompted(name: str, text: str, prompted: bool) -> str:
    return PROMPTS[name] + text if prompted else text


def parse() -> Options:
    default = Options()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=default.minutes)
    parser.add_argument("--steps", type=int, default=0, help="budget in steps instead of minutes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--matrix-rate", type=float, default=default.matrix_rate, help="peak learning rate of Muon")
    parser.add_argument("--other-rate", type=float, default=default.other_rate, help="peak learning rate of AdamW")
    parser.add_argument("--start", type=Path, help="a folder whose weights to go on from")
    parser.add_argument("--decay-from", type=float, default=default.decay_from, help="part of the budget without decay")
    parser.add_argument("--output", type=Path, default=default.output, help="where the finished model is exported")
    return Options(**vars(parser.parse_args()))


def main() -> None:
    options = parse()
    tokenizer = Tokenizer.from_file(str(EMBEDDER_PATH / "tokenizer.json"))
    trainer = Trainer(options, tokenizer)
    run(trainer)
    export(trainer.model, options.output)


if __name__ == "__main__":
    main()
