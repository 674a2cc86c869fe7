"""Engines and schedulers on the fake runner, driven by hand or by their own loop."""

from __future__ import annotations

import asyncio
import threading
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from asyncengine import AsyncEngine, EngineConfig, SamplingParams
from asyncengine.assembly.grammars import make_planner
from asyncengine.assembly.wiring import wire
from asyncengine.engine.frontend import Frontend
from asyncengine.info import ModelInfo
from asyncengine.kvcache import KVCache
from asyncengine.options import RequestOptions
from asyncengine.request_spec import RequestSpec
from asyncengine.scheduler import Output, Scheduler
from asyncengine.scheduler.messages import Abort, AdapterReady
from asyncengine.scheduler.request import Request
from asyncengine.seams import AdapterAdmission
from asyncengine.step import Batch, StepResult
from asyncengine.testing.fake_runner import FakeExecutor, FakeModel

GREEDY = SamplingParams(temperature=0.0)
PATIENCE = 120.0
"""Seconds until a broken test gives up. No right one comes near, on however slow a machine."""

CACHE_KINDS: dict[str, dict[str, Any]] = {
    "pages": {},
    "states": {"num_states": 12},
    "windows": {"model": FakeModel(windows=((9, 0),))},
    "window pages": {"model": FakeModel(windows=((9, 0), (0, 0))), "num_window_pages": 60},
}
"""Arguments of `FakeExecutor` for each kind of cache."""


def greedy(max_tokens: int, **changes: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, seed=0, max_tokens=max_tokens, **changes)


