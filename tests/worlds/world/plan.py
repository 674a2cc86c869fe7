"""The plan of a life: engines, who asks them for what and when, and what goes wrong. Everything follows from a seed."""

from __future__ import annotations

import random
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Literal, Self, get_args

from asyncengine.config import EngineConfig
from asyncengine.grammar.spec import Grammar
from asyncengine.options import RequestKeywords
from asyncengine.policies import POLICIES
from asyncengine.sampling_params import SamplingParams

VOCABULARY, EOS = 97, 1
Style = Literal["result", "stream", "slow", "leave", "drop", "cancel", "abort", "abort by id"]
STYLES: tuple[Style, ...] = get_args(Style)
"""The ways of a caller: await the whole answer; read it; read it slowly; leave it after some chunks; drop it without a
word; be cancelled; abort it and read on."""
Caller = Literal["home", "loop", "thread"]
"""A task on the first loop, one on a loop of another thread, or a plain thread."""


@dataclass(frozen=True)
class Call:
    """One request, and how its caller goes about it."""

    number: int
    at: float
    """Seconds from the start."""
    engine: int
    caller: Caller
    style: Style
    prompt: tuple[int, ...]
    params: SamplingParams
    options: RequestKeywords
    patience: float
    """Seconds between two chunks of a slow reader, or until one cancels or aborts."""
    chunks: int
    """Chunks that one reads who leaves."""
    grammar: tuple[int, int, str] | None
    """Remainder, length and kind of a grammar of letters (`device`)."""


@dataclass(frozen=True)
class Fault:
    """Something that goes wrong with an engine's device, at its first step from that moment on; or an update."""

    kind: Literal["row", "dies", "hang", "slow", "wait", "recompute"]
    """A row fails, the step raises, it lasts longer than the hard limit, or than the soft one; an update's mode."""
    at: float
    engine: int

    @property
    def is_update(self) -> bool:
        return self.kind in ("wait", "recompute")


@dataclass(frozen=True)
class Setup:
    """One engine."""

    config: EngineConfig
    num_pages: int
    num_states: int
    device: Literal["thread", "brief", "asynchronous"]
    pace: float
    """Seconds of a step, on average."""
    eos_every: int


@dataclass(frozen=True)
class Plan:
    """Everything that happens in a life, but for the order in which threads and callbacks run."""

    seed: int
    setups: tuple[Setup, ...]
    calls: tuple[Call, ...]
    faults: tuple[Fault, ...]
    hosted: bool
    blocking: bool
    """Hosted engines are closed by a thread without a loop."""
    closing: Literal["late", "early", "drain", "lost"]
    """Engines are closed when all is done; in the midst, at once or after a while; or their loop just ends."""
    close_at: float
    drain_timeout: float | None
    shuffled: bool
    delay: float
    """Most seconds that a message between loops is on its way."""
    switching: float
    stalling: float
    stored: bool
    """Prefixes are kept on a disk, and a second life begins with what is left of them."""
    interrupted: float
    """Probability of a pause before a line of the engine's code; 0: only where a thread may wait."""

    def without(self, calls: Collection[int] = (), faults: Collection[int] = ()) -> Self:
        """The plan without the calls of these numbers and the faults in these places."""
        kept = tuple(fault for place, fault in enumerate(self.faults) if place not in faults)
        return replace(self, calls=tuple(call for call in self.calls if call.number not in calls), faults=kept)

    @property
    def deadly(self) -> set[int]:
        """Engines that may die."""
        return {fault.engine for fault in self.faults if fault.kind in ("dies", "hang")}


def make_plan(seed: int) -> Plan:
    """The plan that a seed stands for."""
    rng = random.Random(f"plan {seed}")
    span = rng.choice([3.0, 10.0, 10.0, 60.0, 600.0, 3600.0])
    setups = tuple(_make_setup(rng) for _ in range(rng.choice([1, 1, 1, 2])))
    hosted = rng.random() < 0.5
    closing = rng.choice(["late", "late", "late", "early", "drain", "early" if hosted else "lost"])
    faults = tuple(_make_fault(rng, span, len(setups)) for _ in range(rng.choice([0, 0, 1, 2, 4])))
    return Plan(
        seed, setups, _make_calls(rng, span, len(setups)), faults, hosted,
        blocking=rng.random() < 0.5,
        closing=closing,  # type: ignore[arg-type]
        close_at=rng.random() * span,
        drain_timeout=rng.choice([None, 0.0, 1.0, 60.0]),
        shuffled=rng.random() < 0.5,
        delay=rng.choice([0.0, 0.01, 1.0, 20.0]),
        switching=rng.choice([0.02, 0.2, 0.5]),
        stalling=rng.choice([0.0, 0.002, 0.01, 0.05]),
        stored=random.Random(f"stored {seed}").random() < 0.5,
        interrupted=rng.choice([0.0, 0.0, 0.0, 0.2]),
    )  # fmt: skip


