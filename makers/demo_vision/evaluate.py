"""Held-out answers of the demo model that reads pictures: ``python -m makers.demo_vision.evaluate``.

Questions of every skill about pictures of scenes that training never draws, asked through the engine. An answer is
right where its text is the expected one.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path

from PIL import Image
from rich.console import Console
from rich.table import Table

from asyncengine import Engine, SamplingParams
from asyncengine.demo import VISION_PATH
from makers.demo_vision.questions import MAKERS, Question, question
from makers.demo_vision.scenes import draw, scene

GREEDY = SamplingParams(temperature=0.0, max_tokens=64)


def held_out(skill: str, count: int, seed: int = 7) -> list[tuple[Image.Image, Question]]:
    """So many pictures, and a question about each."""
    rng = random.Random(f"vision/held-out/{skill}/{seed}")
    found: list[tuple[Image.Image, Question]] = []
    while len(found) < count:
        shown = scene(rng, held_out=True)
        asked = question(shown, rng, skill)
        if asked is not None:
            found.append((draw(shown, rng), asked))
    return found


def answer(engine: Engine, picture: Image.Image, text: str) -> str:
    """The answer to a question about a picture."""
    parts = [{"type": "image", "image": picture}, {"type": "text", "text": text}]
    return engine.chat([{"role": "user", "content": parts}], GREEDY).text


def measure(engine: Engine, count: int, seed: int = 7) -> dict[str, list[tuple[Question, str]]]:
    """The wrong answers of each skill, of so many."""
    wrong: dict[str, list[tuple[Question, str]]] = {}
    for skill in MAKERS:
        answers = [(asked, answer(engine, picture, asked.text)) for picture, asked in held_out(skill, count, seed)]
        wrong[skill] = [(asked, text) for asked, text in answers if text != asked.answer]
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=VISION_PATH)
    parser.add_argument("--count", type=int, default=200, help="questions of each skill")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--show", type=int, default=0, help="wrong answers of each skill to print")
    arguments = parser.parse_args()
    with Engine.from_pretrained(arguments.model, num_threads=1, show_progress=False) as engine:
        wrong = measure(engine, arguments.count, arguments.seed)
    table = Table("skill", f"right of {arguments.count}")
    for skill, failures in wrong.items():
        table.add_row(skill, f"{1 - len(failures) / arguments.count:.1%}")
    table.add_row("all", f"{1 - sum(map(len, wrong.values())) / (arguments.count * len(wrong)):.1%}")
    console = Console()
    console.print(table)
    for skill, failures in wrong.items():
        for asked, text in failures[: arguments.show]:
            console.print(f"{skill}: {asked.text} {text} (right: {asked.answer})", highlight=False)


if __name__ == "__main__":
    main()
