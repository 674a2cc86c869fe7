"""Conversations about pictures, as the model is trained on them."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass

from makers.demo_vision.questions import NO_PICTURE, questions
from makers.demo_vision.scenes import Scene, scene

SYSTEM = ("You are a helpful assistant.", "Answer briefly.", "You answer questions about pictures.")


@dataclass(frozen=True)
class Conversation:
    """Turns of a role and a text each, and the scenes of the pictures that they show."""

    turns: tuple[tuple[str, str], ...]
    scenes: tuple[Scene, ...]


def conversation(
    rng: random.Random, count: int, picture: str = "<image>", shown: Callable[[], Scene] | None = None
) -> Conversation:
    """So many questions. Most are about one picture; some about one, then about another; some about none.

    `picture`: what stands for a picture in a turn's text. `shown`: a source of scenes; None: any to be trained on.
    """
    new = shown or (lambda: scene(rng))
    turns: list[tuple[str, str]] = []
    if rng.random() < 0.1:
        turns.append(("system", rng.choice(SYSTEM)))
    if rng.random() < 0.03:
        for asked in questions(new(), rng, 1):
            turns += [("user", asked.text), ("assistant", NO_PICTURE)]
        return Conversation(tuple(turns), ())
    cuts = [0, count] if rng.random() < 0.8 or count < 2 else [0, rng.randrange(1, count), count]
    scenes = []
    for begin, end in itertools.pairwise(cuts):
        scenes.append(new())
        for index, asked in enumerate(questions(scenes[-1], rng, end - begin)):
            text = asked.text if rng.random() < 0.9 else asked.text.lower()
            mark = "" if index else picture
            turns += [("user", text + mark if rng.random() < 0.1 else mark + text), ("assistant", asked.answer)]
    return Conversation(tuple(turns), tuple(scenes))
