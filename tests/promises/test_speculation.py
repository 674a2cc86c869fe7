"""Speculation is invisible (contract line 16), on the bundled model: the same answers to the bit, in fewer steps."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest
import torch
from support import small_grammars
from support.long import LONG
from support.planted_guesses import ALWAYS, GRAMMARS, plant, some_at_a_time

from asyncengine import AsyncEngine, Completion, Engine, SamplingParams
from asyncengine.config import EngineConfig
from asyncengine.demo import MODEL_PATH
from asyncengine.errors import BudgetTooSmall, InvalidParameter, ModelNotFound, OutOfMemory, UnsupportedModel
from asyncengine.execution.api import open_draft
from asyncengine.grammar import Grammar

QUOTE = "The red lamp stands on the table. The old clock hangs on the wall. The red lamp stands on the table."
CHATS = (
    f"Repeat this: {QUOTE}",
    "Tell me a story about a fox.",
    "Name five animals, then five colours, then five animals again.",
)
PARAMS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "warm": {"temperature": 1.0, "seed": 7},
    "truncated": {"temperature": 0.9, "top_k": 12, "top_p": 0.9, "min_p": 0.02, "seed": 8},
    "penalties": {
        "temperature": 0.7, "repetition_penalty": 1.2, "frequency_penalty": 0.3, "presence_penalty": 0.2, "seed": 9,
    },
    "biased and long": {"temperature": 0.0, "logit_bias": {300: 2.0, 17: -3.0}, "min_tokens": 40},
    "what was drawn": {
        "temperature": 0.8, "top_p": 0.95, "repetition_penalty": 1.1, "seed": 3, "logprobs_of": "sampled",
        "top_logprobs": 2,
    },
    "prompt scored": {"temperature": 0.0, "prompt_logprobs": True, "top_logprobs": 3},
}  # fmt: skip


async def answers(engine: AsyncEngine, every: int) -> list[Any]:
    """Answers to all kinds of requests, `every` at a time."""
    asked = [({"role": "user", "content": chat}, SamplingParams(max_tokens=48, logprobs=True, **params))
             for params in PARAMS.values() for chat in CHATS]  # fmt: skip
    for number, grammar in enumerate(GRAMMARS.values()):
        for chat in CHATS[1:]:
            params = SamplingParams(
                max_tokens=30, temperature=0.8, seed=number, grammar=grammar, logprobs=number % 2 == 0
            )
            asked.append(({"role": "user", "content": chat}, params))
    found = await some_at_a_time(asked, every, lambda one: engine.chat([one[0]], params=one[1]))
    return [
        (one.token_ids, one.text, one.finish_reason, one.logprobs, one.prompt_logprobs, one.usage.completion_tokens)
        for one in found
    ]


@pytest.mark.parametrize("settings", [{}, {"quantization": "int8"}] if LONG else [{}], ids=str)
async def test_answers_are_the_same(settings: dict[str, Any]) -> None:
    """Planted guesses beside those of the draft model, then these alone."""
    async with await AsyncEngine.from_pretrained("demo", speculation="off", **settings) as engine:
        expected = await answers(engine, 4)
        assert engine.info.no_speculation == "speculation is off"
        assert engine.stats().speculation is None
        steps = engine.stats().steps
    async with await AsyncEngine.from_pretrained("demo", **ALWAYS, draft_model="demo/draft", **settings) as engine:
        plant(engine, [one[0] for one in expected])
        assert await answers(engine, 3) == expected, "planted"
        counts = engine.stats().speculation
        assert counts is not None
        assert counts.accepted > 300
        assert counts.drafted - counts.accepted > 100
        assert engine.stats().steps < steps
        plant(engine, [])
        assert await answers(engine, 5) == expected, "by the draft model"
        later = engine.stats().speculation
        assert later is not None
        made = later.drafted - counts.drafted
        assert made == later.drafted_by_model - counts.drafted_by_model > 1000
        assert 0.1 * made < later.accepted - counts.accepted < made


SMALL = {name: small_grammars.made(name)[0] for name in small_grammars.NAMES if name != "mark"}
SHAPES = {**SMALL, **{f"other {name}": grammar for name, grammar in GRAMMARS.items()}}


async def least_budget(engine: AsyncEngine, grammar: Grammar) -> int:
    try:
        await engine.generate("a", SamplingParams(max_tokens=1, grammar=grammar))
    except BudgetTooSmall as error:
        return int(re.findall(r"takes (\d+) tokens", str(error))[0])
    return 1


async def test_fourteen_grammars_with_budgets_from_the_least_one_up() -> None:
    """Guesses come from lookup and from the draft model, which knows no grammar."""
    assert len(SHAPES) == 14
    least: dict[str, int] = {}

    async def all_answers(engine: AsyncEngine, every: int) -> list[Any]:
        asked = [
            SamplingParams(
                max_tokens=least[name] + more, temperature=0.7, seed=more, grammar=grammar, logprobs=more == 1
            )
            for more in (0, 1, 12)
            for name, grammar in SHAPES.items()
        ]
        given = [(CHATS[place % 3], one) for place, one in enumerate(asked)]
        found = await some_at_a_time(
            given, every, lambda one: engine.chat([{"role": "user", "content": one[0]}], params=one[1])
        )
        return [(one.token_ids, one.text, one.finish_reason, one.logprobs) for one in found]

    async with await AsyncEngine.from_pretrained("demo", speculation="off") as engine:
        for name, grammar in SHAPES.items():
            least[name] = await least_budget(engine, grammar)
        expected = await all_answers(engine, 7)
    async with await AsyncEngine.from_pretrained("demo", **ALWAYS, draft_model="demo/draft") as engine:
        assert await all_answers(engine, 7) == expected
        counts = engine.stats().speculation
        assert counts is not None
        assert counts.accepted_by_model > 30
        assert counts.accepted - counts.accepted_by_model > 0
        assert counts.drafted - counts.accepted > 300


async def test_adapters_in_float32() -> None:
    """Two adapters and none, alone and together; in bfloat16 nobody with an adapter is guessed for."""
    adapters = {"pirate": "demo/pirate", "json": "demo/json"}
    shared: dict[str, Any] = {"adapters": adapters, "kv_cache_memory": "32MiB"}

    async def all_answers(engine: AsyncEngine, every: int) -> list[Any]:
        asked = [(adapter, params, chat) for adapter in (*adapters, None) for chat in CHATS[:2]
                 for params in (PARAMS["greedy"], PARAMS["warm"])]  # fmt: skip

        def ask(one: tuple[str | None, dict[str, Any], str]) -> Coroutine[Any, Any, Completion]:
            adapter, fields, chat = one
            params = SamplingParams(max_tokens=30, logprobs=True, **fields)
            return engine.chat([{"role": "user", "content": chat}], params=params, adapter=adapter)

        found = await some_at_a_time(asked, every, ask)
        return [(one.token_ids, one.finish_reason, one.logprobs) for one in found]

    async with await AsyncEngine.from_pretrained("demo", dtype="float32", speculation="off", **shared) as engine:
        expected = await all_answers(engine, 1)
    settings = {**ALWAYS, **shared, "draft_model": "demo/draft"}
    async with await AsyncEngine.from_pretrained("demo", dtype="float32", **settings) as engine:
        assert await all_answers(engine, 1) == expected
        assert [one[0] for one in await all_answers(engine, 6)] == [one[0] for one in expected]
        counts = engine.stats().speculation
        assert counts is not None
        assert counts.drafted > 500
        assert counts.accepted > 150
    async with await AsyncEngine.from_pretrained("demo", **settings) as engine:
        await engine.chat([{"role": "user", "content": CHATS[0]}], adapter="pirate")
        counts = engine.stats().speculation
        assert counts is not None
        assert counts.drafted == 0


async def test_a_model_that_guesses_for_itself_is_never_wrong() -> None:
    """Guesses are made with the noise and the parameters of each request, over prefixes that others left, pages that
    were taken away and prompts that the model must catch up with."""
    settings: dict[str, Any] = {**ALWAYS, "kv_cache_memory": "5MiB", "max_num_seqs": 6, "preempt_every": 3,
                                "speculation_memory": 1}  # fmt: skip
    async with await AsyncEngine.from_pretrained("demo", draft_model="demo", **settings) as engine:
        asked = [("Read this twice. " + QUOTE * 8 * (number % 2) + CHATS[number % 3], params)
                 for number, params in enumerate([*PARAMS.values()] * 3)]  # fmt: skip
        await asyncio.gather(
            *(
                engine.chat([{"role": "user", "content": text}], params=SamplingParams(max_tokens=40, **params))
                for text, params in asked
            )
        )
        stats = engine.stats()
        assert stats.preemptions > 3
        assert stats.cached_tokens > 100
        assert stats.speculation is not None
        assert stats.speculation.accepted_by_model == stats.speculation.drafted_by_model > 200


@pytest.mark.parametrize(
    ("settings", "error", "named"),
    [
        ({"draft_model": "no/such/folder"}, ModelNotFound, "draft_model: no folder"),
        ({"draft_model": 3}, InvalidParameter, "draft_model: must be a folder, a hub id"),
        ({"draft_model": ""}, InvalidParameter, "draft_model: must be a folder, a hub id"),
        ({"draft_model": " "}, InvalidParameter, "draft_model: must be a folder, a hub id"),
        ({"draft_model": "demo/draft", "speculation": "off"}, InvalidParameter, "draft_model.*off"),
        ({"draft_model": "demo/draft", "task": "embed"}, InvalidParameter, "draft_model.*writes nothing"),
        ({"draft_model": "demo/draft", "attention_backend": "torch"}, InvalidParameter, "draft_model.*torch"),
        ({"draft_model": "demo/draft", "draft_costs": (1.0,)}, InvalidParameter, "draft_costs"),
        ({"draft_model": "words"}, InvalidParameter, "draft_model.*token .* is b"),
        ({"draft_model": "narrow"}, InvalidParameter, "draft_model.*has 600 tokens where the model has 2048"),
        ({"draft_model": "states"}, InvalidParameter, "draft_model.*states"),
        ({"draft_model": "head"}, UnsupportedModel, "draft_model.*DFlash.*guesses by the hidden states of the model"),
        ({"draft_model": "huge"}, OutOfMemory, "draft_model"),
    ],
    ids=lambda value: next(iter(value.values())) if isinstance(value, dict) else "",
)
def test_what_is_no_draft_model_is_refused(
    settings: dict[str, Any], error: type[Exception], named: str, tmp_path: Path
) -> None:
    shape = json.loads((MODEL_PATH / "config.json").read_text())
    changes: dict[str, dict[str, Any]] = {
        "words": {}, "narrow": {"vocab_size": 600}, "head": {"architectures": ["DFlashDraftModel"]},
        "huge": {"num_hidden_layers": 2000, "hidden_size": 2048, "intermediate_size": 65536},
        "states": {"model_type": "mamba2", "num_heads": 8, "head_dim": 64, "state_size": 16, "n_groups": 1,
                   "expand": 2, "conv_kernel": 4, "num_hidden_layers": 1},
    }  # fmt: skip
    kind = settings["draft_model"]
    if kind in changes:
        (tmp_path / "config.json").write_text(json.dumps(shape | changes[kind]))
        settings = {**settings, "draft_model": str(tmp_path), "load_format": "dummy"}
    if kind == "words":
        words = json.loads((MODEL_PATH / "tokenizer.json").read_text(encoding="utf-8"))
        ids = words["model"]["vocab"]
        ids["the"], ids["an"] = ids["an"], ids["the"]
        (tmp_path / "tokenizer.json").write_text(json.dumps(words), encoding="utf-8")
        (tmp_path / "tokenizer_config.json").write_text((MODEL_PATH / "tokenizer_config.json").read_text())
    with pytest.raises(error, match=named):
        Engine.from_pretrained("demo", **settings)


def test_a_machine_that_cannot_guess_says_so_and_runs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A program that names a draft model starts on any machine: guesses change no answer. Others sum as torch does."""
    packed = pytest.importorskip("asyncengine.kernels.cpu.packed")
    monkeypatch.setattr(packed, "cpu_has", lambda *features: False)
    caplog.set_level("INFO", "asyncengine")
    with Engine.from_pretrained("demo", draft_model="demo/draft", dtype="float32") as engine:
        assert engine.info.attention == "compiled"
        assert engine.info.no_speculation == engine.info.batch_variance
        assert "this CPU has no AVX2 (quantization=" in str(engine.info.batch_variance)
        assert engine.generate("Once upon a time", SamplingParams(max_tokens=3)).token_ids
    (warning,) = (each.getMessage() for each in caplog.records if each.levelname == "WARNING")
    assert warning.startswith("draft_model='demo/draft' is not used, and answers are the same without: this CPU has no")
    (line,) = (each.getMessage() for each in caplog.records if each.getMessage().startswith("demo in float32 on cpu"))
    assert "answers may depend on those computed beside them, as this CPU has no AVX2" in line
    assert line.endswith("nothing is guessed, for the same reason")


