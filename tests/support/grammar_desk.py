"""An engine on the fake runner whose grammars are real, over the small vocabulary."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

from support.fake_engine import SteppedExecutor, executor_of, idle, make_engine
from support.grammar_walks import text_of
from support.small_grammars import shared_vocabulary, small_grammar
from support.small_vocabulary import EOS, LOGITS

from asyncengine import AsyncEngine, SamplingParams
from asyncengine.config import EngineConfig
from asyncengine.grammar import Grammar
from asyncengine.grammar.llguidance_backend import LlgTemplate, LlguidanceBackend
from asyncengine.grammar.service import GrammarService
from asyncengine.testing import FakeModel
from asyncengine.testing.leaks import assert_nothing_held

GOOD = small_grammar("person")


class SlowBackend(LlguidanceBackend):
    """Compiles when told to."""

    def __init__(self) -> None:
        super().__init__(shared_vocabulary())
        self.go = threading.Event()
        self.go.set()
        self.began: list[str] = []

    def compile(self, grammar: Grammar) -> LlgTemplate:
        self.began.append(grammar.text)
        self.go.wait(120)
        return super().compile(grammar)

    def close(self) -> None:
        self.go.set()


class Desk(NamedTuple):
    engine: AsyncEngine
    service: GrammarService
    backend: SlowBackend

    async def good(self) -> None:
        """A good grammar works now."""
        made = await self.engine.generate([5, 6, 7], constrained(GOOD.grammar))
        assert made.finish_reason in ("stop", "length")
        GOOD.validate(text_of(shared_vocabulary(), made.token_ids))


def constrained(grammar: Any, max_tokens: int = 30, **changes: Any) -> SamplingParams:
    return SamplingParams(temperature=0, seed=0, max_tokens=max_tokens, grammar=grammar, **changes)


def free(engine: AsyncEngine, prompt: list[int], max_tokens: int) -> list[int]:
    """What an unconstrained greedy request with seed 0 must answer."""
    return executor_of(engine).model.oracle(prompt, max_tokens, 0, (EOS,))


@asynccontextmanager
async def desk(**settings: Any) -> AsyncIterator[Desk]:
    """An engine whose grammars are real; at the end it holds nothing and its books balance."""
    backend = SlowBackend()
    service = GrammarService(lambda: backend, EngineConfig(**settings))
    executor = SteppedExecutor(128, 4, FakeModel(LOGITS, EOS))
    engine = make_engine(executor=executor, eos=EOS, wiring={"grammars": service}, check_every=1, **settings)
    async with engine:
        yield Desk(engine, service, backend)
        backend.go.set()
        await idle(engine)
        assert_nothing_held(engine.core)
        assert not service.waiting
