"""`with_structured_output`: every method, every kind of schema, on the bundled model."""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any, Generic, Literal, TypedDict, TypeVar

import pydantic.v1
import pytest
from langchain_core.exceptions import ModelInvalidRequestError, OutputParserException
from langchain_core.utils.function_calling import convert_to_openai_tool
from pydantic import BaseModel, ConfigDict, Field, RootModel, TypeAdapter
from support.long import by_turns

from asyncengine import EngineHandle
from asyncengine.errors import GrammarUnsupported
from asyncengine.grammar import Grammar
from asyncengine.integrations.langchain import AsyncEngineLLM, ChatAsyncEngine
from asyncengine.integrations.langchain.structured import (
    CallTypeParser,
    TypeParser,
    as_tool,
    converted,
    json_schema,
    response_format,
)

from .peak import paced

METHODS = ("json_schema", "function_calling", "json_mode")
TEXT = "Extract name, age and job as JSON.\n\nText: Marta is a baker. Marta is 41 years old."
MARTA: dict[str, Any] = {"name": "Marta", "age": 41, "job": "baker"}


class Person(BaseModel):
    """Information about a person."""

    name: str
    age: int
    job: str = Field(description="What the person works as.")


class PersonV1(pydantic.v1.BaseModel):
    """Information about a person."""

    name: str
    age: int
    job: str


@dataclass
class PersonData:
    """Information about a person."""

    name: str
    age: int
    job: str


@dataclass
class Company:
    company: str
    people: list[PersonData]


class Size(Enum):
    SMALL = "small"
    LARGE = "large"


class PersonDict(TypedDict):
    """Information about a person."""

    name: Annotated[str, ..., "The name."]
    age: int
    job: str


AS_TOOL = convert_to_openai_tool(Person)
SCHEMAS = {
    "pydantic": (Person, Person(**MARTA)),
    "pydantic v1": (PersonV1, PersonV1(**MARTA)),
    "dataclass": (PersonData, PersonData(**MARTA)),
    "TypedDict": (PersonDict, MARTA),
    "JSON schema": (Person.model_json_schema(), MARTA),
    "nameless JSON schema": ({"type": "object", "properties": Person.model_json_schema()["properties"]}, MARTA),
    "OpenAI tool": (AS_TOOL, MARTA),
    "OpenAI function": (AS_TOOL["function"], MARTA),
}


@pytest.fixture
def chat(demo: EngineHandle) -> ChatAsyncEngine:
    return ChatAsyncEngine(model="demo", temperature=0, max_tokens=80)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", SCHEMAS)
async def test_the_answer_is_right_and_of_the_schemas_kind(chat: ChatAsyncEngine, method: Any, kind: str) -> None:
    schema, expected = SCHEMAS[kind]
    if kind == "nameless JSON schema":
        schema = {**schema, "required": ["name", "age", "job"]}
    model = chat.with_structured_output(schema, method=method)
    answer = model.invoke(TEXT)
    assert answer == expected
    assert type(answer) is type(expected)
    assert await model.ainvoke(TEXT) == expected
    *_, last = model.stream(TEXT)
    assert last == expected


@pytest.mark.parametrize("method", METHODS)
def test_partial_objects_are_streamed(chat: ChatAsyncEngine, demo: EngineHandle, method: Any) -> None:
    # with guesses a step may give several tokens, and so a part may be the whole object
    chat = chat.model_copy(update={"model_kwargs": {"speculation": False}})
    with paced(demo):
        seen = list(chat.with_structured_output(PersonDict, method=method).stream(TEXT))
    assert len(seen) > 4
    assert seen[-1] == MARTA
    keys = [list(part) for part in seen]
    assert all(key == ["name", "age", "job"][: len(key)] for key in keys)


PLAIN = (
    list[int], list[PersonData], dict[str, int], int | None, PersonData | Company, Literal["a", "b"], Size,
    tuple[int, str], bool,
)  # fmt: skip


@pytest.mark.parametrize(("kind", "method"), by_turns(PLAIN, METHODS), ids=str)
def test_plain_types_give_values_of_theirs(chat: ChatAsyncEngine, method: Any, kind: Any) -> None:
    model = chat.with_structured_output(kind, method=method)
    answer = model.invoke(TEXT)
    assert answer is None or list(model.stream(TEXT))[-1] == answer
    written = TypeAdapter(kind).dump_json(answer).decode()  # warns, and so fails, for a value of another type
    assert TypeParser(target=kind).parse(written) == answer


def test_what_does_not_parse_is_langchains_error() -> None:
    with pytest.raises(OutputParserException, match="the answer is no list"):
        TypeParser(target=list[int]).parse('["x"]')
    with pytest.raises(OutputParserException):
        TypeParser(target=PersonData).parse('{"name": ')
    assert CallTypeParser(key_name="x", first_tool_only=True, target=int, inside="value").inside == "value"


