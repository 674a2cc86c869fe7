"""One small random model with a tokenizer and adapters, its requests, and what transformers answers to them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import torch

from asyncengine.async_engine import AsyncEngine
from asyncengine.grammar import Grammar

from .compare import Ask, compare
from .engines import (
    CASES,
    DEVICE,
    LENGTHS,
    SEED,
    WANT,
    generating,
    graphs_of,
    prompts,
    scores,
    small_engine,
)  # fmt: skip
from .families import TEXT_VOCAB, make_adapter, make_checkpoint, text_config
from .reference import Reference

PLAIN = {"cuda_graphs": False, "max_steps_in_flight": 1}
WAYS: dict[str, dict[str, Any]] = CASES["settings"]
PATTERN = r"[A-Z]{3}-[0-9]{4}(, [a-z]{2,6}){3}"
GRAMMARS: dict[str, Callable[[], Any]] = {
    "pattern": lambda: Grammar.regex(PATTERN),
    "JSON schema": lambda: Grammar.json_schema(CASES["schema"]),
}
ADAPTERS = 3
Output = list[int]


class Bench:
    """A model on disk, its adapters, the requests, and what transformers answers."""

    def __init__(self, folder: Path) -> None:
        self.folder = make_checkpoint(text_config(), folder / "model", torch.bfloat16, SEED, tokenizer=True)
        self.adapters = {
            f"a{index}": make_adapter(self.folder, folder / f"a{index}", SEED + index) for index in range(ADAPTERS)
        }
        self.reference = Reference(self.folder, torch.bfloat16, torch.device(DEVICE), self.adapters)
        made = prompts(LENGTHS, TEXT_VOCAB, SEED)
        self.plain = [Ask(tuple(prompt), WANT) for prompt in made]
        self.adapted = [
            Ask(tuple(prompt), WANT, f"a{index % (ADAPTERS + 1)}" if index % (ADAPTERS + 1) < ADAPTERS else None)
            for index, prompt in enumerate(made)
        ]  # each adapter, and none, in one batch
        self.constrained = [Ask(tuple(prompt), 60, grammar=make()) for prompt in made[:3] for make in GRAMMARS.values()]

    @property
    def kinds(self) -> dict[str, list[Ask]]:
        return {
            "plain": self.plain,
            "with adapters": self.adapted,
            "with grammars": [*self.plain[:4], *self.constrained, *self.adapted[:3]],
        }

    def _engine(self, way: dict[str, Any]) -> AbstractAsyncContextManager[AsyncEngine]:
        return small_engine(self.folder, dtype="bfloat16", adapters=self.adapters, max_lora_rank=16, **way)

    async def answers(self, way: dict[str, Any], asks: Sequence[Ask]) -> list[Output]:
        async with self._engine(way) as engine:
            return await generating(engine)(asks)

    async def held_against(self, way: dict[str, Any], asks: Sequence[Ask], expected: Sequence[Output]) -> None:
        """Raises `AssertionError` for an output that is another than `expected` by more than rounding."""
        async with self._engine(way) as engine:
            if way["cuda_graphs"]:
                assert graphs_of(engine) is not None, "no CUDA graphs on this attention backend"
            (await compare(generating(engine), asks, expected, self.reference.gap)).verdict()
            if way is PLAIN:
                await scores(engine, asks, self.reference)

    def transformers(self, asks: Sequence[Ask]) -> list[Output]:
        outputs: list[Output] = [[] for _ in asks]
        for name in sorted({ask.adapter for ask in asks}, key=str):
            places = [place for place, ask in enumerate(asks) if ask.adapter == name]
            found = self.reference.generate([asks[place].prompt for place in places], WANT, name)
            for place, tokens in zip(places, found, strict=True):
                outputs[place] = tokens
        return outputs


def check_constrained(folder: Path, asks: Sequence[Ask], outputs: Sequence[Output]) -> None:
    """Whatever was asked for is what the text is. Raises `AssertionError` for the first that is not."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    for ask, tokens in zip(asks, outputs, strict=True):
        if ask.grammar is None:
            continue
        text = tokenizer.decode(tokens, skip_special_tokens=True)
        assert _fits(ask.grammar, text), f"the output {text!r} does not fit its grammar"


def _fits(grammar: Any, text: str) -> bool:
    if grammar == Grammar.regex(PATTERN):
        return re.fullmatch(PATTERN, text) is not None
    try:
        value = json.loads(text)
    except ValueError:
        return False
    return set(value) == {"name", "ages"} and 2 <= len(value["ages"]) <= 4
