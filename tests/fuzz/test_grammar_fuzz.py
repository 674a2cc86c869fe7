"""Constrained requests, equal however they are scheduled, recorded, and left (contract lines 2, 5, 14, 15)."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest
from fuzz.grammar_fuzz import GrammarLife
from support.constrained_reference import constrained_reference, fake_choice
from support.fake_engine import SteppedExecutor, Steps, idle, make_engine
from support.grammar_walks import text_of
from support.small_grammars import NAMES, shared_vocabulary, small_grammar
from support.small_vocabulary import EOS, LOGITS

from asyncengine import SamplingParams
from asyncengine.config import EngineConfig
from asyncengine.grammar.llguidance_backend import LlguidanceBackend
from asyncengine.grammar.matcher import Matcher
from asyncengine.grammar.service import GrammarService
from asyncengine.lora.admission import AdapterSlots
from asyncengine.request_spec import RequestSpec
from asyncengine.scheduler import Output
from asyncengine.scheduler.messages import GrammarReady
from asyncengine.testing import FakeExecutor, FakeModel, Recording, replay
from asyncengine.testing.leaks import assert_nothing_held

MODEL = FakeModel(LOGITS, EOS)


SCHEDULES: dict[str, dict[str, Any]] = {
    "alone": {"max_num_seqs": 1},
    "together": {},
    "together, no cache": {"prefix_caching": False},
    "chunks of 1": {"max_num_batched_tokens": 40, "long_prefill_token_threshold": 1},
    "chunks of 7, two in flight": {"max_num_batched_tokens": 7, "max_steps_in_flight": 2},
    "preempted": {"preempt_every": 2, "max_num_seqs": 6},
    "preempted, two in flight, no cache": {"preempt_every": 3, "max_steps_in_flight": 2, "prefix_caching": False},
    "little memory": {"pages": 40, "policy": "priority"},
}


def answers(settings: dict[str, Any]) -> dict[int, tuple[list[int], str]]:
    """The same 60 requests under any settings: ticket -> output and reason."""
    rng = random.Random(8)
    steps = Steps(**{"pages": 400, "model": MODEL, "page_size": 4, "check_every": 7, **settings})
    for index in range(60):
        prompt = [rng.randrange(2, LOGITS) for _ in range(rng.randrange(1, 30))]
        name, extra = rng.choice(NAMES), rng.randrange(20)
        if index % 5 == 0:
            steps.add(prompt, 12, priority=index % 3)
            continue
        template = small_grammar(name).template
        budget = template.min_tokens + extra
        params = SamplingParams(logprobs=index % 7 == 0)
        ticket = steps.add(prompt, budget, params=params, seed=index, needs_grammar=True, priority=index % 3)
        steps.apply(GrammarReady(ticket, Matcher(template, budget, "close")))
    steps.run()
    steps.assert_empty()
    assert steps.scheduler.counters.preemptions or not ("preempted" in settings or "pages" in settings)
    return {ticket: (steps.tokens[ticket], reason) for ticket, reason in steps.ended.items()}


def test_the_schedule_is_invisible() -> None:
    """Alone or not, preempted or not, any chunks, cache on or off: the same tokens and endings, run by run."""
    first, *others = [answers(settings) for settings in SCHEDULES.values()]
    assert len(first) == 60
    assert {reason for _, reason in first.values()} == {"stop", "length"}
    for name, found in zip(list(SCHEDULES)[1:], others, strict=True):
        assert found == first, name


def test_a_recording_with_grammars_replays_to_the_same_outputs_twice() -> None:
    """The recorded run used its matchers up; each replay gets fresh ones (contract line 14)."""
    for seed in (2, 13):
        life = GrammarLife(seed, faults=False)
        life.run()
        assert life.scheduler.counters.forced_tokens
        for _ in range(2):
            executor = FakeExecutor(life.recording.num_pages, life.config.page_size, life.executor.model)
            assert replay(life.recording, executor, AdapterSlots(life.adapters.max_loras)) == life.outputs


def test_a_fresh_matcher_is_an_equal_one_at_its_beginning() -> None:
    for name in NAMES:
        template = small_grammar(name).template
        budget = template.min_tokens + 5
        one = Matcher(template, budget, "close")
        runs = []
        for matcher in (one, one.fresh(), one.fresh().fresh()):
            runs.append(constrained_reference(fake_choice(MODEL), shared_vocabulary(), [5, 6], matcher, budget))
            small_grammar(name).validate(text_of(shared_vocabulary(), runs[-1][0]))
        assert runs[0] == runs[1] == runs[2]


def test_a_saved_recording_with_grammars_replays_to_the_same_outputs(tmp_path: Path) -> None:
    """Matchers are code; the grammars they are made of again are in the file."""
    templates = {small_grammar(name).grammar: small_grammar(name).template for name in NAMES}

    def matcher(asked: RequestSpec) -> Matcher:
        params = asked.params
        return Matcher(templates[params.grammar], asked.max_total - asked.prompt_len, params.on_budget)

    for seed in (3, 28):
        life = GrammarLife(seed, faults=False)
        life.run()
        loaded = Recording.load(life.recording.save(tmp_path / f"{seed}.jsonl"))
        for recording, matchers in ((loaded, matcher), (life.recording, None)):
            executor = FakeExecutor(recording.num_pages, recording.config.page_size, life.executor.model)
            assert replay(recording, executor, AdapterSlots(life.adapters.max_loras), matchers) == life.outputs
    with pytest.raises(ValueError, match="saved without its matchers"):
        replay(loaded, executor, AdapterSlots(2))


class Traffic:
    """Callers of one engine who leave at any moment and use the same few request ids at once again."""

    def __init__(self, engine: Any, seed: int) -> None:
        self.engine = engine
        self.rng = random.Random(seed)
        self.complete = 0
        self.left = 0

    async def caller(self, label: str, requests: int) -> None:
        for _ in range(requests):
            rng = self.rng
            prompt = [rng.randrange(2, LOGITS) for _ in range(rng.randrange(1, 25))]
            name = rng.choice([*NAMES, ""])
            budget = rng.randrange(40, 60) if name == "forced" else rng.randrange(14, 40)
            grammar = small_grammar(name).grammar if name else None
            params = SamplingParams(temperature=0, seed=rng.randrange(99), max_tokens=budget, grammar=grammar)
            stay = rng.randrange(30) if rng.random() < 0.4 else None
            await self._one(label, name, prompt, params, stay)

    async def _one(self, label: str, name: str, prompt: list[int], params: SamplingParams, stay: int | None) -> None:
        tokens: list[int] = []
        reasons: list[str] = []
        stream = self.engine.stream(prompt, params, request_id=label)
        async for chunk in stream:
            assert not reasons, "a chunk after the end"
            tokens += chunk.token_ids
            reasons += [chunk.finish_reason] if chunk.finish_reason else []
            if stay is not None and len(tokens) > stay and not reasons:
                self.left += 1
                if self.rng.random() < 0.5:
                    await stream.aclose()
                else:
                    assert self.engine.abort(label)  # and the id is used again at once
                break
        expected, reason = self._expected(name, prompt, params)
        if not reasons:
            assert tokens == expected[: len(tokens)]
            return
        self.complete += 1
        assert (tokens, reasons) == (expected, [reason])

    def _expected(self, name: str, prompt: list[int], params: SamplingParams) -> tuple[list[int], str]:
        seed, budget = params.seed or 0, params.max_tokens or 0
        if not name:
            tokens = MODEL.oracle(prompt, budget, seed, (EOS,))
            return tokens, "stop" if tokens[-1] == EOS else "length"
        template = small_grammar(name).template
        return constrained_reference(
            fake_choice(MODEL, seed), shared_vocabulary(), prompt, Matcher(template, budget, "close"), budget
        )


@pytest.mark.parametrize("depth", [1, 2])
async def test_callers_of_an_engine_leave_and_come_back_under_the_same_id(depth: int) -> None:
    """And what the engine recorded, with whatever its threads did meanwhile, replays to the same outputs."""
    recording, outputs = Recording(EngineConfig(), 120), []
    service = GrammarService(lambda: LlguidanceBackend(shared_vocabulary()), EngineConfig())
    engine = make_engine(
        executor=SteppedExecutor(120, 4, MODEL),
        eos=EOS,
        wiring={"grammars": service, "recorder": recording.record},
        max_steps_in_flight=depth,
        max_num_batched_tokens=24,
        preempt_every=7,
        check_every=1,
    )
    async with engine:
        recording.config = engine.core.config
        taken = engine.core.loop.scheduler.take_outputs

        def noted() -> list[Output]:
            outputs.extend(new := taken())
            return new

        engine.core.loop.scheduler.take_outputs = noted  # type: ignore[method-assign]
        traffic = Traffic(engine, depth)
        await asyncio.gather(*(traffic.caller(f"caller {index}", 8) for index in range(16)))
        await idle(engine)
        assert_nothing_held(engine.core)
        assert service.compiled == len(NAMES)
        stats = engine.stats()
        assert stats.preemptions > 10
    assert traffic.complete > 50
    assert traffic.left > 20
    assert len(outputs) > 500
    assert replay(recording, FakeExecutor(120, 4, MODEL)) == outputs
