"""`with_structured_output` of plain Python types: what comes back is what the type says."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal

import pytest
from langchain_core.exceptions import OutputParserException

from asyncengine import EngineHandle
from asyncengine.integrations.langchain import ChatAsyncEngine
from asyncengine.integrations.langchain.structured import CallTypeParser, TypeParser

TEXT = "Extract name, age and job as JSON.\n\nText: Marta is a baker. Marta is 41 years old."


@dataclass
class Person:
    """Information about a person."""

    name: str
    age: int
    job: str


@dataclass
class Company:
    company: str
    people: list[Person]


class Size(Enum):
    SMALL = "small"
    LARGE = "large"


@pytest.fixture
def chat(demo: EngineHandle) -> ChatAsyncEngine:
    return ChatAsyncEngine(model="demo", temperature=0, max_tokens=80)


METHODS = ("json_schema", "function_calling", "json_mode")


@pytest.mark.parametrize("method", METHODS)
def test_a_dataclass_gives_the_dataclass(chat: ChatAsyncEngine, method: Any) -> None:
    answer = chat.with_structured_output(Person, method=method).invoke(TEXT)
    assert answer == Person("Marta", 41, "baker")
    raw = chat.with_structured_output(Person, method=method, include_raw=True).invoke(TEXT)
    assert raw["parsed"] == answer
    assert raw["parsing_error"] is None


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "kind",
    [list[int], list[Person], dict[str, int], int | None, Person | Company, Literal["a", "b"], Size,
     tuple[int, str], bool],
    ids=str,
)  # fmt: skip
def test_types_give_values_of_theirs(chat: ChatAsyncEngine, method: Any, kind: Any) -> None:
    answer = chat.with_structured_output(kind, method=method).invoke(TEXT)
    checked = TypeParser(kind=kind)
    assert checked.parse(_as_json(kind, answer)) == answer


def _as_json(kind: Any, value: Any) -> str:
    from pydantic import TypeAdapter

    return TypeAdapter(kind).dump_json(value).decode()  # warns, and so fails, for a value of another type


def test_what_does_not_parse_is_langchains_error() -> None:
    with pytest.raises(OutputParserException, match="the answer is no list"):
        TypeParser(kind=list[int]).parse('["x"]')
    with pytest.raises(OutputParserException):
        TypeParser(kind=Person).parse('{"name": ')
    assert CallTypeParser(key_name="x", first_tool_only=True, kind=int, inside="value").inside == "value"
