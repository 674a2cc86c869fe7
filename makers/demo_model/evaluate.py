"""Held-out success rates of the demo model: ``python -m makers.demo_model.evaluate``.

Every prompt is built from values (names, numbers, words, strings) that training never uses, in phrasings of the kind
it does use; ``--new-phrasings`` asks every question in the one way of each set that was kept from training, which is
much harder for a model this small.  The model answers greedily, and an answer counts only when it meets what the
generator expects: calls and JSON must be equal by value, answers must contain the facts.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from asyncengine.demo import MODEL_PATH
from makers.demo_model.conversations import MAKERS, make
from makers.demo_model.dialogue import Conversation

GOALS = {
    "passage": 0.9,
    "rag": 0.9,
    "call": 0.9,
    "tool_result": 0.9,
    "agent": 0.9,
    "no_fit": 0.9,
    "no_call": 0.9,
    "extract": 0.9,
    "structured": 0.9,
    "chat": 0.9,
    "persona": 0.9,
    "memory": 0.9,
}
"""Shares of right answers that --check demands of each skill."""
CALL_TAGS = ("integer", "negative", "name", "non-ascii", "no-argument")
Answer = Callable[[list[Conversation]], list[str]]


@dataclass
class Score:
    """Successes of one skill or one part of it."""

    passed: int = 0
    total: int = 0

    def add(self, success: bool) -> None:
        self.passed += success
        self.total += 1

    @property
    def rate(self) -> float:
        return self.passed / self.total if self.total else 0.0


class Model:
    """A model folder, loaded once, answering batches greedily."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self.tokenizer.padding_side = "left"
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def prompt(self, item: Conversation) -> str:
        text = self.tokenizer.apply_chat_template(
            item.prompt, tools=item.tools, tokenize=False, add_generation_prompt=True
        )
        return str(text)

    @torch.inference_mode()
    def answer(self, items: list[Conversation], most: int = 200) -> list[str]:
        batch = self.tokenizer(
            [self.prompt(item) for item in items], return_tensors="pt", padding=True, add_special_tokens=False
        )
        out = self.model.generate(**batch, max_new_tokens=most, do_sample=False)
        new = out[:, batch["input_ids"].shape[1] :]
        texts = self.tokenizer.batch_decode(new, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return [str(text) for text in texts]


def held_out(skill: str, count: int, seed: int, long: bool = False, new_phrasings: bool = False) -> list[Conversation]:
    """The held-out conversations of a skill."""
    numbers = range(seed * 1_000_000, seed * 1_000_000 + count)
    return [make(skill, number, True, long, new_phrasings) for number in numbers]


def evaluate(
    answer: Answer, skills: Iterable[str], count: int, seed: int, long: bool = False, new_phrasings: bool = False
) -> tuple[dict[str, Score], list[tuple[Conversation, str]]]:
    """Scores by skill (and by part of the call skill), and the failures."""
    scores: dict[str, Score] = {}
    failures: list[tuple[Conversation, str]] = []
    for skill in skills:
        items = sorted(
            held_out(skill, count, seed, long, new_phrasings),
            key=lambda item: len(str(item.messages)) + len(str(item.tools)),
        )
        for start in range(0, len(items), 25):
            group = items[start : start + 25]
            for item, text in zip(group, answer(group), strict=True):
                success = item.expected.met_by(text)
                parts = [f"call: {tag}" for tag in item.tags if tag in CALL_TAGS] if skill == "call" else []
                parts += [f"chat: {tag}" for tag in item.tags] if skill == "chat" else []
                for name in (skill, *parts):
                    scores.setdefault(name, Score()).add(success)
                if not success:
                    failures.append((item, text))
    return scores, failures


def show(scores: dict[str, Score]) -> None:
    table = Table("skill", "passed", "of", "rate", "goal")
    for name, score in scores.items():
        goal = GOALS.get(name.split(":")[0])
        table.add_row(name, str(score.passed), str(score.total), f"{score.rate:.1%}", f"{goal:.0%}" if goal else "")
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=MODEL_PATH)
    parser.add_argument("--skills", nargs="*", default=list(MAKERS), choices=list(MAKERS))
    parser.add_argument("--count", type=int, default=100, help="conversations of each skill")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--long", action="store_true", help="long passages and many tools")
    parser.add_argument("--new-phrasings", action="store_true", help="questions asked in ways never trained on")
    parser.add_argument("--failures", type=int, default=0, help="print so many failures of each skill")
    parser.add_argument("--json", action="store_true", help="print the scores as JSON")
    parser.add_argument("--check", action="store_true", help="exit with 1 when a skill is below its goal")
    arguments = parser.parse_args()
    model, options = Model(arguments.model), (arguments.long, arguments.new_phrasings)
    scores, failures = evaluate(model.answer, arguments.skills, arguments.count, arguments.seed, *options)
    if arguments.json:
        print(
            json.dumps(
                {
                    name: {"passed": score.passed, "total": score.total, "rate": round(score.rate, 4)}
                    for name, score in scores.items()
                },
                indent=2,
            )
        )
    else:
        show(scores)
    for skill in arguments.skills:
        for item, text in [pair for pair in failures if pair[0].skill == skill][: arguments.failures]:
            print(f"--- {skill}: {item.prompt[-1]['content']}\n    expected {item.expected.value}\n    answered {text}")
    if arguments.check and any(scores[skill].rate < GOALS[skill] for skill in arguments.skills):
        sys.exit(1)


if __name__ == "__main__":
    main()
