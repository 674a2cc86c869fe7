"""Trains the demo model that reads pictures: ``python -m makers.demo_vision.train``.

First the tower: each of a picture's nine tokens has to be near the words for what is in its ninth of the picture. Then
the language model answers questions about pictures that the tower has encoded once and for all. Learning both together,
or by a head that has nothing to do with words, it takes many times as long until any answer looks at the picture. One
core; a budget in steps makes a run repeatable.
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

from asyncengine.demo import VISION_PATH
from makers.demo_embedder.descent import Descent, run
from makers.demo_vision.build_tokenizer import END, NOTHING
from makers.demo_vision.conversations import Conversation, conversation
from makers.demo_vision.idefics import PAD, PLACED, export, features, hidden_states, new_model, pixels
from makers.demo_vision.scenes import CELLS, COLORS, KINDS, Scene, draw, scene

IGNORED = -100


@dataclass
class Options:
    """Settings of a run."""

    minutes: float = 25.0
    steps: int = 0
    seed: int = 0
    pictures: int = 48
    """In a step of the tower."""
    conversations: int = 32
    """In a step of the language model."""
    matrix_rate: float = 0.02
    other_rate: float = 0.004
    warmup: int = 20
    tower_steps: int = 600
    """Steps of the tower, before those of the language model."""
    known: int = 6000
    """Pictures that the language model is shown."""
    decay_from: float = 0.6
    start: Path | None = None
    output: Path = VISION_PATH


class Trainer:
    """Model, optimizers and the source of conversations."""

    def __init__(self, options: Options, tokenizer: Tokenizer) -> None:
        self.options, self.tokenizer = options, tokenizer
        self.model = new_model(tokenizer.get_vocab_size(), options.seed)
        if options.start is not None:
            self.model.load_state_dict(type(self.model).from_pretrained(options.start).float().state_dict())
        self.places = torch.nn.Linear(self.model.config.text_config.hidden_size, len(CELLS))
        self.colors = [self._word(f" {color}") for color in COLORS] + [self._word(NOTHING)]
        self.kinds = [self._word(f" {kind}") for kind in KINDS]
        self.descent = self._descent(self.model.model.vision_model, self.model.model.connector)
        self.rng = random.Random(f"vision/{options.seed}")
        self.step = 0
        self._known: dict[Scene, Tensor] = {}

    def update(self, done: float) -> float:
        """Do one step at `done` of the budget; the loss."""
        behind = self.step - self.options.tower_steps
        with torch.autocast("cpu", torch.bfloat16):
            if behind == 0:
                self._known = self._shown()
                self.descent = self._descent(self.model.model.text_model)
            loss = self.tower_loss() if behind < 0 else self.loss()
        found = self.descent.step(loss, behind if behind >= 0 else self.step, done)
        self.step += 1
        return found

    def tower_loss(self) -> Tensor:
        """The loss of naming what is in each ninth of pictures with many shapes: by the words for its color (or
        "Nothing") and for the kind of shape, of which its token has to be near, and by its place."""
        scenes = [scene(self.rng, counts=(3, 4, 5)) for _ in range(self.options.pictures)]
        seen = features(self.model, pixels([draw(each, self.rng) for each in scenes])).flatten(0, 1)
        words = self.model.model.text_model.embed_tokens.weight
        colors, kinds = ((seen @ words[chosen].T).float() for chosen in (self.colors, self.kinds))
        wanted = torch.tensor([cells(each) for each in scenes]).flatten(0, 1)
        places = torch.arange(len(CELLS)).repeat(len(scenes))
        named = functional.cross_entropy(colors, wanted[:, 0])
        named = named + functional.cross_entropy(kinds, wanted[:, 1], ignore_index=IGNORED)
        return named + functional.cross_entropy(self.places(seen).float(), places)

    def loss(self) -> Tensor:
        """The loss of answers."""
        scenes = list(self._known)
        count = self.rng.randint(3, 6)
        drawn = [
            conversation(self.rng, count, PLACED, lambda: self.rng.choice(scenes))
            for _ in range(self.options.conversations)
        ]
        seen = torch.stack([self._known[shown] for each in drawn for shown in each.scenes])
        ids, targets = self._encode(drawn)
        states = hidden_states(self.model, ids, seen)[targets != IGNORED]
        return functional.cross_entropy(self.model.lm_head(states).float(), targets[targets != IGNORED])

    @torch.no_grad()
    def _shown(self) -> dict[Scene, Tensor]:
        """The hidden states of a picture of each of many scenes, ``[TOKENS, hidden]``."""
        found: dict[Scene, Tensor] = {}
        while len(found) < self.options.known:
            scenes = [scene(self.rng) for _ in range(100)]
            seen = features(self.model, pixels([draw(each, self.rng) for each in scenes]))
            found.update(zip(scenes, seen, strict=True))
        return found

    def _descent(self, *parts: torch.nn.Module) -> Descent:
        named = {"places": self.places, "embed": self.model.model.text_model.embed_tokens}
        named |= {f"part{index}": part for index, part in enumerate(parts)}
        return Descent(torch.nn.ModuleDict(named), self.options, beside=("embed", "places"))

    def _word(self, text: str) -> int:
        (token,) = self.tokenizer.encode(text, add_special_tokens=False).ids
        return int(token)

    def _encode(self, drawn: list[Conversation]) -> tuple[Tensor, Tensor]:
        """Token ids, and the next token where it is an answer's, ``[conversations, longest]``."""
        rows = []
        for each in drawn:
            row: list[int] = []
            answered: list[bool] = []
            for role, text in each.turns:
                body = self.tokenizer.encode(f"<|{role}|>{text}{END}", add_special_tokens=False).ids
                row += body
                answered += [False] + [role == "assistant"] * (len(body) - 1)
            rows.append((row, answered))
        longest = max(len(row) for row, _ in rows)
        ids = torch.full((len(rows), longest), PAD)
        targets = torch.full((len(rows), longest), IGNORED)
        for index, (row, answered) in enumerate(rows):
            ids[index, : len(row)] = torch.tensor(row)
            following = [token if used else IGNORED for token, used in zip(row[1:], answered[1:], strict=True)]
            targets[index, : len(following)] = torch.tensor(following)
        return ids, targets


