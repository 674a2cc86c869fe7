"""Hostile grammars and the grammar queue, through a whole engine: refused by name, in time, to nobody's harm."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import pytest
from support.fake_engine import SteppedExecutor, executor_of, idle, make_engine, until
from support.grammar_walks import text_of
from support.small_grammars import NAMES, shared_vocabulary, small_grammar
from support.small_vocabulary import EOS, LOGITS
from support.threads import no_new_engine_thread

from asyncengine import AsyncEngine, SamplingParams
from asyncengine.config import EngineConfig
from asyncengine.errors import BudgetTooSmall, GrammarError, GrammarTimeout, QueueFull, RequestFailed
from asyncengine.grammar import Grammar
from asyncengine.grammar.llguidance_backend import LlgTemplate, LlguidanceBackend
from asyncengine.grammar.schema.rules import Checkpoint, proceed
from asyncengine.grammar.service import GrammarService
from asyncengine.grammar.shared_masks import SharedMasks
from asyncengine.testing import FakeModel
from asyncengine.testing.leaks import assert_nothing_held

from .hostile_grammars import BEARABLE, REFUSED

GOOD = small_grammar("person")


class SlowBackend(LlguidanceBackend):
    """Compiles when told to."""

    def __init__(self) -> None:
        super().__init__(shared_vocabulary())
        self.go = threading.Event()
        self.go.set()
        self.began: list[str] = []
        self.given_up: list[str] = []

    def compile(self, grammar: Grammar, checkpoint: Checkpoint = proceed) -> LlgTemplate:
        self.began.append(grammar.text)
        self.go.wait(120)
        try:
            return super().compile(grammar, checkpoint)
        except GrammarTimeout:
            self.given_up.append(grammar.text)
            raise

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
    """The answer that an unconstrained greedy request with seed 0 must get."""
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


@pytest.fixture(autouse=True)
def no_thread_left() -> Iterator[None]:
    with no_new_engine_thread():
        yield


# ---------------------------------------------------------------- hostile input


async def beside(desk: Desk, work: Callable[[], Any]) -> None:
    """Others' streams run while `work` does, and get what they must."""
    prompts = [[5, 9, index] for index in range(3)]
    params = SamplingParams(temperature=0, seed=0, max_tokens=200)
    others = [asyncio.ensure_future(desk.engine.generate(prompt, params)) for prompt in prompts]
    await work()
    for prompt, other in zip(prompts, await asyncio.gather(*others), strict=True):
        assert other.token_ids == free(desk.engine, prompt, 200)


SAYS = {
    "60,000 nested groups": "65536 characters", "an enum of 10 MB": "max_grammar_bytes", "100,000 levels": "levels",
    "a circular dict": "cyclic", "10,000 references in a chain": "$ref", "a huge count": "10000 times",
    "2,000 optional properties": "too large", "a back-reference": "back-reference",
    "Lark with a budget of its own": "max_tokens",
}  # fmt: skip
"""The limit that a refusal names; test_limits has all of them."""


async def test_what_cannot_be_served_is_refused_by_name_and_harms_nobody() -> None:
    async with desk() as place:

        async def all_refused() -> None:
            for name, make in REFUSED.items():
                with pytest.raises(GrammarError) as refused:
                    await place.engine.generate([5], constrained(make()))
                error = refused.value
                assert error.field == "grammar", name
                assert error.limit, name
                assert SAYS.get(name, "") in str(error)
                assert len(str(error)) < 400, name
            await place.good()

        await beside(place, all_refused)


async def test_what_may_be_served_is_served_or_refused_in_time() -> None:
    served = 0
    async with desk() as place:
        for name, make in BEARABLE.items():
            call = place.engine.generate([5], constrained(make(), 60))
            (made,) = await asyncio.wait_for(asyncio.gather(call, return_exceptions=True), 120)
            if isinstance(made, GrammarError):
                assert made.field == "grammar", name
            else:
                served += 1
                assert not isinstance(made, BaseException), name
                assert made.finish_reason in ("stop", "length"), name
            await place.good()
    assert served >= 8


async def test_a_compilation_that_takes_too_long_ends_its_own_request_only() -> None:
    async with desk(grammar_timeout=0.05, grammar_workers=1) as place:
        place.backend.go.clear()
        with pytest.raises(GrammarTimeout, match=r"grammar_timeout=0\.05"):
            await place.engine.generate([5], constrained(Grammar.regex("slow+")))
        other = await place.engine.generate([5, 9], SamplingParams(temperature=0, seed=0, max_tokens=9))
        assert other.token_ids == free(place.engine, [5, 9], 9)
        place.backend.go.set()
        await until(lambda: place.backend.given_up == ["slow+"], "the worker to give it up")
        assert place.service.compiled == 0


