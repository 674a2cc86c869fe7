"""Conversations about pictures, as the model is trained on them."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass

from tools.demo_vision.questions import NO_PICTURE, questions
from tools.demo_vision.scenes import Scene, scene

SYSTEM = ("You are a helpful assistant.", "Answer briefly.", "You answer questions about pictures.")


@dataclass(frozen=True)
class Conversation:
    """Turns of a role and a text each, and the scenes of the pictures that they show."""

    turns: tuple[tuple[str, str], ...]
    scenes: tuple[Scene, ...]


def conversation(rng: random.Random, count: int, picture: str = "<image>") -> Conversation:
    """So many questions. Most are about one picture; some about one, then about another; some about none.

    `picture`: what stands for a picture in a turn's text.
    """
    turns: list[tuple[str, str]] = []
    if rng.random() < 0.1:
        turns.append(("system", rng.choice(SYSTEM)))
    if rng.random() < 0.03:
        for asked in questions(scene(rng), rng, 1):
            turns += [("user", asked.text), ("assistant", NO_PICTURE)]
        return Conversation(tuple(turns), ())
    cuts = [0, count] if rng.random() < 0.8 or count < 2 else [0, rng.randrange(1, count), count]
    scenes = []
    for begin, end in itertools.pairwise(cuts):
        scenes.append(scene(rng))
        for index, asked in enumerate(questions(scenes[-1], rng, end - begin)):
            text = asked.text if rng.random() < 0.9 else asked.text.lower()
            shown = "" if index else picture
            turns += [("user", text + shown if rng.random() < 0.1 else shown + text), ("assistant", asked.answer)]
    return Conversation(tuple(turns), tuple(scenes))
