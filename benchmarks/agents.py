"""Agents' sessions on too small a cache: how much of their prompts is found there, and how long first tokens take.

The shape is that of public traces (median 43 turns and 4 subagents, 10 tokens an answer, 86 % of next requests within a
second, 95 % within ten; AgentX, vLLM blog of 8 September 2026), with contexts a sixtieth as long: thoughts are dropped
from the history, twice it is replaced by a summary, subagents share the system prompt, and the cache has half of the
pages that all of it would fill. Run each way in turns:

    python -m benchmarks.agents MODEL --agents 8            # sessions, and the same without (LRU)
    python -m benchmarks.agents --simulate --agents 8       # no model: a scheduler on virtual time

With `--llama FILE.gguf` llama.cpp's server (xllamacpp) answers the same prompts with as many cells as there are pages.
"""

from __future__ import annotations

import argparse
import asyncio
import heapq
import itertools
import json
import random
import statistics
import time
from collections.abc import Awaitable, Callable, Generator
from dataclasses import dataclass, field
from typing import Any

from asyncengine import AsyncEngine, EngineConfig, SamplingParams, Session
from asyncengine.kvcache import KVCache
from asyncengine.options import RequestOptions
from asyncengine.request_spec import RequestSpec
from asyncengine.scheduler import Scheduler
from asyncengine.scheduler.messages import SessionEvent
from asyncengine.step import Batch, StepResult
from asyncengine.testing import FakeExecutor

TURNS, SUBAGENTS, SUBAGENT_TURNS = 43, 4, 6
SUMMARIES = (16, 30)
"""Turns before which the history is replaced by a summary."""
SYSTEM, TASK, THOUGHTS, ANSWER, RESULT, SUMMARY = 768, 48, 16, 10, (16, 48), 96
"""Tokens of each."""
TOOLS = (("read", 0.86, 0.05, 0.9), ("search", 0.09, 1.0, 8.0), ("tests", 0.05, 10.0, 60.0))
"""Names of tools, how often they are called, and the seconds that they take, from and to."""


@dataclass
class Ask:
    """A request: so many tokens behind the prompt, in the agent's session. Its answer is sent back."""

    prompt: list[int]
    tokens: int


@dataclass
class Wait:
    """A tool that takes so many seconds."""

    tool: str
    seconds: float


@dataclass
class Fork:
    """A subagent, which is waited for."""

    work: Generator[Ask | Wait | Fork, list[int], None]


Work = Generator[Ask | Wait | Fork, list[int], None]


def words(rng: random.Random, count: int, vocabulary: int) -> list[int]:
    return [rng.randrange(20, vocabulary) for _ in range(count)]


def agent(seed: int, vocabulary: int, turns: int = TURNS, subagents: int = SUBAGENTS) -> Work:
    """The work of one agent; what it sends away and waits for follows from the seed and the answers alone."""
    rng = random.Random(seed)
    system = words(random.Random(0), SYSTEM, vocabulary)
    history = [*system, *words(rng, TASK, vocabulary)]
    parents = set(rng.sample(range(turns), subagents)) if subagents else set()
    for turn in range(turns):
        if turn in SUMMARIES and subagents:
            history = [*system, *words(rng, SUMMARY, vocabulary)]
        answer = yield Ask(history, THOUGHTS + ANSWER)
        history = [*history, *answer[THOUGHTS:]]
        if turn in parents:
            yield Fork(agent(rng.randrange(2**32), vocabulary, SUBAGENT_TURNS, 0))
        else:
            tool, _, low, high = rng.choices(TOOLS, [share for _, share, *_ in TOOLS])[0]
            yield Wait(tool, rng.uniform(low, high))
        history = [*history, *words(rng, rng.randint(*RESULT), vocabulary)]