def test_a_machine_that_can_says_so(caplog: pytest.LogCaptureFixture) -> None:
    """The setting that the reason names is given, for the checkpoint's type would be another unit's."""
    caplog.set_level("INFO", "asyncengine")
    with Engine.from_pretrained("demo", quantization="int8") as engine:
        assert engine.info.no_speculation is engine.info.batch_variance is None
    (line,) = (each.getMessage() for each in caplog.records if each.getMessage().startswith("demo in bfloat16 on cpu"))
    assert line.endswith("answers are the same in any company; guesses ahead")


def test_a_draft_model_is_left_alone_where_auto_finds_a_gpu(caplog: pytest.LogCaptureFixture) -> None:
    gpu = torch.device("cuda")
    assert open_draft(EngineConfig(draft_model="demo/draft"), gpu) is None
    assert "draft_model='demo/draft' is not used" in caplog.text
    with pytest.raises(InvalidParameter, match="runs on a CPU only, not on cuda"):
        open_draft(EngineConfig(draft_model="demo/draft", device="cuda"), gpu)


def test_predictions() -> None:
    """A prediction that is right is computed many tokens at a time; one that is not costs nothing but time."""
    params = SamplingParams(temperature=0.0, max_tokens=60)
    chat = [{"role": "user", "content": CHATS[0]}]
    with Engine.from_pretrained("demo", speculation="off") as engine:
        plain = engine.chat(chat, params=params)
        assert engine.chat(chat, params=params, prediction="ignored").usage.accepted_prediction_tokens == 0
    costs = (1.0, 1.02, 1.08)
    with Engine.from_pretrained("demo", speculation_costs=costs, speculation_memory=1) as engine:
        for prediction in (plain.text, list(plain.token_ids), {"type": "content", "content": plain.text}):
            before = engine.stats().steps
            found = engine.chat(chat, params=params, prediction=prediction)
            assert found.token_ids == plain.token_ids
            assert found.usage.accepted_prediction_tokens > 0.6 * len(plain.token_ids)
            assert engine.stats().steps - before < 0.5 * len(plain.token_ids)
        edited = list(plain.token_ids)
        edited[3:4] = [edited[3] + 1, edited[3] + 2]  # as if two words stood there before one did
        found = engine.chat(chat, params=params, prediction=edited)
        assert found.token_ids == plain.token_ids
        assert found.usage.rejected_prediction_tokens > 0
        assert found.usage.accepted_prediction_tokens > 0.3 * len(plain.token_ids)
        off = engine.chat(chat, params=params, prediction=plain.text, speculation=False)
        assert (off.token_ids, off.usage.accepted_prediction_tokens) == (plain.token_ids, 0)


