"""`enable_thinking` and `reasoning_effort` reach a chat template that reads them, by every door; others pass them over.

The template writes what it is told in as many bytes, each of them one token: prompts are as long as what they say.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from langchain_core.load import dumps, loads
from llama_index.core.llms import ChatMessage
from support.data import cases_of

from asyncengine import AsyncEngine, SamplingParams, shared_engine
from asyncengine.errors import InvalidParameter
from asyncengine.integrations.http import app
from asyncengine.integrations.langchain import ChatAsyncEngine
from asyncengine.integrations.llama_index import AsyncEngineLLM as LlamaIndexLLM

from .conftest import CONFIG, TEMPLATE

ROWS: dict[str, Any] = cases_of(__file__)

READS = (
    "{% if enable_thinking is defined %}{{ 'yes' if enable_thinking else 'no' }}{% endif %}{{ reasoning_effort or '' }}"
)
CASES: list[tuple[dict[str, Any], int]] = ROWS["cases"]
"""Keywords, and how many tokens they add to the prompt."""
CHAT = [{"role": "user", "content": "Hello"}]
ONE = SamplingParams(max_tokens=1)


@pytest.fixture(scope="module")
def reader(model_path: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The tiny model with a template that reads both variables."""
    folder = Path(shutil.copytree(model_path, tmp_path_factory.mktemp("reader"), dirs_exist_ok=True))
    (folder / "chat_template.jinja").write_text(READS + TEMPLATE, encoding="utf-8")
    return str(folder)


@pytest.fixture(scope="module")
def engine(reader: str) -> Iterator[AsyncEngine]:
    held = shared_engine(reader, **CONFIG)
    engine = held.get()
    yield engine.aengine
    engine.close()
    held.close()


@pytest.fixture(scope="module")
def plain(engine: AsyncEngine) -> int:
    """Length of the prompt that is told nothing."""
    return engine.count_tokens(CHAT)


async def test_what_may_be_set_is_told_and_counted(engine: AsyncEngine, plain: int) -> None:
    assert engine.info.template_variables == ("enable_thinking", "reasoning_effort")
    assert engine.count_tokens(CHAT, template_kwargs={"enable_thinking": True}) == plain + 3
    continued = [*CHAT, {"role": "assistant", "content": "So:"}]
    variables = {"continue_final_message": True, "add_generation_prompt": False}
    counted = engine.count_tokens(continued, template_kwargs=variables)
    assert counted == (await engine.chat(continued, ONE, template_kwargs=variables)).usage.prompt_tokens
    with pytest.raises(InvalidParameter, match="template_kwargs"):
        engine.count_tokens(CHAT, template_kwargs=["enable_thinking"])  # type: ignore[arg-type]


@pytest.mark.parametrize(("keywords", "more"), CASES)
async def test_of_langchain(keywords: dict[str, Any], more: int, engine: AsyncEngine, reader: str, plain: int) -> None:
    chat = ChatAsyncEngine(model=reader, **CONFIG, max_tokens=1)
    fixed = ChatAsyncEngine(model=reader, **CONFIG, max_tokens=1, **by_fields(keywords))
    written = loads(dumps(fixed), allowed_objects=[ChatAsyncEngine], valid_namespaces=["langchain_asyncengine"])
    answers = [chat.invoke("Hello", **keywords), await chat.bind(**keywords).ainvoke("Hello")]
    answers += [fixed.invoke("Hello"), written.invoke("Hello")]
    assert [answer.usage_metadata["input_tokens"] for answer in answers] == [plain + more] * 4  # type: ignore[index]


@pytest.mark.parametrize(("keywords", "more"), CASES)
async def test_of_llama_index(
    keywords: dict[str, Any], more: int, engine: AsyncEngine, reader: str, plain: int
) -> None:
    llm = LlamaIndexLLM(model=reader, **CONFIG, max_tokens=1)
    fixed = LlamaIndexLLM(model=reader, **CONFIG, max_tokens=1, **by_fields(keywords))
    answers = [llm.complete("Hello", **keywords), await llm.achat([ChatMessage("Hello")], **keywords)]
    answers += [fixed.complete("Hello"), LlamaIndexLLM.from_dict(fixed.to_dict()).complete("Hello")]
    assert [answer.raw["usage"]["prompt_tokens"] for answer in answers] == [plain + more] * 4  # type: ignore[index]