@dataclass
class Figures:
    """Tokens that were asked and that were found in the cache, and the times of first tokens."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    first_tokens: list[float] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def hits(self) -> float:
        return self.cached_tokens / max(self.prompt_tokens, 1)

    def summary(self) -> dict[str, Any]:
        firsts = sorted(self.first_tokens)
        p50, p90 = statistics.median(firsts), firsts[int(0.9 * len(firsts))]
        return {
            "requests": len(firsts), "prompt_tokens": self.prompt_tokens, "hits": round(self.hits, 4),
            "first_token_p50_ms": round(1000 * p50, 1), "first_token_p90_ms": round(1000 * p90, 1),
            "seconds": round(self.seconds, 1),
        }  # fmt: skip


# Without a model: a scheduler, whose steps take the time of a model that computes `RATE` prompt tokens a second.

STEP_SECONDS, RATE = 0.01, 4000.0


class Blank(FakeExecutor):
    """An executor that says anything, at once."""

    def execute(self, batch: Batch) -> StepResult:
        tokens = [(row.spec.ticket * 31 + row.start) % 90 + 2 if row.samples else -1 for row in batch.rows]
        return StepResult(batch.step, tokens)


class Simulation:
    """Agents on a scheduler, on virtual time."""

    def __init__(self, agents: int, pages: int, sessions: bool, exact: bool) -> None:
        self.executor = (FakeExecutor if exact else Blank)(pages, 16)
        self.kv = KVCache(pages, 16)
        self.scheduler = Scheduler(EngineConfig(max_num_seqs=agents * 2), self.kv)
        self.figures = Figures()
        self.now, self.live = 0.0, 0
        self._sessions, self._exact = sessions, exact
        self._numbers = itertools.count(1)
        self._wake: list[tuple[float, int, str, Work, list[int] | None]] = []
        self._asked: dict[int, tuple[str, Work, RequestSpec]] = {}
        self._answers: dict[int, list[int]] = {}
        self._parents: dict[str, tuple[str, Work, float]] = {}
        self._seconds: dict[str, list[float]] = {}
        for index in range(agents):
            self._at(index * 0.7, f"a{index}", agent(index + 1, 97), None)

    def run(self) -> None:
        while self._wake or self._asked:
            while self._wake and (self._wake[0][0] <= self.now or not self._asked):
                at, _, name, work, answer = heapq.heappop(self._wake)
                self.now = max(self.now, at)
                self._go_on(name, work, answer)
            self._step()
        self.figures.prompt_tokens = self.scheduler.counters.prompt_tokens
        self.figures.cached_tokens = self.scheduler.counters.cached_tokens
        self.figures.seconds = self.now

    def _at(self, at: float, name: str, work: Work, answer: list[int] | None) -> None:
        heapq.heappush(self._wake, (at, next(self._numbers), name, work, answer))

    def _tell(self, name: str, what: Any, seconds: float = 0.0) -> None:
        if self._sessions:
            self.scheduler.apply(SessionEvent(name, what, self.now, seconds))

    def _go_on(self, name: str, work: Work, answer: list[int] | None) -> None:
        try:
            item = work.send(answer)  # type: ignore[arg-type]
        except StopIteration:
            self._tell(name, "close")
            if name in self._parents:
                parent, its_work, since = self._parents.pop(name)
                self._seconds.setdefault("subagent", []).append(self.now - since)
                self._go_on(parent, its_work, [])
            return
        if isinstance(item, Ask):
            options = RequestOptions(session=name if self._sessions else None)
            params = SamplingParams(temperature=0.0, max_tokens=item.tokens, seed=0)
            total = len(item.prompt) + item.tokens
            spec = RequestSpec(next(self._numbers), tuple(item.prompt), params, total, options, arrival=self.now)
            self._asked[spec.ticket] = name, work, spec
            self.scheduler.apply(spec)
            return
        tool = item.tool if isinstance(item, Wait) else "subagent"
        if tool in self._seconds:
            self._tell(name, "waiting", statistics.mean(self._seconds[tool]))
        if isinstance(item, Wait):
            self._seconds.setdefault(tool, []).append(item.seconds)
            self._at(self.now + item.seconds, name, work, [])
        else:
            child = f"{name}.{next(self._numbers)}"
            self._parents[child] = name, work, self.now
            self._go_on(child, item.work, None)

    def _step(self) -> None:
        batch = self.scheduler.schedule(self.now)
        if batch is None:
            return
        self.live = max(self.live, self.kv.tree.num_pages - self.kv.tree.num_passed)
        result = self.executor.execute(batch)
        self.now += STEP_SECONDS + sum(row.num_scheduled for row in batch.rows) / RATE
        self.scheduler.commit(result, self.now)
        for output in self.scheduler.take_outputs():
            name, work, spec = self._asked[output.ticket]
            if output.token >= 0:
                if output.ticket not in self._answers:
                    self.figures.first_tokens.append(self.now - spec.arrival)
                self._answers.setdefault(output.ticket, []).append(output.token)
            if output.reason is not None:
                del self._asked[output.ticket]
                answer = self._answers.pop(output.ticket)
                if self._exact and answer != self.executor.model.oracle(spec.prompt, len(answer)):
                    raise AssertionError(f"request {output.ticket}: a wrong token")
                self._go_on(name, work, answer)


def simulate(agents: int, pages: int, sessions: bool, *, exact: bool = False) -> tuple[Figures, int]:
    """Run `agents` agents on a scheduler with so many pages of 16 tokens; figures, and the most pages that a session or
    a request wanted at a time. `exact`: every answer is compared with what the fake model must say."""
    simulation = Simulation(agents, pages, sessions, exact)
    simulation.run()
    return simulation.figures, simulation.live


# With a model, on the real clock.

Complete = Callable[[list[int], int, str], Awaitable[tuple[list[int], int, float]]]
"""(prompt, tokens, session) -> (answer, cached tokens, seconds to the first token)."""


async def drive(
    complete: Complete,
    agents: int,
    vocabulary: int,
    pace: float,
    tell: Callable[[str, str, float], None],
    seed: int = 1,
) -> Figures:
    """Let `agents` agents work with `complete`, their tools `pace` times as fast as traced."""
    figures = Figures()
    measured: dict[str, list[float]] = {}
    children = itertools.count(1)

    async def run(name: str, work: Work) -> None:
        answer: list[int] | None = None
        while True:
            try:
                item = work.send(answer)  # type: ignore[arg-type]
            except StopIteration:
                tell(name, "close", 0.0)
                return
            answer = []
            if isinstance(item, Ask):
                answer, cached, first = await complete(item.prompt, item.tokens, name)
                figures.prompt_tokens += len(item.prompt)
                figures.cached_tokens += cached
                figures.first_tokens.append(first)
                continue
            tool, since = item.tool if isinstance(item, Wait) else "subagent", time.monotonic()
            if tool in measured:
                tell(name, "waiting", statistics.mean(measured[tool]))
            if isinstance(item, Wait):
                await asyncio.sleep(item.seconds / pace)
            else:
                await run(f"{name}.{next(children)}", item.work)
            measured.setdefault(tool, []).append(time.monotonic() - since)

    async def start(index: int) -> None:
        await asyncio.sleep(index * 0.7 / pace)
        await run(f"a{index}", agent(seed + index, vocabulary))

    begun = time.monotonic()
    async with asyncio.TaskGroup() as tasks:
        for index in range(agents):
            tasks.create_task(start(index))
    figures.seconds = time.monotonic() - begun
    return figures


async def with_engine(model: str, agents: int, pace: float, pages: int | None, sessions: bool) -> Figures:
    """The same with an engine; `pages`: of its cache; None: as many as it takes."""
    memory = None
    if pages is not None:
        async with await AsyncEngine.from_pretrained(model, kv_cache_memory="1GiB") as engine:
            memory = (pages + 1) * (2**30 // engine.info.num_pages)
    async with await AsyncEngine.from_pretrained(model, kv_cache_memory=memory) as engine:
        opened: dict[str, Session] = {}

        async def complete(prompt: list[int], tokens: int, name: str) -> tuple[list[int], int, float]:
            if sessions and name not in opened:
                opened[name] = engine.session(name)
            params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
            done = await engine.generate(prompt, params, session=name if sessions else None)
            return done.token_ids, done.usage.cached_tokens, done.timings.first_token or 0.0

        def tell(name: str, what: str, seconds: float) -> None:
            if sessions and what == "close":
                opened.pop(name).close()
            elif sessions:
                opened[name].waiting(seconds)

        return await drive(complete, agents, engine.info.vocab_size - 100, pace, tell)


async def with_llama(file: str, agents: int, pace: float, cells: int, vocabulary: int) -> Figures:
    """The same with llama.cpp's server in this process, with so many cells of keys and values."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = file
    params.n_parallel, params.n_ctx, params.kv_unified = agents, cells, True
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 2
    server = xllamacpp.Server(params)

    async def complete(prompt: list[int], tokens: int, name: str) -> tuple[list[int], int, float]:
        asked = {"prompt": prompt, "n_predict": tokens, "temperature": 0.0, "ignore_eos": True, "cache_prompt": True}
        begun, done = time.monotonic(), dict[str, Any]()
        while "timings" not in done:  # it refuses what its cells do not hold beside the others
            done = await asyncio.to_thread(server.handle_completions, asked)
        timings = done["timings"]
        # its answers come as text: any tokens stand for them, as the trace drops thoughts, and finds no answer again
        first = time.monotonic() - begun - timings["predicted_ms"] / 1000
        return words(random.Random(len(prompt)), tokens, vocabulary), timings["cache_n"], first

    return await drive(complete, agents, vocabulary, pace, lambda *_: None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", nargs="?")
    parser.add_argument("--simulate", action="store_true")
    parser.add_argument("--agents", type=int, default=8)
    parser.add_argument("--pace", type=float, default=10.0, help="how much faster than traced the tools are")
    parser.add_argument("--share", type=float, default=1.0, help="pages there are, of those that are wanted at a time")
    parser.add_argument("--llama", metavar="FILE.gguf")
    args = parser.parse_args()
    rows, live = {}, simulate(args.agents, 1_000_000, True)[1]
    pages = int(live * args.share)
    ways: dict[str, tuple[int | None, bool]] = {"all": (None, False), "LRU": (pages, False), "sessions": (pages, True)}
    for name, (count, sessions) in ways.items():
        if args.simulate:
            rows[name] = simulate(args.agents, count or 1_000_000, sessions)[0]
        else:
            rows[name] = asyncio.run(with_engine(args.model, args.agents, args.pace, count, sessions))
        print(f"{name:9}", json.dumps({"pages": count, **rows[name].summary()}), flush=True)
    if args.llama:
        figures = asyncio.run(with_llama(args.llama, args.agents, args.pace, pages * 16, 40_000))
        print("llama.cpp", json.dumps({"pages": pages, **figures.summary()}))


if __name__ == "__main__":
    main()
