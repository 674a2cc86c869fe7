"""Guesses that tests plant in an engine, and requests that are asked some at a time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from asyncengine import AsyncEngine
from asyncengine.grammar import Grammar
from asyncengine.speculation.acceptance import NOTHING, Draft, Source

T, Answer = TypeVar("T"), TypeVar("Answer")
ALWAYS: dict[str, Any] = {"speculation_costs": (1.0, 1.0002, 1.0008), "draft_costs": (1e-6,) * 3}
"""Settings with which guesses are always worth their time."""
AGES = {"type": "array", "maxItems": 4, "items": {"type": "integer", "minimum": 0, "maximum": 99}}
NAMED = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 12}, "ages": AGES}}
GRAMMARS = {
    "object": Grammar.json_schema({**NAMED, "required": ["name", "ages"]}),
    "choice": Grammar.choice(["yes, of course", "yes", "no", "no, not at all"]),
    "regex": Grammar.regex(r"[a-z]{3,9}( [a-z]{2,9}){2,5}\."),
    "digits": Grammar.regex(r"(\d{3}-){2}\d{4}"),
}


class Planted:
    """Guesses from the answers of a run without: right most of the time, and wrong in every way otherwise."""

    def __init__(self, answers: Sequence[Sequence[int]], prompt_len: int) -> None:
        self._answers, self._prompt_len = answers, prompt_len
        self._rng = random.Random(prompt_len)

    def propose(self, tokens: Sequence[int], limit: int) -> Draft:
        done = list(tokens[self._prompt_len :])
        rest = next((known[len(done) :] for known in self._answers if list(known[: len(done)]) == done), [])
        guess = [token if self._rng.random() < 0.82 else self._rng.randrange(3, 90) for token in rest[:limit]]
        return Draft(tuple(guess), Source.OWN_TEXT, 3) if guess else NOTHING


def plant(engine: AsyncEngine, answers: Sequence[Sequence[int]]) -> None:
    """Let the engine look up these answers, and nothing else: without any, all guesses are a model's or a head's."""
    planner = engine.core.loop.scheduler.roster.drafts
    assert planner is not None, engine.info.no_speculation
    planner.make = lambda spec, *_: Planted(answers, len(spec.prompt))


async def some_at_a_time(
    asked: Sequence[T], every: int, ask: Callable[[T], Coroutine[Any, Any, Answer]]
) -> list[Answer]:
    """Answers to all that is asked, `every` at a time."""
    found: list[Answer] = []
    for first in range(0, len(asked), every):
        found += await asyncio.gather(*map(ask, asked[first : first + every]))
    return found
