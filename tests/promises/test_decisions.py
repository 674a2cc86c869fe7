"""Decisions: the numbers of transformers' pipeline, the same to the bit in any company, errors by name."""

from __future__ import annotations

import asyncio
import gc
import json
import random
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import transformers
from support.data import cases_of
from support.fake_engine import until
from support.long import TIMES
from support.worded_model import make_worded_model
from transformers import pipeline

from asyncengine import DEMO_MODEL, AsyncEngine, Engine, InvalidParameter, QueueFull, SamplingParams, UnsupportedModel
from asyncengine.engine import prefix_store
from asyncengine.engine.decisions import DecisionCall, Pictures
from asyncengine.events import RequestDone
from asyncengine.testing.leaks import assert_nothing_held

QUESTIONS: dict[str, Any] = cases_of(__file__)
STATES: tuple[Any, ...] = ("I was charged twice. I want my money back.", {"mail": "hällo", "n": [1, 2.5, None, True]})


@pytest.fixture
async def engine() -> AsyncIterator[AsyncEngine]:
    async with await AsyncEngine.from_pretrained(DEMO_MODEL, dtype="float32", kv_cache_memory="8MB") as engine:
        yield engine


async def compare_with_the_pipeline(folder: Path) -> None:
    """Each number of each answer, to 1e-4."""
    oracle = pipeline("decision", model=str(folder), dtype="float32")
    async with await AsyncEngine.from_pretrained(folder, dtype="float32", kv_cache_memory="8MB") as engine:
        for state in STATES:
            wanted = oracle({"state": state, "questions": QUESTIONS})
            made = await engine.decide(state, QUESTIONS)
            assert list(made.answers) == list(QUESTIONS)
            for name, answer in made.answers.items():
                assert answer.details.keys() == wanted[name].keys()
                for key, value in wanted[name].items():
                    if isinstance(value, float):
                        assert answer.details[key] == pytest.approx(value, abs=1e-4), (name, key)
                assert answer.probabilities == pytest.approx(
                    wanted[name].get("probabilities", answer.probabilities), abs=1e-4
                )
                assert sum(answer.probabilities.values()) == pytest.approx(1)
                assert 0 <= answer.confidence <= 1


async def test_equals_the_pipeline_of_transformers() -> None:
    await compare_with_the_pipeline(DEMO_MODEL)


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        (transformers.LlamaConfig, {}),
        (transformers.Qwen3Config, {}),
        (transformers.Gemma3TextConfig, {"sliding_window": 32, "query_pre_attn_scalar": 12}),
    ],
)  # fmt: skip
async def test_random_models_of_three_families_equal_it(kind: Any, more: dict[str, Any], tmp_path: Path) -> None:
    make_worded_model(tmp_path, kind=kind, **more)
    shutil.copy(DEMO_MODEL / "chat_template.jinja", tmp_path)
    await compare_with_the_pipeline(tmp_path)


@pytest.mark.parametrize(
    "settings", [{}, {"prefix_caching": False}, {"preempt_every": 3, "max_num_batched_tokens": 24}]
)
async def test_same_to_the_bit_in_any_company(settings: dict[str, Any]) -> None:
    start = AsyncEngine.from_pretrained(DEMO_MODEL, dtype="float32", kv_cache_memory="16MB", **settings)
    async with await start as engine:
        alone = {name: (await engine.decide(STATES[0], {name: each}))[name] for name, each in QUESTIONS.items()}

        async def chat(seed: int) -> None:
            await engine.generate(f"A story {seed}", SamplingParams(max_tokens=40, seed=seed, ignore_eos=True))

        company = [asyncio.ensure_future(chat(seed)) for seed in range(6)]
        turned = dict(reversed(QUESTIONS.items()))
        made = await asyncio.gather(*(engine.decide(STATES[0], each) for each in (QUESTIONS, turned, QUESTIONS)))
        await asyncio.gather(*company)
        for decision in made:
            assert decision.answers == alone
        assert made[0].usage.completion_tokens == len(QUESTIONS)
        again = await engine.decide(STATES[0], QUESTIONS)
        assert again.answers == alone
        if settings.get("prefix_caching", True):
            assert again.usage.cached_tokens > again.usage.prompt_tokens // 2