def by_fields(keywords: dict[str, Any]) -> dict[str, Any]:
    """The keywords of a call as a constructor takes them."""
    rest = {name: value for name, value in keywords.items() if name == "template_kwargs"}
    return {**{name: value for name, value in keywords.items() if name not in rest}, "model_kwargs": rest}


@pytest.mark.parametrize(("fields", "keywords", "more"), ROWS["a_call_stands_above_its_model_object"])
def test_a_call_stands_above_its_model_object(
    fields: dict[str, Any], keywords: dict[str, Any], more: int, engine: AsyncEngine, reader: str, plain: int
) -> None:
    answer = ChatAsyncEngine(model=reader, **CONFIG, max_tokens=1, **fields).invoke("Hello", **keywords)
    assert answer.usage_metadata["input_tokens"] == plain + more  # type: ignore[index]


WRONG: list[tuple[dict[str, Any], str]] = ROWS["wrong"]


@pytest.mark.parametrize(("keywords", "said"), WRONG)
async def test_wrong_values_are_named(keywords: dict[str, Any], said: str, engine: AsyncEngine, reader: str) -> None:
    with pytest.raises(InvalidParameter, match=said):
        await engine.chat(CHAT, ONE, **keywords)
    with pytest.raises(InvalidParameter, match=said):
        ChatAsyncEngine(model=reader, **CONFIG).invoke("Hello", **keywords)


@pytest.fixture(scope="module")
def thinker(model_path: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The tiny model with a template that begins thoughts for it."""
    folder = Path(shutil.copytree(model_path, tmp_path_factory.mktemp("thinker"), dirs_exist_ok=True))
    template = TEMPLATE.replace("assistant\n{% endif %}", "assistant\n<think>{# until </think> #}{% endif %}")
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    held = shared_engine(folder, **CONFIG)
    held.get()
    yield str(folder)
    held.close()


async def test_a_budget_of_thoughts_is_a_field_and_a_keyword(thinker: str) -> None:
    fields: dict[str, Any] = {"model": thinker, **CONFIG, "max_tokens": 30, "temperature": 0.0}
    fixed, free = ChatAsyncEngine(**fields, max_thinking_tokens=4), ChatAsyncEngine(**fields)
    answers = [fixed.invoke("Hello"), free.invoke("Hello", max_thinking_tokens=4)]
    answers += [await free.bind(max_thinking_tokens=4).ainvoke("Hello")]
    assert len({(answer.text, answer.additional_kwargs["reasoning_content"]) for answer in answers}) == 1
    assert answers[0].usage_metadata is not None
    thought = answers[0].usage_metadata["output_token_details"]["reasoning"]
    assert 4 <= thought < 4 + len("</think>")  # of the mark, which is no token here, all but its end
    assert free.invoke("Hello").text == ""
    llm = LlamaIndexLLM(**fields, max_thinking_tokens=4)
    assert answers[0].text == llm.complete("Hello").text == LlamaIndexLLM(**fields).complete(
        "Hello", max_thinking_tokens=4
    ).text  # fmt: skip


async def test_a_budget_of_thoughts_over_http(thinker: str) -> None:
    async with await AsyncEngine.from_pretrained(thinker, **CONFIG) as engine:
        client = httpx.AsyncClient(transport=httpx.ASGITransport(app(engine)), base_url="http://engine")
        body = {"messages": CHAT, "max_tokens": 30, "temperature": 0}
        free = (await client.post("/v1/chat/completions", json=body)).json()["choices"][0]["message"]
        held = (await client.post("/v1/chat/completions", json={**body, "thinking_token_budget": 4})).json()
        message = held["choices"][0]["message"]
        assert free["reasoning_content"].startswith(message["reasoning_content"])
        assert message["content"]
        assert 4 <= held["usage"]["completion_tokens_details"]["reasoning_tokens"] < 4 + len("</think>")
        thinking = {"type": "enabled", "budget_tokens": 4}
        blocks = (await client.post("/v1/messages", json={**body, "thinking": thinking})).json()["content"]
        assert [block["type"] for block in blocks] == ["thinking", "text"]
        assert blocks[1]["text"] == message["content"]
        asked = {"input": "Hello", "max_output_tokens": 30, "temperature": 0, "reasoning": {"max_tokens": 4}}
        items = (await client.post("/v1/responses", json=asked)).json()["output"]
        assert items[-1]["content"][0]["text"] == message["content"]
