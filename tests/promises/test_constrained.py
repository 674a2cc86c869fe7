"""Constrained generation on a real model against a plain loop of transformers, mask and matcher (lines 4, 5, 15)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from support.constrained_reference import constrained_reference
from support.data import cases_of
from support.small_grammars import FORCED, PERSON, TREE
from support.worded_model import VOCAB, Reference, make_worded_model

from asyncengine import AsyncEngine, SamplingParams
from asyncengine.assembly.grammars import make_grammars
from asyncengine.config import EngineConfig
from asyncengine.errors import BudgetTooSmall
from asyncengine.grammar import Grammar
from asyncengine.grammar.llguidance_backend import LlguidanceBackend
from asyncengine.grammar.matcher import Matcher
from asyncengine.info import ModelInfo
from asyncengine.text.tokenizer import load_tokenizer

GRAMMARS: list[Grammar | None] = [
    Grammar.json_schema(PERSON),
    None,
    Grammar.json_schema(FORCED, whitespace="compact"),
    Grammar.regex(r"[a-z]+( [a-z]+){2,}\."),
    Grammar.choice(["yes", "no", "not enough information about the name", "not enough"]),
    None,
    Grammar.json_schema(TREE),
    Grammar.json_schema({"type": "object"}),
]
TEXTS = ["Who is there?", "The", "A list of things, with many words in it, so that it is longer than a page.", "x"]
BUDGETS = (60, 17, 33, 25)


class Desk:
    """The model, what compiles for it, and what its answers must be."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.reference = Reference(path)
        self.tokenizer: Any = load_tokenizer(str(path), EngineConfig())
        info = ModelInfo("worded", VOCAB, 512, (2, 0), "float32", "cpu", 2, 16)
        service = make_grammars(self.tokenizer, info.eos_token_ids, info.vocab_size, EngineConfig())
        assert service is not None
        self.backend: Any = service.make()
        assert isinstance(self.backend, LlguidanceBackend)
        self.answers = cache(self._answers)
        self.template = cache(self.backend.compile)
        self.jobs = [
            self._job(grammar, index + index // 8, index * 3 + index // 8) for index, grammar in enumerate(GRAMMARS * 2)
        ]

    def engine(self, **settings: Any) -> Any:
        return AsyncEngine.from_pretrained(self.path, dtype="float32", kv_cache_memory="4MB", num_threads=1, **settings)

    def _job(self, grammar: Grammar | None, text: int, budget: int) -> tuple[list[int], Grammar | None, int]:
        least = 1 if grammar is None else self.template(grammar).min_tokens
        return self.tokenizer.encode(TEXTS[text % 4]), grammar, max(least, BUDGETS[budget % 4])

    def _answers(self, jump: bool) -> list[tuple[list[int], str]]:
        """The answers that all jobs must get, each as if alone."""
        made = []
        for prompt, grammar, budget in self.jobs:
            if grammar is None:
                tokens = self.reference.greedy(prompt, budget)
                made.append((tokens, "length" if tokens[-1] not in (0, 2) else "stop"))
            else:
                made.append(self.answer(prompt, grammar, budget, jump=jump))
        return made

    def answer(self, prompt: list[int], grammar: Grammar, budget: int, *, jump: bool) -> tuple[list[int], str]:
        matcher = Matcher(self.template(grammar), budget, "close")
        choose = self.reference.choose
        return constrained_reference(choose, self.backend.vocabulary, prompt, matcher, budget, jump=jump)


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Desk:
    return Desk(make_worded_model(tmp_path_factory.mktemp("worded")))


def greedy(grammar: Grammar | None, max_tokens: int, **changes: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, grammar=grammar, **changes)


SETTINGS: dict[str, dict[str, Any]] = cases_of(__file__)


@pytest.mark.parametrize("name", SETTINGS)
async def test_greedy_equals_the_plain_loop(name: str, desk: Desk) -> None:
    """Constrained and free rows share batches, whatever the schedule; and each runs alone."""
    settings = SETTINGS[name]
    expected = desk.answers(settings.get("jump_forward", True))
    async with await desk.engine(**settings) as engine:
        made = await asyncio.gather(*(engine.generate(prompt, greedy(*rest)) for prompt, *rest in desk.jobs))
        for job, one, answer in zip(desk.jobs, made, expected, strict=True):
            assert (one.token_ids, one.finish_reason) == answer, (name, job)
        if name.startswith("unlimited"):
            for (prompt, *rest), answer in zip(desk.jobs, expected, strict=True):
                assert (await engine.generate(prompt, greedy(*rest))).token_ids == answer[0], "alone"
        stats, counters = engine.stats(), engine.core.loop.scheduler.counters
        assert (stats.preemptions > 0) == ("preempted" in name)
        assert (counters.forced_tokens > 50) == ("no jumps" not in name)
        assert not any(stats.requests.values())


async def test_what_the_plain_loop_answers_is_worth_comparing(desk: Desk) -> None:
    """Valid, of both endings, and with jumps that save steps."""
    jumping, stepping = desk.answers(True), desk.answers(False)
    assert {reason for _, reason in jumping} == {"stop", "length"}
    checks: dict[int, Callable[[str], Any]] = {
        0: lambda text: jsonschema.validate(json.loads(text), PERSON),
        2: lambda text: jsonschema.validate(json.loads(text), FORCED),
        6: lambda text: jsonschema.validate(json.loads(text), TREE),
        7: lambda text: jsonschema.validate(json.loads(text), {"type": "object"}),
    }
    for answers in (jumping, stepping):
        for index, (tokens, _) in enumerate(answers):
            text = desk.tokenizer.decode([token for token in tokens if token not in (0, 2)])
            checks.get(index % 8, lambda text: None)(text)
    assert len({tuple(tokens) for tokens, _ in jumping}) > 10


async def test_logprobs_are_the_models_and_there_are_no_jumps(desk: Desk) -> None:
    """Every token has its logprob under the model's own distribution, steered ones too."""
    grammar = Grammar.json_schema(PERSON)
    prompt = desk.tokenizer.encode(TEXTS[0])
    async with await desk.engine(max_num_batched_tokens=7) as engine:
        for budget in (60, 14):
            made = await engine.generate(prompt, greedy(grammar, budget, top_logprobs=2))
            answer = desk.answer(prompt, grammar, budget, jump=False)
            assert (made.token_ids, made.finish_reason) == answer
            scores = torch.log_softmax(desk.reference.logits(prompt + made.token_ids), dim=-1)
            assert made.logprobs is not None
            assert len(made.logprobs) == len(made.token_ids)
            for place, (entry, token) in enumerate(zip(made.logprobs, made.token_ids, strict=True), len(prompt) - 1):
                assert entry.token_id == token
                assert entry.logprob == pytest.approx(float(scores[place, token]), abs=2e-5)
                assert entry.top[0].token_id == int(scores[place].argmax())
        assert engine.core.loop.scheduler.counters.forced_tokens == 0


async def test_stop_strings_end_a_constrained_output_inside_forced_tokens_too(desk: Desk) -> None:
    prompt = desk.tokenizer.encode(TEXTS[0])
    forced = Grammar.json_schema(FORCED, whitespace="compact")
    words = Grammar.regex("[a-z ]{30,}")
    async with await desk.engine() as engine:
        for grammar, chosen in ((forced, "and the age"), (forced, '":"noth'), (words, None)):
            whole = (await engine.generate(prompt, greedy(grammar, 60))).text
            stop = chosen or whole[7:10]
            made = await engine.generate(prompt, greedy(grammar, 60, stop=[stop]))
            assert made.finish_reason == "stop"
            assert made.text == whole[: whole.index(stop)]
            kept = await engine.generate(prompt, greedy(grammar, 60, stop=[stop], include_stop=True))
            assert kept.text == whole[: whole.index(stop) + len(stop)]


async def test_least_length_and_ignored_ends(desk: Desk) -> None:
    """No end of sequence before `min_tokens`, but a grammar that is complete ends the output all the same."""
    prompt = desk.tokenizer.encode(TEXTS[1])
    async with await desk.engine() as engine:
        digits = Grammar.regex("[0-9]*")
        for least in (0, 9, 20):
            bias = {2: 100.0}
            made = await engine.generate(prompt, greedy(digits, 30, min_tokens=least, logit_bias=bias))
            assert made.finish_reason == "stop"
            assert len(made.token_ids) == least + 1  # the end comes as soon as it may
            assert made.text.isdigit() or not least
        made = await engine.generate(prompt, greedy(Grammar.choice(["ab"]), 30, min_tokens=20))
        assert (made.text, made.finish_reason) == ("ab", "stop")
        for grammar in (Grammar.choice(["ab"]), Grammar.json_schema(PERSON)):
            one = await engine.generate(prompt, greedy(grammar, 40))
            two = await engine.generate(prompt, greedy(grammar, 40, ignore_eos=True))
            assert (one.token_ids, one.finish_reason) == (two.token_ids, two.finish_reason)


async def test_a_seed_gives_the_same_sample_in_any_schedule(desk: Desk) -> None:
    grammar = Grammar.json_schema(PERSON)
    prompt = desk.tokenizer.encode(TEXTS[2])

    def drawn(seed: int, n: int = 1) -> SamplingParams:
        return SamplingParams(temperature=1.2, top_k=50, seed=seed, max_tokens=40, grammar=grammar, n=n)

    outputs = []
    for settings in ({}, {"max_num_batched_tokens": 16, "preempt_every": 5, "prefix_caching": False}):
        async with await desk.engine(**settings) as engine:
            alone = await engine.generate(prompt, drawn(7))
            others = (engine.generate(prompt, drawn(seed)) for seed in range(8))
            group, *crowd = await asyncio.gather(engine.generate(prompt, drawn(7, 3)), *others)
            outputs += [alone.token_ids, group.token_ids, crowd[7].token_ids]
            texts = [sample.text for sample in group.samples] + [one.text for one in crowd]
            for text in texts:
                jsonschema.validate(json.loads(text), PERSON)
            assert len(set(texts)) > 6
    assert all(tokens == outputs[0] for tokens in outputs)


async def test_a_stream_brings_forced_tokens_in_order(desk: Desk) -> None:
    async with await desk.engine() as engine:
        for prompt, grammar, budget in desk.jobs[:8]:
            whole = await engine.generate(prompt, greedy(grammar, budget))
            chunks = [chunk async for chunk in engine.stream(prompt, greedy(grammar, budget))]
            assert [token for chunk in chunks for token in chunk.token_ids] == whole.token_ids
            assert "".join(chunk.text for chunk in chunks) == whole.text
            assert [chunk.finish_reason for chunk in chunks if chunk.finish_reason] == [whole.finish_reason]
            assert chunks[-1].usage is not None
            assert chunks[-1].usage.completion_tokens == len(whole.token_ids)


async def test_the_context_is_a_budget_too(desk: Desk) -> None:
    """`max_tokens` left out: the output is closed before the context ends, and refused where nothing fits into it."""
    prompt = desk.tokenizer.encode(TEXTS[0])
    grammar = Grammar.json_schema(PERSON)
    async with await desk.engine(max_model_len=len(prompt) + 30) as engine:
        made = await engine.generate(prompt, SamplingParams(temperature=0, grammar=grammar))
        assert made.finish_reason == "length"
        jsonschema.validate(json.loads(made.text), PERSON)
        with pytest.raises(BudgetTooSmall):
            await engine.generate([*prompt, *range(9, 34)], SamplingParams(temperature=0, grammar=grammar))