class Steps:
    """A scheduler and a fake executor, stepped by hand; the books are checked after every verb (or fewer).

    `outputs`, `ended` and `errors` collect what the scheduler said; `batches` what it launched.
    """

    def __init__(
        self,
        pages: int = 64,
        *,
        model: FakeModel | None = None,
        adapters: AdapterAdmission | None = None,
        executor: FakeExecutor | None = None,
        check_every: int = 1,
        num_states: int = 0,
        num_window_pages: int = 0,
        copies: bool = False,
        **settings: Any,
    ) -> None:
        settings.setdefault("page_size", 4)
        self._check_every = check_every
        self._notes = 0
        self.config = EngineConfig(**settings)
        self.executor = executor or FakeExecutor(
            pages, self.config.page_size, model, num_states, num_window_pages=num_window_pages
        )
        self.kv = KVCache(
            pages,
            self.config.page_size,
            prefix_caching=self.config.prefix_caching,
            eviction=self.config.eviction,
            num_states=num_states,
            windows=self.executor.windows,
            num_window_pages=self.executor.num_window_pages,
            most_ahead=self.config.most_ahead,
        )
        self.scheduler = Scheduler(self.config, self.kv, adapters, copies=copies)
        self.now = 0.0
        self.depth = self.config.max_steps_in_flight or 1
        self.batches: list[Batch] = []
        self.launched: deque[StepResult] = deque()
        self.tokens: dict[int, list[int]] = defaultdict(list)
        self.ended: dict[int, str] = {}
        self.errors: dict[int, str | None] = {}
        self.expected: dict[int, list[int]] = {}
        self._tickets = 0

    def add(
        self,
        prompt: Sequence[int],
        max_tokens: int = 8,
        *,
        params: SamplingParams | None = None,
        needs_grammar: bool = False,
        adapter: str | None = None,
        adapter_loading: bool = False,
        priority: int = 0,
        salt: str | None = None,
        tenant: str | None = None,
        session: str | None = None,
        **fields: Any,
    ) -> int:
        """Submit one sample; its ticket. `fields` of its `RequestSpec`. What the test brings a matcher for, or an
        adapter whose name is its digest, is not there yet, unless an adapter is not `adapter_loading`."""
        self._tickets += 1
        params = params or greedy(max_tokens)
        if needs_grammar and params.grammar is None:
            params = params.replace(grammar="the test's")
        adapter = adapter or ("A" if adapter_loading else None)
        options = RequestOptions(adapter=adapter, priority=priority, cache_salt=salt, tenant=tenant, session=session)
        total = len(prompt) + max_tokens
        spec = RequestSpec(self._tickets, tuple(prompt), params, total, options, arrival=self.now, **fields)
        self.expected[self._tickets] = self.executor.model.oracle(prompt, max_tokens, spec.seed, spec.stop_ids)
        self.scheduler.apply(spec)
        if adapter and not adapter_loading:
            self.scheduler.apply(AdapterReady(self._tickets, adapter))
        return self._tickets

    def add_group(self, prompt: Sequence[int], samples: int, max_tokens: int = 8, **more: Any) -> list[int]:
        """`samples` samples of one prompt, each with a seed of its own."""
        first = self._tickets + 1
        return [self.add(prompt, max_tokens, group=first, seed=1000 + i, **more) for i in range(samples)]

    def apply(self, message: Any) -> None:
        self.scheduler.apply(message)
        self._note()

    def abort(self, ticket: int) -> None:
        self.apply(Abort(ticket))

    def launch(self) -> Batch | None:
        """Schedule, and compute the step; its result stays in flight."""
        batch = self.scheduler.schedule(self.now)
        self._note()
        if batch is not None:
            self.batches.append(batch)
            self.launched.append(self.executor.execute(batch))
        return batch

    def commit(self) -> None:
        self.scheduler.commit(self.launched.popleft(), self.now)
        self._note()

    def step(self) -> Batch | None:
        """One turn of the engine's loop."""
        batch = self.launch()
        if self.launched and (batch is None or len(self.launched) >= self.depth):
            self.commit()
        return batch

    def run(self, most: int = 10_000) -> None:
        """Step until nothing is left."""
        for _ in range(most):
            if not self.scheduler.requests and not self.launched:
                return
            self.step()
        raise AssertionError(f"still {list(self.scheduler.requests.values())} after {most} steps")

    def request(self, ticket: int) -> Request:
        return self.scheduler.requests[ticket]

    def assert_right(self, tickets: Iterable[int] | None = None) -> None:
        """Every finished request has exactly the model's answer, however it was scheduled."""
        for ticket in self.expected if tickets is None else tickets:
            assert self.ended[ticket] in ("length", "stop"), (ticket, self.ended[ticket], self.errors[ticket])
            assert self.tokens[ticket] == self.expected[ticket], ticket

    def assert_empty(self) -> None:
        self.scheduler.check()
        counts = self.kv.counts([])
        assert not self.scheduler.requests
        assert (counts.shared, counts.retiring) == (0, 0)
        assert counts.free + counts.cached == counts.total
        self.scheduler.check_sums()
        states = self.kv.state_counts([])
        assert states.free + states.snapshots == states.total

    def _note(self) -> None:
        self._notes += 1
        if self._notes % self._check_every == 0:
            self.scheduler.check()
        for output in self.scheduler.take_outputs():
            self._note_one(output)

    def _note_one(self, output: Output) -> None:
        assert output.ticket not in self.ended, f"{output} after the end"
        if output.token >= 0:
            self.tokens[output.ticket].append(output.token)
        if output.reason is not None:
            self.ended[output.ticket] = output.reason
            self.errors[output.ticket] = output.error


def rows(batch: Batch | None) -> dict[int, int]:
    """Ticket -> positions computed."""
    return {} if batch is None else {row.spec.ticket: row.num_scheduled for row in batch.rows}


class Reciter(FakeModel):
    """A model that says `script`, one token after the other, whatever the prompt (of one token)."""

    def __init__(self, script: list[int], vocab_size: int) -> None:
        super().__init__(vocab_size)
        self.script = script

    def next_token(self, tokens: Any, seed: int = 0, near: Any = None) -> int:
        return self.script[(len(tokens) - 1) % len(self.script)]