def test_any_prediction_changes_nothing_but_time() -> None:
    """Empty, longer than the context, as long as the prompt, with special tokens, or of something else."""
    params = SamplingParams(temperature=0.0, max_tokens=30)
    costs = (1.0, 1.02, 1.08)
    chat = [{"role": "user", "content": CHATS[0]}]
    with Engine.from_pretrained("demo", dtype="float32", speculation_costs=costs) as engine:
        plain = engine.chat(chat, params=params, speculation=False)
        long = [*plain.token_ids, *[5] * 100_000]
        given = ("", [], {"type": "content", "content": []}, long, plain.text + " and" * 20_000, CHATS[0])
        specials = sorted(engine.info.eos_token_ids)
        for prediction in (*given, [*specials, *plain.token_ids], [*plain.token_ids, *specials]):
            found = engine.chat(chat, params=params, prediction=prediction)
            assert (found.token_ids, found.finish_reason) == (plain.token_ids, plain.finish_reason)
            if prediction is long:
                assert found.usage.accepted_prediction_tokens > 0.5 * len(plain.token_ids)


BAD: list[tuple[dict[str, Any], str]] = [
    ({"prediction": 3}, "prediction"), ({"prediction": {"type": "text", "content": "a"}}, "prediction"),
    ({"prediction": [{"type": "image_url"}]}, "prediction"), ({"prediction": [10**9]}, "below"),
    ({"prediction": "a\ud800"}, "prediction: is not valid Unicode"),
    ({"prediction": "a", "params": SamplingParams(n=2)}, "n is 2"), ({"speculation": "yes"}, "speculation"),
    ({"speculation": "lookup"}, 'speculation: must be .* "auto" or "off"'),
]  # fmt: skip


def test_bad_input() -> None:
    with Engine.from_pretrained("demo") as engine:
        for keywords, named in BAD:
            with pytest.raises(InvalidParameter, match=named):
                engine.generate("a", **keywords)
        tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
        with pytest.raises(InvalidParameter, match="tool_choice"):
            engine.chat([{"role": "user", "content": "a"}], tools=tools, tool_choice="required", prediction="a")
    for setting in (
        {"speculation": "maybe"}, {"speculation_tokens": 0}, {"speculation_tokens": 10**6},
        {"speculation_tokens": float("nan")}, {"speculation_costs": (1.0, -1.0, 1)}, {"speculation_memory": "x"},
    ):  # fmt: skip
        with pytest.raises(InvalidParameter, match=next(iter(setting))):
            Engine.from_pretrained("demo", **setting)
