"""Arguments of `bind_tools`: every kind of tool and every form of tool choice becomes OpenAI's. No model."""

from __future__ import annotations

from typing import Any, TypedDict

import pydantic.v1
import pytest
from langchain_core.exceptions import ModelInvalidRequestError
from langchain_core.tools import tool
from pydantic import BaseModel
from support.data import cases_of

from asyncengine.errors import InvalidParameter
from asyncengine.integrations.langchain import ChatAsyncEngine
from asyncengine.integrations.langchain.tools import openai_choice, openai_tools, several_calls

from .langchain_demo_tools import TOOLS, add, get_weather, multiply

ROWS: dict[str, Any] = cases_of(__file__)


@pytest.fixture
def chat() -> ChatAsyncEngine:
    return ChatAsyncEngine(model="never-loaded")


class _V1(pydantic.v1.BaseModel):
    """A v1 class."""

    n: int


class _Typed(TypedDict):
    """A typed dict."""

    n: int


@pytest.mark.parametrize(
    ("given", "name"),
    [
        *ROWS["every_kind_of_tool_becomes_openais"],
        (get_weather, "get_weather"),
        (add, "add"),
        (multiply, "multiply"),
        (_V1, "_V1"),
        (_Typed, "_Typed"),
    ],
)
def test_every_kind_of_tool_becomes_openais(given: Any, name: str) -> None:
    converted = openai_tools([given])[0]
    assert set(converted) == {"type", "function"}
    assert set(converted["function"]) <= {"name", "description", "parameters"}
    assert converted["function"]["name"] == name


def test_only_strict_false_is_told_to_the_engine() -> None:
    loose = {"type": "function", "function": {"name": "t", "parameters": {}, "strict": False}}
    firm = {"type": "function", "function": {"name": "t", "parameters": {}, "strict": True}}
    assert [t["function"].get("strict") for t in openai_tools([add, loose, firm])] == [None, False, None]
    assert [t["function"].get("strict") for t in openai_tools([add, loose, firm], True)] == [None, None, None]
    assert [t["function"].get("strict") for t in openai_tools([add, loose, firm], False)] == [False, False, False]
    assert loose["function"]["strict"] is False  # type: ignore[index]


@pytest.mark.parametrize("bad", [{"type": "web_search"}, {"type": "object", "properties": {}}, 7, "add"])
def test_what_is_no_function_is_refused_by_place(chat: ChatAsyncEngine, bad: Any) -> None:
    for error in (InvalidParameter, ModelInvalidRequestError):
        with pytest.raises(error, match=r"tools\[1\]"):
            chat.bind_tools([add, bad])


class Folder(BaseModel):
    """A folder."""

    name: str
    inside: list[Folder]


class Shelf(BaseModel):
    """A shelf."""

    first: multiply
    second: multiply


@tool
def store(folder: Folder) -> None:
    """Store a folder."""


def test_a_schema_that_refers_to_itself_is_not_cut_short() -> None:
    for given in (Folder, store):
        function = openai_tools([given])[0]["function"]
        assert function["parameters"]["$defs"]["Folder"]["properties"]["inside"]["items"] == {"$ref": "#/$defs/Folder"}
        assert "description" in function
    resolved = openai_tools([Shelf])[0]["function"]["parameters"]
    assert "$defs" not in resolved
    assert resolved["properties"]["second"]["properties"]["b"] == {"type": "integer"}


@pytest.mark.parametrize(("given", "expected"), ROWS["every_form_of_tool_choice"])
def test_every_form_of_tool_choice(given: Any, expected: Any) -> None:
    assert openai_choice(given, TOOLS) == expected


def test_a_tool_may_be_called_like_a_keyword() -> None:
    def auto() -> None:
        """Drive."""

    assert openai_choice("auto", openai_tools([auto])) == {"type": "function", "function": {"name": "auto"}}


@pytest.mark.parametrize("bad", ["subtract", {"type": "tool", "name": "subtract"}, {"name": "add"}, 3, {"type": "x"}])
def test_an_unknown_tool_choice_is_refused_when_bound_and_names_the_tools(chat: ChatAsyncEngine, bad: Any) -> None:
    with pytest.raises(ModelInvalidRequestError, match=r"tool_choice: .*'get_weather', 'add'"):
        chat.bind_tools([get_weather, add], tool_choice=bad)


def test_a_call_cannot_be_forced_without_tools(chat: ChatAsyncEngine) -> None:
    with pytest.raises(InvalidParameter, match="tool_choice"):
        chat.bind_tools([], tool_choice="any")


@pytest.mark.parametrize(("parallel", "given", "expected"), ROWS["a_forced_answer_is_one_call_unless_said_otherwise"])
def test_a_forced_answer_is_one_call_unless_said_otherwise(parallel: Any, given: Any, expected: Any) -> None:
    assert several_calls(parallel, given, openai_choice(given, TOOLS)) is expected