class Node(BaseModel):
    """A tree."""

    value: Literal["a", "b"]
    children: list[Node] = Field(max_length=2)


class Cat(BaseModel):
    kind: Literal["cat"] = "cat"
    mood: Literal["calm", "wild"]


class Dog(BaseModel):
    kind: Literal["dog"] = "dog"
    trick: Literal["sit", "roll"]


class Owner(BaseModel):
    """A person who keeps a pet."""

    pet: Annotated[Cat | Dog, Field(discriminator="kind")]


def test_a_class_s_tool_and_its_format_require_the_same(demo: EngineHandle) -> None:
    written = as_tool(Owner, None)["function"]["parameters"]["properties"]["pet"]["oneOf"]
    assert [branch["required"] for branch in written] == [["mood", "kind"], ["trick", "kind"]]
    definitions = response_format(Owner, None)["json_schema"]["schema"]["$defs"]
    assert [definitions[name]["required"] for name in ("Cat", "Dog")] == [["mood", "kind"], ["trick", "kind"]]


def test_json_mode_without_a_schema_is_any_object(chat: ChatAsyncEngine) -> None:
    assert isinstance(chat.with_structured_output(None, method="json_mode").invoke(TEXT), dict)


def test_strict_false_opens_the_schema_and_leaves_out_what_cannot_be_enforced(chat: ChatAsyncEngine) -> None:
    schema = {"title": "T", "type": "object", "properties": {"n": {"type": "integer", "not": {"multipleOf": 3}}}}
    for method in METHODS:
        with pytest.raises(GrammarUnsupported):
            chat.with_structured_output(schema, method=method).invoke("n")  # type: ignore[arg-type]
        loose = chat.with_structured_output(schema, method=method, strict=False)  # type: ignore[arg-type]
        assert isinstance(loose.invoke("n", max_tokens=30, on_budget="offer"), dict)
    assert response_format(Person, False)["json_schema"]["strict"] is False
    assert "strict" not in response_format(Person, None)["json_schema"]
    assert as_tool(Person, False)["function"]["strict"] is False


def test_schemas_keep_their_order_and_parts() -> None:
    nested = {"title": "T", "$defs": {"N": {"type": "object"}}, "anyOf": [{"$ref": "#/$defs/N"}, {"type": "null"}]}
    assert json_schema(nested) == nested
    assert list(json_schema(PersonV1)["properties"]) == ["name", "age", "job"]
    assert json_schema(Node)["$defs"]
    assert converted({"type": "object"})["title"] == "response"
    given = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}}
    assert response_format(given, None) == given


@pytest.mark.parametrize(("schema", "method"), [(Person, "xml"), (None, "json_schema"), (None, "function_calling")])
def test_what_cannot_be_bound_is_refused_at_once(chat: ChatAsyncEngine, schema: Any, method: Any) -> None:
    with pytest.raises(ModelInvalidRequestError, match=r"method|schema"):
        chat.with_structured_output(schema, method=method)


def test_a_grammar_is_a_sampling_keyword_of_both_models(chat: ChatAsyncEngine) -> None:
    answer = Grammar.choice(["yes", "no"])
    assert chat.invoke("Is it raining?", grammar=answer).content in ("yes", "no")
    assert ChatAsyncEngine(model="demo", temperature=0, grammar=answer).invoke("Is it?").content in ("yes", "no")
    llm = AsyncEngineLLM(model="demo", temperature=0, max_tokens=40)
    assert set(json.loads(llm.invoke("A person: ", grammar=Person))) == {"name", "age", "job"}
    keyed = [ChatAsyncEngine(model="demo", grammar=g)._identifying_params for g in (Person, Grammar.of(Person), answer)]
    assert keyed[0] == keyed[1] != keyed[2]
    with pytest.raises(ValueError, match="grammar"):
        ChatAsyncEngine(model="demo", grammar="a string")


Content = TypeVar("Content")


class Box(BaseModel, Generic[Content]):
    """Something in a box."""

    content: Content


class Titled(BaseModel):
    model_config = ConfigDict(title="A box, titled!")
    size: Literal[1, 2]


GENERIC = (
    RootModel[Annotated[list[int], Field(max_length=2)]], RootModel[Literal["a", "b"]], RootModel[Owner],
    Box[Literal[1, 2]], Box[Annotated[list[bool], Field(max_length=2)]], Titled,
)  # fmt: skip


@pytest.mark.parametrize(("kind", "method"), by_turns(GENERIC, METHODS))
def test_generic_and_root_models_are_answered(demo: EngineHandle, method: Any, kind: Any) -> None:
    hot = ChatAsyncEngine(model="demo", temperature=3.0, max_tokens=120)
    for seed in range(2):
        assert isinstance(hot.with_structured_output(kind, method=method, seed=seed).invoke("A value."), kind)