def cells(scene: Scene) -> list[tuple[int, int]]:
    """(color, kind) of each ninth, by their numbers; of an empty one, a color of its own and no kind."""
    found = [(len(COLORS), IGNORED)] * len(CELLS)
    for shape in scene.shapes:
        found[shape.cell] = tuple(COLORS).index(shape.color), KINDS.index(shape.kind)
    return found


def parse() -> Options:
    default = Options()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=default.minutes)
    parser.add_argument("--steps", type=int, default=0, help="budget in steps instead of minutes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pictures", type=int, default=default.pictures, help="in a step of the tower")
    parser.add_argument(
        "--conversations", type=int, default=default.conversations, help="in a step of the language model"
    )
    parser.add_argument("--warmup", type=int, default=default.warmup, help="steps over which rates rise")
    parser.add_argument("--tower-steps", type=int, default=default.tower_steps, help="of the tower, at first")
    parser.add_argument("--matrix-rate", type=float, default=default.matrix_rate, help="peak learning rate of Muon")
    parser.add_argument("--other-rate", type=float, default=default.other_rate, help="peak learning rate of AdamW")
    parser.add_argument("--decay-from", type=float, default=default.decay_from, help="part of the budget without decay")
    parser.add_argument("--start", type=Path, help="a folder whose weights to go on from")
    parser.add_argument("--output", type=Path, default=default.output, help="where the finished model is exported")
    return Options(**vars(parser.parse_args()))


def main() -> None:
    options = parse()
    torch.set_num_threads(1)
    trainer = Trainer(options, Tokenizer.from_file(str(VISION_PATH / "tokenizer.json")))
    run(trainer)
    export(trainer.model, options.output)


if __name__ == "__main__":
    main()
