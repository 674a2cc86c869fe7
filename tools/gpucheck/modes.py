"""Ways of running that must not change an answer: CUDA graphs, overlap, adapters in the batch, grammars in the batch.

One small random model with a tokenizer. All requests run together; the plain way (no graphs, one step in flight) is
held against transformers, and every other way against the plain one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from asyncengine.grammar import Grammar
from tools.gpucheck.compare import Ask, compare
from tools.gpucheck.families import TEXT_VOCAB, make_adapter, make_checkpoint, text_config
from tools.gpucheck.greedy import LENGTHS, generating, prompts, scores, small_engine
from tools.gpucheck.reference import Reference
from tools.gpucheck.report import CheckFailed, Skipped
from tools.gpucheck.session import Session

PLAIN = {"cuda_graphs": False, "max_steps_in_flight": 1}
WAYS: dict[str, dict[str, Any]] = {
    "graphs": {"cuda_graphs": True, "max_steps_in_flight": 1},
    "overlap": {"cuda_graphs": False, "max_steps_in_flight": 2},
    "graphs and overlap": {"cuda_graphs": True, "max_steps_in_flight": 2},
    "graphs, overlap and preemption": {"cuda_graphs": True, "max_steps_in_flight": 2, "preempt_every": 7},
}
PATTERN = r"[A-Z]{3}-[0-9]{4}(, [a-z]{2,6}){3}"
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["Ida", "Noor", "Tomasz"]}, "ages": {"type": "array", "items": {"type": "boolean"},
                                                                          "minItems": 2, "maxItems": 4}},
    "required": ["name", "ages"], "additionalProperties": False,
}  # fmt: skip
GRAMMARS: dict[str, Callable[[], Any]] = {
    "pattern": lambda: Grammar.regex(PATTERN),
    "JSON schema": lambda: Grammar.json_schema(SCHEMA),
}
ADAPTERS = 3
Output = list[int]


class Bench:
    """A model on disk, its adapters, the requests, and what transformers answers."""

    def __init__(self, session: Session) -> None:
        seed = session.settings.seed
        self.settings = session.settings
        self.folder = make_checkpoint(
            text_config(), session.folder / "modes", torch.bfloat16, seed, tokenizer=True
        )  # fmt: skip
        self.adapters = {
            f"a{index}": make_adapter(self.folder, session.folder / f"modes-a{index}", seed + index)
            for index in range(ADAPTERS)
        }
        self.reference = Reference(self.folder, torch.bfloat16, session.device, self.adapters)
        self.want = 24 if session.settings.quick else 48
        made = prompts(LENGTHS, TEXT_VOCAB, seed)
        self.plain = [Ask(tuple(prompt), self.want) for prompt in made]
        self.adapted = [
            Ask(tuple(prompt), self.want, f"a{index % (ADAPTERS + 1)}" if index % (ADAPTERS + 1) < ADAPTERS else None)
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

    async def answers(self, way: dict[str, Any], asks: Sequence[Ask]) -> list[Output]:
        async with small_engine(
            self.settings, self.folder, dtype="bfloat16", adapters=self.adapters, max_lora_rank=16, **way
        ) as engine:
            return await generating(engine)(asks)

    async def held_against(self, way: dict[str, Any], asks: Sequence[Ask], expected: Sequence[Output]) -> str:
        async with small_engine(
            self.settings, self.folder, dtype="bfloat16", adapters=self.adapters, max_lora_rank=16, **way
        ) as engine:
            if way["cuda_graphs"]:
                require_graphs(engine)
            found = (await compare(generating(engine), asks, expected, self.reference.gap)).verdict()
            if way is PLAIN:
                found += f", {await scores(engine, asks, self.reference)}"
        return found

    def transformers(self, asks: Sequence[Ask]) -> list[Output]:
        outputs: list[Output] = [[] for _ in asks]
        for name in sorted({ask.adapter for ask in asks}, key=str):
            places = [place for place, ask in enumerate(asks) if ask.adapter == name]
            found = self.reference.generate([asks[place].prompt for place in places], self.want, name)
            for place, tokens in zip(places, found, strict=True):
                outputs[place] = tokens
        return outputs


def run(session: Session) -> None:
    bench = Bench(session)
    for kind in ("plain", "with adapters"):
        asks = bench.kinds[kind]
        expected = bench.transformers(asks)
        session.check(f"{kind}, against transformers", partial(bench.held_against, PLAIN, asks, expected))
    for kind, asks in bench.kinds.items():
        base: list[Output] = []
        if not session.check(f"{kind}, the plain way", partial(_plain_way, bench, kind, asks, base)):
            continue
        for name, way in WAYS.items():
            session.check(f"{kind}, {name} on against off", partial(bench.held_against, way, asks, base))


async def _plain_way(bench: Bench, kind: str, asks: Sequence[Ask], into: list[Output]) -> str:
    into += await bench.answers(PLAIN, asks)
    return check_constrained(bench.folder, asks, into) if kind == "with grammars" else f"{len(into)} outputs"


def require_graphs(engine: Any) -> None:
    """Raises `Skipped` unless the engine has captured CUDA graphs: the torch backend cannot."""
    if graphs_of(engine) is None:
        raise Skipped("no CUDA graphs on this attention backend")


def graphs_of(engine: Any) -> Any:
    """The runner's graphs, or None."""
    return getattr(engine.core.loop.runner.executor, "graphs", None)


def check_constrained(folder: Path, asks: Sequence[Ask], outputs: Sequence[Output]) -> str:
    """Whatever was asked for is what the text is. Raises `CheckFailed` for the first that is not."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    count = 0
    for ask, tokens in zip(asks, outputs, strict=True):
        if ask.grammar is None:
            continue
        text = tokenizer.decode(tokens, skip_special_tokens=True)
        if not _fits(ask.grammar, text):
            raise CheckFailed(f"the output {text!r} does not fit its grammar")
        count += 1
    return f"{count} of {len(outputs)} outputs constrained, all fit"


def _fits(grammar: Any, text: str) -> bool:
    if grammar == Grammar.regex(PATTERN):
        return re.fullmatch(PATTERN, text) is not None
    try:
        value = json.loads(text)
    except ValueError:
        return False
    return set(value) == {"name", "ages"} and 2 <= len(value["ages"]) <= 4