async def test_files_of_a_model_set_labels_temperatures_and_prompt(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(DEMO_MODEL, folder)
    content = {"labels": {"choice": ["1", "2", "3"]}, "temperature": {"choice": 2.5}, "noul_options": ["false", "true"]}
    (folder / "decision.json").write_text(json.dumps(content))
    template = "{{ state | tojson }} {{ question.instructions }} {{ question.labels | join('/') }}: <|mark|>"
    (folder / "decision_template.jinja").write_text(template)
    wanted = pipeline("decision", model=str(folder), dtype="float32")({"state": "now", "questions": QUESTIONS})
    async with await AsyncEngine.from_pretrained(folder, dtype="float32", kv_cache_memory="8MB") as engine:
        made = await engine.decide("now", QUESTIONS)
        assert made["tone"].probabilities == pytest.approx(wanted["tone"]["probabilities"], abs=1e-4)
        assert made["refund"].value == pytest.approx(wanted["refund"]["noul"], abs=1e-4)
    (folder / "decision_template.jinja").write_text("{{ state }}<|mark|>{{ question.instructions }}<|mark|>")
    async with await AsyncEngine.from_pretrained(folder, dtype="float32", kv_cache_memory="8MB") as engine:
        with pytest.raises(UnsupportedModel, match="several positions"):
            await engine.decide("now", QUESTIONS)


async def test_control_tokens_in_a_text_stay_text(engine: AsyncEngine) -> None:
    prompts = engine.core.decision_prompts()
    names = [name for name in engine.core.tokenizer.get_vocab() if prompts._control.fullmatch(name)]  # type: ignore[union-attr]
    assert names
    (question,) = prompts.questions({"q": {"type": "noul", "instructions": "".join(names)}})
    hostile = {f"key {names[0]}": ["".join(names), f"<|ma{names[0]}rk|>"]}
    none = Pictures({})
    usual, _ = prompts.prompt({"key": ["", ""]}, prompts.questions({"q": {"type": "noul"}})[0], none)
    control = {engine.core.tokenizer.get_vocab()[name] for name in names}  # type: ignore[union-attr]
    assert [
        token for token in prompts.prompt(prompts.parted(hostile, none), question, none)[0] if token in control
    ] == [token for token in usual if token in control]


@pytest.mark.parametrize(
    ("state", "questions", "named"),
    [
        ("x", {}, "questions"),
        ("x", [], "questions"),
        ("x", {"a": {"type": "box", "instructions": "?"}}, "box"),
        ("x", {"a": {"type": "choice", "criteria": {}}}, "criteria"),
        ("x", {"a": {"type": "choice", "criteria": dict.fromkeys(map(str, range(27)))}}, "at most 26"),
        ("x", {"a": {"type": "score", "criteria": ["one"], "more": 1}}, "more"),
        ({"a": {1, 2}}, QUESTIONS, "state"),
        (float("nan"), QUESTIONS, "state"),
        ("x " * 100_000, QUESTIONS, "state|prompt"),
    ],
)
async def test_errors_name_the_field(engine: AsyncEngine, state: Any, questions: Any, named: str) -> None:
    with pytest.raises(InvalidParameter, match=named):
        await engine.decide(state, questions)
    assert (await engine.decide("x", {"a": {"type": "noul"}}))["a"].type == "noul"


async def test_a_set_of_questions_starts_whole_or_not_at_all() -> None:
    start = AsyncEngine.from_pretrained(DEMO_MODEL, dtype="float32", kv_cache_memory="8MB", max_queued_requests=3)
    async with await start as engine:
        with pytest.raises(QueueFull):
            await engine.decide("x", QUESTIONS)
        three = dict(list(QUESTIONS.items())[:3])
        assert (await engine.decide("x", three)).answers.keys() == three.keys()


async def test_who_leaves_takes_all_questions_along(engine: AsyncEngine) -> None:
    known = (await engine.decide(STATES[0], QUESTIONS)).answers
    asked = [asyncio.ensure_future(engine.decide(STATES[0], QUESTIONS)) for _ in range(12)]
    asked += [asyncio.ensure_future(engine.decide(f"state {each}", QUESTIONS)) for each in range(12)]
    for turn, each in enumerate(asked):
        if turn % 2:
            await asyncio.sleep(0.001 * (turn % 5))
            each.cancel()
    made = await asyncio.gather(*asked, return_exceptions=True)
    assert all(isinstance(each, asyncio.CancelledError) or not isinstance(each, BaseException) for each in made)
    assert all(each.answers == known for each in made[:12] if not isinstance(each, BaseException))
    await engine.generate("x", SamplingParams(max_tokens=1))
    assert_nothing_held(engine.core)


async def test_the_same_to_the_bit_from_a_disk_after_a_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The usage counts what each question found, too, as the engine's statistics and its events do."""
    monkeypatch.setattr(prefix_store, "WORTH", 1e9)  # so small a model computes faster than any disk reads
    monkeypatch.setattr(prefix_store, "LEAST_PATIENCE", 100.0)
    state = {"mails": [STATES[0]] * 8}

    async def decide(**settings: Any) -> tuple[Any, int]:
        start = AsyncEngine.from_pretrained(DEMO_MODEL, dtype="float32", kv_cache_memory="8MB", **settings)
        heard = list[RequestDone]()
        async with await start as engine:
            engine.on_event(lambda event: heard.append(event) if isinstance(event, RequestDone) else None)
            made = await engine.decide(state, QUESTIONS)
            stats, usage = engine.stats(), made.usage
        counted = [(each.prompt_tokens, each.cached_tokens, each.restored_tokens) for each in (stats, usage)]
        assert counted[0] == counted[1]
        assert [(each.prompt_tokens, each.cached_tokens) for each in heard] == [counted[0][:2]]
        return made.answers, usage.restored_tokens

    expected = await decide()
    assert expected[1] == 0
    assert await decide(kv_cache_dir=tmp_path) == expected
    answers, restored = await decide(kv_cache_dir=tmp_path)
    assert answers == expected[0]
    assert restored > 100


async def test_decisions_and_chats_of_which_half_leave_hold_nothing() -> None:
    """`ASYNCENGINE_LONG=17`: a thousand of them."""
    rng = random.Random(62)
    start = AsyncEngine.from_pretrained(
        DEMO_MODEL, dtype="float32", kv_cache_memory="1MB", max_num_seqs=16, max_num_batched_tokens=64, num_threads=1
    )
    params = SamplingParams(max_tokens=80, seed=1, ignore_eos=True)
    states = [f"{STATES[0]} {number}" for number in range(5)]
    async with await start as engine:

        def ask(number: int) -> Any:
            state = states[number % len(states)]
            return (
                engine.decide(state, QUESTIONS)
                if number % 2
                else engine.chat([{"role": "user", "content": state}], params)
            )

        def told(outcome: Any) -> Any:
            return outcome.answers if hasattr(outcome, "answers") else outcome.token_ids

        alone = [told(await ask(number)) for number in range(2 * len(states))]

        async def visit(number: int) -> bool:
            """Whether it stayed to the end."""
            await asyncio.sleep(rng.random() * 0.02 * TIMES)
            task, leaves = asyncio.ensure_future(ask(number)), rng.random() < 0.6
            if leaves:
                last = engine.stats().steps + int(rng.random() ** 2 * 30)
                await until(lambda: task.done() or engine.stats().steps >= last)
                task.cancel()
            (outcome,) = await asyncio.gather(task, return_exceptions=True)
            if isinstance(outcome, asyncio.CancelledError):
                return False
            assert told(outcome) == alone[number % len(alone)]
            return True

        stayed = Counter(await asyncio.gather(*(visit(number) for number in range(60 * TIMES))))
        assert engine.stats().preemptions > 0
        assert min(stayed.values()) > 15 * TIMES
        await engine.generate("x", SamplingParams(max_tokens=1))
        assert_nothing_held(engine.core)
        gc.collect()
        assert not [each for each in gc.get_objects() if isinstance(each, DecisionCall)]


def test_many_threads_may_ask_first() -> None:
    """transformers puts another module in the place of its own while that is imported: who imports names from it
    meanwhile may find none of them."""
    code = """
import sys, threading
from types import SimpleNamespace
import transformers
from asyncengine.engine.decisions import DecisionPrompts
sys.setswitchinterval(1e-6)
made, together = [], threading.Barrier(24)
def ask():
    together.wait()
    made.append(DecisionPrompts(SimpleNamespace(folder=None), 10))
threads = [threading.Thread(target=ask) for _ in range(24)]
for thread in threads: thread.start()
for thread in threads: thread.join()
assert len(made) == 24
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_a_plain_thread_decides() -> None:
    with Engine.from_pretrained(DEMO_MODEL, dtype="float32", kv_cache_memory="8MB") as engine:
        assert engine.decide("x", QUESTIONS)["tone"].choice in QUESTIONS["tone"]["criteria"]


async def test_allowed_tokens(engine: AsyncEngine) -> None:
    allowed = SamplingParams(max_tokens=8, allowed_token_ids=[5, 40, 41], seed=3, logprobs=True)
    made = await engine.generate("Once", allowed)
    assert set(made.token_ids) <= {5, 40, 41}
    assert len(made.token_ids) == 8
    for wrong in ([], [-1], [10**9]):
        with pytest.raises(InvalidParameter, match="allowed_token_ids"):
            await engine.generate("x", SamplingParams(allowed_token_ids=wrong))
