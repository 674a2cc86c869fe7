"""The compile service: once per grammar, never on the loop, and nobody pays for another's grammar."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from asyncengine.config import EngineConfig
from asyncengine.errors import (
    BudgetTooSmall,
    EngineClosed,
    GrammarError,
    GrammarTimeout,
    GrammarTooLarge,
    InvalidParameter,
)
from asyncengine.grammar import Grammar
from asyncengine.grammar.matcher import Matcher
from asyncengine.grammar.service import GrammarService
from asyncengine.seams import GrammarOrder


class State:
    tokens: Sequence[int] = ()

    def fill(self, mask: np.ndarray) -> None:
        mask[:] = -1

    def consume(self, token: int) -> bool:
        return True

    def rollback(self, num_tokens: int) -> None: ...

    def forced(self) -> list[int]:
        return []

    def is_accepting(self) -> bool:
        return True

    def is_terminated(self) -> bool:
        return False


class Closing:
    cost = 0

    def first(self) -> int:
        return 0

    def advance(self, token: int, at_most: int) -> bool:
        return True


class Template:
    def __init__(self, nbytes: int = 100, min_tokens: int = 3) -> None:
        self.nbytes = nbytes
        self.min_tokens = min_tokens
        self.far = 0
        self.broken = False

    def has_costs(self, left: int, soon: bool = False) -> bool:
        return True

    def new_state(self) -> State:
        if self.broken:
            raise GrammarError("grammar", "its compiled form is broken")
        return State()

    def new_closing(self, tokens: Sequence[int]) -> Closing:
        return Closing()


class Backend:
    """Compiles when told to; records the threads it compiled on."""

    def __init__(self) -> None:
        self.compiled: list[str] = []
        self.threads: list[str] = []
        self.go = threading.Event()
        self.go.set()
        self.begun = threading.Semaphore(0)
        self.outcome: Callable[[Grammar], Any] = lambda grammar: Template()
        self.closed = False

    def compile(self, grammar: Grammar, checkpoint: Callable[[], None]) -> Any:
        self.compiled.append(grammar.text)
        self.threads.append(threading.current_thread().name)
        self.begun.release()
        self.go.wait(120)
        checkpoint()
        return self.outcome(grammar)

    def close(self) -> None:
        self.closed = True
        self.go.set()


class Desk:
    """A service, and what it answered."""

    def __init__(self, **settings: Any) -> None:
        self.backend = Backend()
        self.service = GrammarService(lambda: self.backend, EngineConfig(**settings))
        self.answers: dict[int, asyncio.Future[Any]] = {}
        self.order: list[int] = []
        self.loop = asyncio.get_running_loop()
        self.threads = set(threading.enumerate())  # other tests' engines may live on

    def let_take(self, seconds: float) -> None:
        """`grammar_timeout` of what begins from now on."""
        self.service.config = self.service.config.replace(grammar_timeout=seconds)

    def start(self, ticket: int, grammar: Grammar, budget: int = 100, on_budget: Any = "close") -> asyncio.Future[Any]:
        self.answers[ticket] = self.loop.create_future()
        self.service.start(ticket, GrammarOrder(grammar, budget, on_budget), self._done)
        return self.answers[ticket]

    def _done(self, ticket: int, outcome: Any) -> None:
        self.loop.call_soon_threadsafe(self._settle, ticket, outcome)

    def _settle(self, ticket: int, outcome: Any) -> None:
        assert not self.answers[ticket].done(), "answered twice"
        self.order.append(ticket)
        self.answers[ticket].set_result(outcome)

    async def begun(self) -> None:
        assert await asyncio.to_thread(self.backend.begun.acquire, True, 120)

    async def __aenter__(self) -> Desk:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.service.close()
        assert self.backend.closed or not self.backend.compiled
        for thread in threading.enumerate():
            if thread.name.startswith("asyncengine-grammar") and thread not in self.threads:
                await asyncio.to_thread(thread.join, 120)
                assert not thread.is_alive(), "a worker is left"


A, B, C = Grammar.regex("a+"), Grammar.regex("b+"), Grammar.regex("c+")


async def test_a_known_grammar_is_answered_at_once():
    async with Desk() as desk:
        await desk.start(1, A)
        threads = set(threading.enumerate())
        answers: list[int] = []
        desk.service.start(2, GrammarOrder(A, 9, "close"), lambda ticket, outcome: answers.append(ticket))
        assert answers == [2]
        assert set(threading.enumerate()) <= threads  # one that has nothing to do may end meanwhile


async def test_the_last_one_who_leaves_gives_the_work_up():
    async with Desk(grammar_workers=1) as desk:
        desk.backend.go.clear()
        first = desk.start(1, A)
        await desk.begun()
        desk.start(2, B)
        desk.start(3, C)
        both = desk.start(4, C)
        desk.service.cancel(2)
        desk.service.cancel(3)
        desk.service.cancel(3)
        desk.service.cancel(99)
        desk.service.cancel(1)  # has begun: ends at its next checkpoint
        desk.backend.go.set()
        await both
        assert desk.backend.compiled == ["a+", "c+"]
        await asyncio.sleep(0)
        assert desk.order == [4]
        assert not first.done()
        assert not isinstance(await desk.start(5, A), Exception)
        assert desk.backend.compiled == ["a+", "c+", "a+"], "what was given up is begun anew"


async def test_a_timeout_fails_the_waiter_and_is_not_remembered():
    async with Desk(grammar_timeout=0.3) as desk:
        desk.backend.go.clear()
        slow = desk.start(1, A)
        outcome = await slow
        assert isinstance(outcome, GrammarTimeout)
        assert outcome.field == "grammar"
        assert "grammar_timeout=0.3" in str(outcome)
        desk.let_take(120.0)
        again = desk.start(2, A)  # while a worker still has what was given up
        desk.backend.go.set()
        assert not isinstance(await again, Exception)
        assert desk.backend.compiled == ["a+", "a+"]
        assert desk.service.check(A, 10, "close") == A


async def test_the_wait_for_a_worker_counts_and_ends_with_the_grammar_that_keeps_it():
    """One slow grammar keeps the only worker: it is given up when nobody waits for it, and who came later is served."""
    async with Desk(grammar_timeout=0.3, grammar_workers=1) as desk:
        outcome = desk.backend.outcome
        given_up = threading.Event()

        def endless(grammar: Grammar, checkpoint: Callable[[], None]) -> Any:
            desk.backend.begun.release()
            while grammar == A:
                try:
                    checkpoint()
                except GrammarTimeout:
                    given_up.set()
                    raise
                given_up.wait(0.001)
            return outcome(grammar)

        desk.backend.compile = endless  # type: ignore[method-assign]
        slow = desk.start(1, A)
        await desk.begun()
        behind = desk.start(2, B)
        desk.let_take(120.0)
        later = desk.start(3, C)
        assert isinstance(await slow, GrammarTimeout)
        assert given_up.wait(120)
        assert not isinstance(await later, Exception)
        assert isinstance(await behind, (GrammarTimeout, Matcher)), "by its own clock, at once or not at all"


async def test_errors_that_will_not_go_away_are_remembered():
    async with Desk() as desk:

        def refuse(grammar: Grammar) -> Any:
            raise GrammarError("grammar", "cannot be")

        desk.backend.outcome = refuse
        first, second = await asyncio.gather(desk.start(1, A), desk.start(2, A))
        assert isinstance(first, GrammarError)
        assert first is not second, "each caller raises its own"
        assert str(first) == str(second) == "grammar: cannot be"
        assert isinstance(await desk.start(3, A), GrammarError)
        with pytest.raises(GrammarError, match="cannot be"):
            desk.service.check(A, 10, "close")
        assert desk.backend.compiled == ["a+"]


async def test_a_library_that_raises_anything_fails_those_who_use_that_grammar():
    async with Desk() as desk:
        desk.backend.outcome = lambda grammar: 1 // 0 if grammar == A else Template()
        bad, good = await asyncio.gather(desk.start(1, A), desk.start(2, B))
        assert isinstance(bad, GrammarError)
        assert "ZeroDivisionError" in str(bad)
        assert not isinstance(good, Exception)


async def test_a_budget_below_the_shortest_output_is_refused_with_the_number_needed():
    async with Desk() as desk:
        desk.backend.outcome = lambda grammar: Template(min_tokens=7)
        late = await desk.start(1, A, budget=6)
        assert isinstance(late, BudgetTooSmall)
        assert late.field == "max_tokens"
        assert "takes 7 tokens" in str(late)
        with pytest.raises(BudgetTooSmall, match="takes 7 tokens, and 6 are left"):
            desk.service.check(A, 6, "error")
        assert desk.service.check(A, 7, "close") == A
        assert desk.service.check(A, 6, "truncate") == A
        assert not isinstance(await desk.start(2, A, budget=6, on_budget="truncate"), Exception)


async def test_a_broken_template_is_compiled_again():
    made: list[Template] = []

    def compile_(grammar: Grammar) -> Template:
        made.append(Template())
        return made[-1]

    async with Desk() as desk:
        desk.backend.outcome = compile_
        await desk.start(1, A)
        made[0].broken = True
        assert not isinstance(await desk.start(2, A), Exception)
        assert len(made) == 2
        assert not isinstance(await desk.start(3, A), Exception)
        assert len(made) == 2


async def test_the_cache_is_bounded_in_bytes():
    async with Desk(grammar_cache_memory=1000) as desk:
        desk.backend.outcome = lambda grammar: Template(nbytes=2000 if grammar == C else 400)
        for ticket, grammar in enumerate([A, B, A, Grammar.regex("d+"), A, B, C, C]):
            await desk.start(ticket, grammar)
        assert desk.backend.compiled == ["a+", "b+", "d+", "b+", "c+", "c+"], "least recently used first; C never fits"
        assert desk.service.cache.nbytes <= 1000


@pytest.mark.parametrize(
    ("grammar", "error"),
    [("a+", GrammarError), (7, InvalidParameter), ({"type": "string", "x": "y" * 2_000_000}, GrammarTooLarge)],
)
async def test_what_is_no_grammar_is_refused_at_submit(grammar: Any, error: type[Exception]):
    async with Desk() as desk:
        with pytest.raises(error):
            desk.service.check(grammar, 10, "close")
        assert not desk.backend.compiled


async def test_closing_answers_nobody_and_leaves_no_thread():
    async with Desk() as desk:
        desk.backend.go.clear()
        desk.start(1, A)
        await desk.begun()
        desk.start(2, B)
        desk.service.close()
        desk.service.close()
        with pytest.raises(EngineClosed):
            desk.start(3, A)