class SteppedExecutor(FakeExecutor):
    """A fake executor whose steps wait for permission: `hold` stops it before its next step, `release` lets it go.

    A test that needs something to be still running holds it, from the start, behind as many steps as it needs: whoever
    holds what runs already may come too late.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._go = threading.Event()
        self._go.set()
        self.entered = threading.Event()
        """Set when a step is waiting or running; those that `hold` lets pass do not count."""
        self._passing = 0
        self.failure: BaseException | None = None

    def hold(self, after: int = 0) -> None:
        """`after`: so many steps more are run."""
        self.entered.clear()
        self._passing = after
        self._go.clear()

    def release(self) -> None:
        self._go.set()

    def execute(self, batch: Batch) -> StepResult:
        if self._passing and not self._go.is_set():
            self._passing -= 1
        else:
            self.entered.set()
            assert self._go.wait(PATIENCE), "nobody lets the step go"
        if self.failure is not None:
            raise self.failure
        return super().execute(batch)


def make_core(
    executor: FakeExecutor | None = None,
    *,
    pages: int = 128,
    eos: int = 1,
    wiring: dict[str, Any] | None = None,
    **settings: Any,
) -> Frontend:
    """An engine's core around a fake executor. `wiring`: clock, tokenizer, grammars, adapters, recorder, vectors."""
    settings.setdefault("page_size", 4)
    config = EngineConfig(**settings)
    executor = executor or SteppedExecutor(pages, config.page_size)
    info = ModelInfo(
        "fake", executor.model.vocab_size, 10**6, (eos,), "int", "cpu", executor.num_pages, config.page_size,
        has_tokenizer=bool(wiring and wiring.get("tokenizer")),
    )  # fmt: skip
    wiring = {"tokenizer": None, "grammars": None, **(wiring or {})}
    vectors = wiring.get("vectors")
    if vectors is not None:
        info = replace(info, task=vectors.spec.task, max_model_len=1000)
    planner = make_planner(wiring["tokenizer"], wiring["grammars"], config)
    return wire(executor, info, config, planner=planner, **wiring)


def make_engine(*, hosted: bool = False, **kwargs: Any) -> AsyncEngine:
    return AsyncEngine(lambda: make_core(**kwargs), hosted=hosted)


def executor_of(engine: AsyncEngine) -> SteppedExecutor:
    executor = engine.core.loop.runner.executor  # type: ignore[attr-defined]
    assert isinstance(executor, SteppedExecutor)
    return executor


def oracle(engine: AsyncEngine, prompt: Sequence[int], max_tokens: int) -> list[int]:
    """The answer that a greedy request with seed 0 must get."""
    return executor_of(engine).model.oracle(prompt, max_tokens, 0, (1,))


async def until(condition: Callable[[], bool], what: str = "the condition", most: float = PATIENCE) -> None:
    """Turn the event loop until `condition` holds. Not a wait by time: the limit only ends a broken test."""
    loop = asyncio.get_running_loop()
    deadline, pause = loop.time() + most, 0.0005
    while not condition():
        if loop.time() > deadline:
            raise AssertionError(f"{what} did not come about within {most} s")
        await asyncio.sleep(pause)
        pause = min(1.2 * pause, 0.01)  # a load of seconds is not looked at ten thousand times


def num_in_line(engine: AsyncEngine) -> int:
    """Requests that wait for a place in the engine's queue."""
    return len(engine.core.loop.queue_limit.line)


def posted(engine: AsyncEngine) -> list[Any]:
    """Messages that have come to the engine and that its loop has not taken yet."""
    return list(engine.core.loop.inbox.items)


async def idle(engine: AsyncEngine) -> None:
    """Wait until the engine has nothing left to do."""
    core = engine.core

    def done() -> bool:
        loop = core.loop  # of a hosted engine another thread's: it gives places back after its last answer
        busy = loop.scheduler.requests or loop.in_flight or loop.delivery.expected or loop.queue_limit.waiting
        return not busy

    await until(done, "an idle engine")


async def in_thread(work: Callable[[], Any]) -> Any:
    """Run `work` on a plain thread of its own and await it."""
    return await asyncio.get_running_loop().run_in_executor(None, work)


def gather_all(calls: Iterable[Awaitable[Any]]) -> Any:
    return asyncio.gather(*calls, return_exceptions=True)
