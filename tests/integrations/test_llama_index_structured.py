"""Structured output through LlamaIndex: the four `structured_predict` forms, `as_structured_llm`, query engines."""

from __future__ import annotations

import itertools
from typing import Any, Literal

import pytest
from llama_index.core.base.llms.types import ChatMessage, MessageRole
from llama_index.core.program.utils import FlexibleModel
from llama_index.core.prompts import PromptTemplate
from pydantic import BaseModel, Field, ValidationError, field_validator

from asyncengine import EngineHandle
from asyncengine.errors import BudgetTooSmall, InvalidParameter
from asyncengine.integrations.llama_index import AsyncEngineLLM
from asyncengine.integrations.llama_index.structured import Growing, with_schema

from .llama_demo import demo_llm
from .peak import paced

pytestmark = pytest.mark.usefixtures("demo")


class Person(BaseModel):
    """A person."""

    name: str
    age: int
    city: str


class Notes(BaseModel):
    title: str
    pages: list[int]
    open: bool


TEXT = "Ada Brandt is 34 years old. She lives in Fenwick."
ADA = Person(name="Ada Brandt", age=34, city="Fenwick")
PROMPT = PromptTemplate("Extract the data.\n\n{text}")


@pytest.fixture(scope="module")
def llm(demo: EngineHandle) -> AsyncEngineLLM:
    return demo_llm()


@pytest.fixture(scope="module")
def one_by_one(demo: EngineHandle) -> AsyncEngineLLM:
    """A step gives one token: with guesses it may give a whole object, more so the second time."""
    return demo_llm(additional_kwargs={"speculation": False})


async def four_forms(llm: AsyncEngineLLM, output_cls: type[BaseModel], prompt: Any = PROMPT, **args: Any) -> list[Any]:
    """The results of the two whole forms, and all that the two streams give."""
    return [
        [llm.structured_predict(output_cls, prompt, **args)],
        [await llm.astructured_predict(output_cls, prompt, **args)],
        list(llm.stream_structured_predict(output_cls, prompt, **args)),
        [part async for part in await llm.astream_structured_predict(output_cls, prompt, **args)],
    ]


async def test_four_forms_give_one_object(llm: AsyncEngineLLM) -> None:
    for parts in await four_forms(llm, Person, text=TEXT):
        assert parts[-1] == ADA
        assert type(parts[-1]) is Person


async def test_a_stream_gives_the_object_as_far_as_it_is_written(
    one_by_one: AsyncEngineLLM, demo: EngineHandle
) -> None:
    with paced(demo):
        *_, parts, aparts = await four_forms(one_by_one, Person, text=TEXT)
    for stream in (parts, aparts):
        assert len(stream) > 2
        assert all(isinstance(part, FlexibleModel) for part in stream[:-1])
        assert (stream[0].age, stream[0].city) == (None, None)
        assert all(ADA.name.startswith(part.name or "") for part in stream)


def test_an_object_out_of_growing_text() -> None:
    """Cut anywhere, also inside escapes, numbers, lists and literals."""
    whole = Notes(title='a "b" \\ ü', pages=[12, 3], open=True)
    text, growing, parts = whole.model_dump_json(indent=1), Growing(Notes), []
    for end in range(len(text) + 1):
        if (part := growing.read(text[:end])) is not None:
            parts.append(part)
    assert parts[-1].model_dump() == whole.model_dump()
    assert all(later != earlier for earlier, later in itertools.pairwise(part.model_dump() for part in parts))
    assert [part.title for part in parts if len(part.title or "") == 4] == ['a "b']
    assert [part.pages for part in parts if part.pages is not None][:4] == [[], [1], [12], [12, 3]]


class Line(BaseModel):
    item: str = Field(max_length=12)
    count: int = Field(ge=1, le=9)


class Order(BaseModel):
    status: Literal["open", "paid"]
    lines: list[Line] = Field(min_length=1, max_length=2)
    note: str | None = Field(max_length=20)


async def test_it_closes_within_the_budget(llm: AsyncEngineLLM) -> None:
    for parts in await four_forms(
        llm, Order, PromptTemplate("Hello!"), llm_kwargs={"max_tokens": 40, "on_budget": "offer"}
    ):
        assert type(parts[-1]) is Order
    with pytest.raises(BudgetTooSmall):
        await llm.astructured_predict(Order, PROMPT, text=TEXT, llm_kwargs={"max_tokens": 8})
    with pytest.raises(InvalidParameter, match="max_tokns"):
        llm.structured_predict(Order, PROMPT, text=TEXT, llm_kwargs={"max_tokns": 8})


class Minor(BaseModel):
    age: int

    @field_validator("age")
    @classmethod
    def _young(cls, value: int) -> int:
        if value >= 18:
            raise ValueError("not a minor")
        return value


async def test_what_only_the_class_can_check_is_checked(llm: AsyncEngineLLM) -> None:
    args = {"text": TEXT}
    with pytest.raises(ValidationError, match="not a minor"):
        llm.structured_predict(Minor, PROMPT, **args)
    with pytest.raises(ValidationError, match="not a minor"):
        await llm.astructured_predict(Minor, PROMPT, **args)
    with pytest.raises(ValidationError, match="not a minor"):
        list(llm.stream_structured_predict(Minor, PROMPT, **args))
    stream = await llm.astream_structured_predict(Minor, PROMPT, **args)
    with pytest.raises(ValidationError, match="not a minor"):
        [part async for part in stream]


def test_where_the_schema_is_told() -> None:
    user, system = ChatMessage("U"), ChatMessage("S", role=MessageRole.SYSTEM)
    answered = ChatMessage("A", role=MessageRole.ASSISTANT)
    [alone] = with_schema([user], Person)
    assert (alone.content or "").startswith("U\n\nHere's a JSON schema to follow:\n{")
    assert '"title": "Person"' in (alone.content or "")
    first, last = with_schema([system, user], Person)
    assert (first.content or "").startswith("S\n\nHere's")
    assert last.content == "U"
    assert [message.role for message in with_schema([user, answered], Person)] == [user.role, answered.role, user.role]
    assert with_schema([], Person)[0].role is MessageRole.USER
    assert (user.content, system.content) == ("U", "S")