async def test_a_grammar_that_fails_in_mid_output_leaves_the_others_of_its_batch_alone() -> None:
    async with desk() as place:
        names = [name for name in NAMES if name != "forced"]
        jobs = [place.engine.generate([5, 9], constrained(small_grammar(name).grammar)) for name in names]
        alone = [await job for job in jobs]
        state, calls = type(GOOD.template.new_state()), 0
        fill = state.fill

        def broken(self: Any, mask: Any) -> None:
            nonlocal calls
            if self.template.grammar == small_grammar("tree").grammar:
                calls += 1
                if calls > 3:
                    raise GrammarError("grammar", "ran into a limit")
            fill(self, mask)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(state, "fill", broken)
            patch.setattr(state, "joint_fill", None)
            patch.setattr(SharedMasks, "find", lambda _, position, before: ((position, None), None))  # known from alone
            jobs = [place.engine.generate([5, 9], constrained(small_grammar(name).grammar)) for name in names]
            made = await asyncio.gather(*jobs, return_exceptions=True)
        for name, one, other in zip(names, alone, made, strict=True):
            if name == "tree":
                assert isinstance(other, RequestFailed)
                assert "ran into a limit" in str(other)
            else:
                assert not isinstance(other, BaseException), name
                assert other.token_ids == one.token_ids, name


# ---------------------------------------------------------------- budgets


async def test_on_budget_error_fails_with_the_reason() -> None:
    async with desk() as place:
        with pytest.raises(RequestFailed, match=r"budget \(max_tokens or the context\) ended before"):
            await place.engine.generate([5], constrained(GOOD.grammar, 10, on_budget="error"))
        chunks = [
            chunk
            async for chunk in place.engine.stream([5], constrained(small_grammar("choice").grammar, on_budget="error"))
        ]
        assert chunks[-1].finish_reason == "stop"


# ---------------------------------------------------------------- the queue


async def test_too_many_grammars_waiting_to_be_compiled() -> None:
    async with desk(max_pending_grammars=2, grammar_workers=1) as place:
        place.backend.go.clear()
        jobs = [
            asyncio.ensure_future(place.engine.generate([5], constrained(Grammar.regex(f"x{index}"))))
            for index in range(2)
        ]
        await until(lambda: len(place.engine.core.loop.scheduler.grammar_queue) == 2, "two compilations")
        with pytest.raises(QueueFull, match="max_pending_grammars=2"):
            await place.engine.generate([5], constrained(Grammar.regex("x3")))
        again = asyncio.ensure_future(place.engine.generate([5], constrained(Grammar.regex("x1"))))  # one of the two
        await until(lambda: len(place.engine.core.loop.scheduler.grammar_queue) == 3, "three in the queue")
        place.backend.go.set()
        made = await asyncio.gather(*jobs, again)
        assert [text_of(shared_vocabulary(), each.token_ids) for each in made] == ["x0", "x1", "x1"]
        await place.good()


async def test_who_leaves_the_grammar_queue_is_never_computed_and_its_compilation_is_cancelled() -> None:
    async with desk(grammar_workers=1) as place:
        executor_of(place.engine).keep_batches = True
        place.backend.go.clear()
        first = asyncio.ensure_future(place.engine.generate([5], constrained(Grammar.regex("first"))))
        await until(lambda: place.backend.began == ["first"], "the first compilation")
        leaver = asyncio.ensure_future(place.engine.generate([6], constrained(Grammar.regex("second"))))
        label = place.engine.stream([7], constrained(Grammar.regex("third")), request_id="third")
        reader = asyncio.ensure_future(label.result())
        queue = place.engine.core.loop.scheduler.grammar_queue
        await until(lambda: len(queue) == 3, "three in the queue")
        leaver.cancel()
        assert place.engine.abort("third")
        await until(lambda: len(queue) == 1, "two have left")
        assert (await reader).finish_reason == "abort"
        place.backend.go.set()
        assert text_of(shared_vocabulary(), (await first).token_ids) == "first"
        await place.good()
        assert place.backend.began == ["first", GOOD.grammar.text]
        computed = [row.tokens[0] for batch in executor_of(place.engine).executed for row in batch.rows]
        assert 6 not in computed
        assert 7 not in computed


async def test_fifty_equal_grammars_compile_once() -> None:
    async with desk() as place:
        jobs = [place.engine.generate([5, index], constrained(Grammar.regex("(ab|ba)+c"))) for index in range(50)]
        made = await asyncio.gather(*jobs)
        assert place.service.compiled == 1
        assert len({tuple(each.token_ids) for each in made}) > 2


async def test_samples_of_one_prompt_each_have_their_own_matcher() -> None:
    async with desk() as place:
        made = await place.engine.generate([5, 6], constrained(GOOD.grammar, 40, n=5))
        assert len({tuple(sample.token_ids) for sample in made.samples}) == 5
        for sample in made.samples:
            GOOD.validate(text_of(shared_vocabulary(), sample.token_ids))
        assert place.service.compiled == 1
        with pytest.raises(BudgetTooSmall):
            await place.engine.generate([5, 6], constrained(GOOD.grammar, 3, n=5))


@pytest.mark.parametrize("wrap", [lambda schema: schema, Grammar.json_schema], ids=["dict", "Grammar"])
async def test_large_grammars_are_not_checked_on_the_callers_loop(wrap: Callable[[Any], Any]) -> None:
    """It would hold up every stream that the loop serves."""
    threads: list[bool] = []
    async with desk() as place:
        check = place.service.check

        def watched(*args: Any) -> Any:
            threads.append(threading.current_thread() is threading.main_thread())
            return check(*args)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(place.service, "check", watched)
            for size in (3, 3000):
                await place.engine.generate([5], constrained(wrap({"enum": [f"x{i}" for i in range(size)]})))
        assert threads == [True, False]
