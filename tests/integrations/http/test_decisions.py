"""Decisions over HTTP: the numbers of the engine in process, in OpenAI's form and in that of transformers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from support.data import cases_of
from support.http_server import serving
from transformers import AutoConfig, AutoTokenizer, JevConfig, JevForDecision
from transformers.decision import DecisionConfig
from transformers.models.jev.configuration_jev import JEV_TEMPLATE

from asyncengine import DEMO_MODEL, AsyncEngine
from asyncengine.integrations.http import app
from asyncengine.testing.leaks import assert_nothing_held

ROWS: dict[str, Any] = cases_of(__file__)

INPUT: list[Any] = [
    {"role": "user", "content": [{"type": "input_text", "text": "Mail:"}, {"type": "input_json", "data": {"a": [1]}}]},
    {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "Charged twice."}]},
]
STATE = [
    {"role": "user", "content": ["Mail:", {"a": [1]}]},
    INPUT[1],
    {"type": "function_call_output", "call_id": "c", "output": "Charged twice."},
]
QUESTIONS: list[Any] = ROWS["questions"]
OURS: dict[str, Any] = ROWS["ours"]


@pytest.fixture
async def engine() -> AsyncIterator[AsyncEngine]:
    async with await AsyncEngine.from_pretrained(DEMO_MODEL, dtype="float32", kv_cache_memory="16MB") as engine:
        yield engine


@pytest.fixture
async def url(engine: AsyncEngine) -> AsyncIterator[str]:
    async with serving(app(engine)) as url:
        yield url


async def test_openais_client_reads_the_engines_numbers(engine: AsyncEngine, url: str) -> None:
    wanted = await engine.decide(STATE, OURS)
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        made: Any = await client.decisions.create(model="demo", input=INPUT, questions=QUESTIONS)
    predicate, choice, score = made.answers
    assert [each.name for each in made.answers] == ["refund", None, "urgent"]
    assert predicate.probability == wanted["refund"].value
    assert [(each.value, each.probability) for each in choice.probabilities] == list(
        zip(["true", True, False], wanted["questions[1]"].probabilities.values(), strict=True)
    )
    named: dict[str, Any] = {"true": "true", "true (boolean)": True, "false": False}
    best = named[wanted["questions[1]"].choice]
    assert (type(choice.choice), choice.choice) == (type(best), best)
    assert (choice.confidence, score.score) == (wanted["questions[1]"].confidence, wanted["urgent"].value)
    assert [(each.value, each.label) for each in score.probabilities] == [(0, "low"), (1, "high")]
    assert [each.probability for each in score.probabilities] == list(wanted["urgent"].probabilities.values())
    usage = made.usage
    assert usage.input_tokens == usage.total_tokens == wanted.usage.prompt_tokens
    assert usage.input_tokens_details.cached_tokens > 0
    assert usage.output_tokens == usage.output_tokens_details.reasoning_tokens == 0


async def test_langchains_client_of_openais_form_reads_the_engines_numbers(engine: AsyncEngine) -> None:
    decisions = pytest.importorskip("langchain_openai.decisions")
    from langchain_core.messages import AIMessage, HumanMessage

    questions = {
        "refund": decisions.Predicate(instructions="Is a refund asked for?"),
        "which": decisions.Choice(instructions="Which?", choices={"true": "a text", True: None, False: None}),
        "urgent": decisions.Score(
            instructions="How urgent?", levels=["low", decisions.Level(label="high", description="today")]
        ),
    }
    ours = dict(zip(questions, OURS.values(), strict=True))
    states: Any = [
        ("Charged twice.", "Charged twice."),
        ([HumanMessage("Charged twice.")], [{"role": "user", "content": "Charged twice."}]),
        ([HumanMessage("Charged?"), AIMessage("Twice.")], None),
    ]
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app(engine))) as http:
        client = decisions.OpenAIDecisions(
            model="demo", base_url="http://app/v1", api_key="none", max_retries=0, http_async_client=http
        )  # fmt: skip
        made = await client.abatch([{"input": state, "questions": questions} for state, _ in states])
        for response, (_, state) in zip(made, states, strict=True):
            assert response.answers.keys() == questions.keys()
            assert response.request_id
            if state is None:
                continue
            wanted = await engine.decide(state, ours)
            assert response.predicates["refund"].probability == wanted["refund"].value
            assert list(response.choices["which"].probabilities) == ["true", True, False]
            assert list(response.choices["which"].probabilities.values()) == list(
                wanted["which"].probabilities.values()
            )
            assert response.scores["urgent"].score == wanted["urgent"].value
            assert response.usage.input_tokens == wanted.usage.prompt_tokens
        many = decisions.Choice(instructions="?", choices={str(number): None for number in range(27)})
        with pytest.raises(openai.BadRequestError, match=r"questions\[0\]"):
            await client.ainvoke({"input": "x", "questions": {"many": many}})


async def test_systemone_has_the_form_of_transformers(engine: AsyncEngine, url: str) -> None:
    wanted = await engine.decide(STATE, OURS)
    body = {"model": "demo", "state": STATE, "questions": OURS}
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:
        made = (await client.post("/v1/systemone", json=body)).json()
        assert made["answers"] == {name: answer.details for name, answer in wanted.answers.items()}
        assert made["usage"] == {"input_tokens": wanted.usage.prompt_tokens, "output_tokens": 0}
        for more, status, field in (
            ({"questions": {}}, 422, "questions"),
            ({"questions": {"a": {"type": "box"}}}, 422, "questions"),
            ({"state": None}, 422, "state"),
            ({"more": 1}, 422, "more"),
            ({"assets": {"i": {"data_base64": ""}}}, 400, "assets['i']"),
        ):
            refused = await client.post("/v1/systemone", json={**body, **more})
            assert (refused.status_code, refused.json()["error"]["param"]) == (status, field)


async def test_who_leaves_leaves_nothing(engine: AsyncEngine, url: str) -> None:
    body = {"model": "demo", "input": "word " * 300, "questions": [
        {"type": "predicate", "instructions": f"Is it {each}?"} for each in range(100)
    ]}  # fmt: skip
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:
        asked = asyncio.ensure_future(client.post("/v1/decisions", json=body))
        async with asyncio.timeout(60):
            while not sum(engine.stats().requests.values()):  # noqa: ASYNC110 - the engine tells nobody
                await asyncio.sleep(0.001)
            asked.cancel()
            while sum(engine.stats().requests.values()):  # noqa: ASYNC110
                await asyncio.sleep(0.001)
    assert engine.stats().finished["abort"] >= 1
    await engine.generate("x")
    assert_nothing_held(engine.core)


async def test_a_model_with_a_decision_head_alone_needs_no_name(tmp_path: Path) -> None:
    text = AutoConfig.for_model("llama", vocab_size=2048, hidden_size=32, intermediate_size=32, num_hidden_layers=1,
                                num_attention_heads=2, num_key_value_heads=2)  # fmt: skip
    model = JevForDecision(JevConfig(hidden_size=32, text_config=text))
    model.decision_config = DecisionConfig(chat_template=JEV_TEMPLATE)
    model.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(DEMO_MODEL).save_pretrained(tmp_path)
    async with await AsyncEngine.from_pretrained(tmp_path, dtype="float32", kv_cache_memory="8MB") as engine:
        asked = {"state": "Hello", "questions": {"refund": OURS["refund"]}}
        async with serving(app(engine)) as url, httpx.AsyncClient(base_url=url) as client:
            body = (await client.post("/v1/systemone", json=asked)).raise_for_status().json()
            assert (
                body["answers"]["refund"]
                == (await engine.decide("Hello", {"refund": OURS["refund"]}))["refund"].details
            )
            (listed,) = (await client.get("/v1/models")).json()["data"]
            assert "decide" in json.dumps(listed)
            chat = await client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "x"}]})
            assert chat.status_code == 400