def _make_setup(rng: random.Random) -> Setup:
    config = EngineConfig(
        policy=rng.choice([*POLICIES]),
        page_size=rng.choice([2, 4, 16]),
        max_num_seqs=rng.choice([1, 2, 4, 16]),
        max_num_batched_tokens=rng.choice([2, 7, 16, 64, 1000]),
        prefix_caching=rng.random() < 0.8,
        max_passes=rng.choice([1, 4, 64]),
        preempt_every=rng.choice([None, None, 3, 7]),
        max_steps_in_flight=rng.choice([1, 1, 2]),
        max_queued_requests=rng.choice([None, None, 0, 3]),
        when_full=rng.choice(["error", "wait"]),
        waiting_timeout=rng.choice([None, None, None, 20.0]),
        request_timeout=rng.choice([None, None, None, 300.0]),
        inter_token_timeout=rng.choice([None, None, None, 60.0]),
        grammar_timeout=rng.choice([2.0, 10.0]),
        grammar_workers=rng.choice([1, 2]),
        step_soft_limit=40.0,
        step_hard_limit=rng.choice([100.0, 600.0]),
        check_every=rng.choice([1, 7, 1000]),
        kv_cache_write=rng.choice(["through", "on_eviction"]),
    )
    return Setup(
        config=config,
        num_pages=3 + 120 // config.page_size + rng.choice([0, 5, 40]),
        num_states=rng.choice([0, 0, 0, 4, 20]),
        device=rng.choice(["thread", "brief", "asynchronous"]),
        pace=rng.choice([0.02, 0.3, 2.0]),
        eos_every=rng.choice([0, 20]),
    )


def _make_fault(rng: random.Random, span: float, engines: int) -> Fault:
    kind = rng.choice(["row", "row", "dies", "hang", "slow", "wait", "recompute"])
    return Fault(kind, rng.random() * span, rng.randrange(engines))  # type: ignore[arg-type]


def _make_calls(rng: random.Random, span: float, engines: int) -> tuple[Call, ...]:
    """Calls come in bursts, with shared prefixes."""
    prefixes = [_tokens(rng, rng.choice([0, 4, 16, 33])) for _ in range(3)]
    bursts = [rng.random() * span for _ in range(rng.choice([1, 2, 6]))]
    calls = []
    for number in range(rng.choice([2, 6, 12, 24])):
        caller: Caller = rng.choice(["home", "home", "loop", "thread"])
        style: Style = rng.choice([*STYLES, "result", "stream"])
        grammar = None
        if rng.random() < 0.25:
            grammar = rng.randrange(5), rng.randrange(1, 12), rng.choice(["good", "good", "good", "slow", "broken"])
        params = SamplingParams(
            temperature=0.0,
            seed=rng.choice([0, 0, 1]),
            max_tokens=rng.randrange(1, 40),
            n=rng.choice([1, 1, 1, 3]),
            logprobs=rng.random() < 0.1,
            stop_token_ids=(7,) if rng.random() < 0.1 else (),
            grammar=grammar and Grammar.regex("-".join(map(str, grammar))),
            on_budget=rng.choice(["close", "truncate"]),
        )
        options: RequestKeywords = {
            "request_id": f"call-{number}",
            "priority": rng.randrange(3),
            "timeout": rng.choice([None] * 8 + [0.5, 5.0, 100.0]),
            "cache_salt": rng.choice([None, None, None, "tenant"]),
            "tenant": rng.choice([None, "a", "b"]),
        }
        calls.append(
            Call(
                number, rng.choice(bursts) + rng.random() * rng.choice([0.0, 0.5, 10.0]), rng.randrange(engines),
                caller, "drop" if caller == "thread" and style == "cancel" else style,
                (*rng.choice(prefixes), *_tokens(rng, rng.randrange(1, 20))), params, options,
                rng.choice([0.01, 1.0, 30.0]), rng.randrange(1, 4), grammar,
            )
        )  # fmt: skip
    return tuple(calls)


def _tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(2, VOCABULARY) for _ in range(count)]
