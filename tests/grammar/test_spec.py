"""`Grammar`: canonical text, keys, constructors, and refusals by name."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
import threading
import typing
from typing import Any, Literal, NotRequired

import pydantic
import pytest
from support.data import cases_of
from typing_extensions import TypedDict

from asyncengine.errors import GrammarError, GrammarImpossible, GrammarTooLarge
from asyncengine.grammar import Grammar

from .oracle import accepts
from .test_limits import nested

ROWS: dict[str, Any] = cases_of(__file__)

Lock = type(threading.Lock())


class Inner(typing.TypedDict, total=False):
    b: int


class Outer(typing.TypedDict):
    a: Inner


class Person(pydantic.BaseModel):
    name: str
    age: int = 3


class Point(TypedDict):
    x: int
    label: NotRequired[str]


@dataclasses.dataclass
class Line:
    a: int
    owner: Person


# ---------------------------------------------------------------- text and key


def test_json_is_canonical_and_keeps_its_key_order() -> None:
    first = Grammar.json_schema({"b": 1, "a": ["ü", 1.5, None, True]})
    assert first.text == '{"b":1,"a":["ü",1.5,null,true]}'
    assert Grammar.json_schema('{ "b": 1,\n "a": ["\\u00fc", 1.5, null, true]}') == first
    assert Grammar.json_schema({"a": ["ü", 1.5, None, True], "b": 1}).key != first.key


def test_key_depends_on_everything() -> None:
    base = Grammar.json_schema({"type": "integer"})
    others = [
        Grammar.json_schema({"type": "integer"}, whitespace="compact"),
        Grammar.json_schema({"type": "integer"}, unsupported="ignore"),
        Grammar.json_schema({"type": "integer"}, backend="llguidance"),
        Grammar("regex", base.text),
        Grammar.json_schema({"type": "number"}),
    ]
    keys = [base.key, *(other.key for other in others)]
    assert len(dict.fromkeys(keys)) == len(keys)
    assert re.fullmatch("[0-9a-f]{64}", base.key)
    assert Grammar.json_schema('{"type": "integer"}').key == base.key


def test_true_is_any_json_and_false_is_nothing() -> None:
    assert accepts(Grammar.json_schema(True), '[1, {"a": null}]')
    with pytest.raises(GrammarImpossible):
        Grammar.json_schema("false")


@pytest.mark.parametrize(
    "schema",
    [
        *ROWS["what_is_not_json_is_refused"],
        {"minimum": float("nan")},
        {"minimum": float("inf")},
        {1: 2},
        {"const": {1, 2}},
        {"const": b"x"},
        {"minimum": 10**5000},
        int,
    ],
)
def test_what_is_not_json_is_refused(schema: Any) -> None:
    with pytest.raises(GrammarError) as caught:
        Grammar.json_schema(schema)
    assert caught.value.field == "grammar"
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("changes", [{"kind": "x"}, {"whitespace": "x"}, {"unsupported": 1}, {"backend": None}])
def test_options_are_checked(changes: dict[str, Any]) -> None:
    with pytest.raises(GrammarError) as caught:
        Grammar(**{"kind": "regex", "text": "a", **changes})
    assert caught.value.field == next(iter(changes))


# ---------------------------------------------------------------- classes


@pytest.mark.parametrize(
    ("cls", "good", "bad"),
    [
        (Person, ['{"name": "x"}', '{"name": "x", "age": 1}'], ['{"age": 1}', '{"name": "x", "z": 1}']),
        (Point, ['{"x": 1}', '{"x": 1, "label": "a"}'], ['{"label": "a"}', '{"x": 1, "y": 1}']),
        (Line, ['{"a": 1, "owner": {"name": "x"}}'], ['{"a": 1}', '{"a": 1, "owner": {"name": "x", "z": 1}}']),
    ],
)
def test_classes_are_closed_objects(cls: type, good: list[str], bad: list[str]) -> None:
    grammar = Grammar.json_schema(cls)
    assert Grammar.of(cls) == grammar
    assert [accepts(grammar, text) for text in good] == [True] * len(good)
    assert [accepts(grammar, text) for text in bad] == [False] * len(bad)


def test_typing_typed_dict_is_accepted() -> None:
    """Python before 3.12 is no exception, where pydantic takes only the one of `typing_extensions`."""
    assert accepts(Grammar.json_schema(Outer), '{"a": {}}')
    assert not accepts(Grammar.json_schema(Outer), '{"a": {"c": 1}}')


def test_pydantic_v1_models() -> None:
    from pydantic import v1

    if sys.version_info >= (3, 14):
        pytest.skip("pydantic.v1 ends with Python 3.13")
    model = v1.create_model("Old", a=(int, ...))
    assert accepts(Grammar.json_schema(model), '{"a": 1}')
    assert not accepts(Grammar.json_schema(model), '{"a": 1, "b": 2}')


def test_extra_keys_stay_where_the_class_asks_for_them() -> None:
    class Open(pydantic.BaseModel, extra="allow"):
        a: int

    assert accepts(Grammar.json_schema(Open), '{"a": 1, "z": []}')


def test_discriminated_unions_are_told_apart() -> None:
    """The tag has a default, so pydantic's schema does not require it: without it the branches would overlap."""

    class Cat(pydantic.BaseModel):
        kind: Literal["cat"] = "cat"
        n: int = 0

    class Dog(pydantic.BaseModel):
        kind: Literal["dog"] = "dog"
        n: int = 0

    class Owner(pydantic.BaseModel):
        pet: Cat | Dog = pydantic.Field(discriminator="kind")

    grammar = Grammar.json_schema(Owner)
    assert accepts(grammar, '{"pet": {"kind": "dog"}}')
    assert not accepts(grammar, '{"pet": {"n": 1}}')
    assert not accepts(grammar, '{"pet": {"kind": "cow"}}')


def test_a_class_without_a_schema_is_named() -> None:
    class Odd(pydantic.BaseModel, arbitrary_types_allowed=True):
        thing: Lock

    with pytest.raises(GrammarError, match="Odd"):
        Grammar.json_schema(Odd)


# ---------------------------------------------------------------- choice, ebnf, lark


def test_choices() -> None:
    assert Grammar.choice(["b", "a", "b"]).text == '["b","a"]'
    for bad in ([], "abc", [1], ["a", None], {"a": 1}, 3, ["\ud800"], ["a\0"]):
        with pytest.raises(GrammarError):
            Grammar.choice(bad)  # type: ignore[arg-type]


def test_gbnf_is_converted_and_lark_kept() -> None:
    grammar = Grammar.ebnf('root ::= "\\u0041\\u00e9#" [\\u00e0-\\u00ff\\U0001F600] . # "a comment\n')
    assert grammar.kind == "lark"
    assert accepts(grammar, "Aé#à\n")
    assert accepts(grammar, "Aé#😀x")
    assert not accepts(grammar, "Aé#zx")
    lark = 'start: "a" start | "b"\n'
    assert Grammar.ebnf(lark) == Grammar.lark(lark)


@pytest.mark.parametrize(
    "text", ["hello", "root ::= foo", 'root ::= "a', 'root ::= ("a"', 'root ::= "\\ud800"', "", 3, "root ::= \0"]
)
def test_bad_ebnf_is_a_grammar_error(text: Any) -> None:
    with pytest.raises(GrammarError):
        Grammar.ebnf(text)


def test_lark_needs_a_start_and_no_max_tokens() -> None:
    with pytest.raises(GrammarError, match="start"):
        Grammar.lark('root: "a"')
    with pytest.raises(GrammarError, match="max_tokens"):
        Grammar.lark("start: a\na[max_tokens=3]: /.*/")


# ---------------------------------------------------------------- of


def test_of_response_formats_and_refusals() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    grammar = Grammar.json_schema(schema)
    assert Grammar.of(grammar) is grammar
    assert Grammar.of(schema) == grammar
    assert Grammar.of({"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}) == grammar
    assert Grammar.of({"type": "json_object"}) == Grammar.json_object()
    for bad in ("a+", ["a", "b"], 3, True, {"type": "text"}, {"type": "json_schema"}, object(), b"x"):
        with pytest.raises(GrammarError):
            Grammar.of(bad)
    with pytest.raises(GrammarError, match=r"Grammar\.regex"):
        Grammar.of("a+")
    with pytest.raises(GrammarError, match=r"Grammar\.choice"):
        Grammar.of(["a"])


def test_importing_the_package_is_light() -> None:
    probe = (
        "import sys; from asyncengine.grammar import Grammar;"
        "Grammar.json_schema({'type': 'integer'}); Grammar.regex('a');"
        "print([m for m in ('outlines', 'llguidance', 'torch', 'pydantic') if m in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


# ---------------------------------------------------------------- hostile input at construction


def cyclic() -> dict[str, Any]:
    here: dict[str, Any] = {}
    here["items"] = here
    return here


def doubled() -> dict[str, Any]:
    here: dict[str, Any] = {}
    for _ in range(40):
        here = {"allOf": [here, here]}
    return here


@pytest.mark.parametrize(
    "make",
    [
        lambda: Grammar.json_schema(cyclic()),
        lambda: Grammar.json_schema(nested(100_000)),
        lambda: Grammar.json_schema(doubled()),
        lambda: Grammar.json_schema('{"enum":' + "[" * 60_000 + "]" * 60_000 + "}"),
        lambda: Grammar.json_schema('{"items":' * 60_000 + "1" + "}" * 60_000),
        lambda: Grammar.ebnf("root ::= " + "(" * 60_000 + '"a"' + ")" * 60_000),
        lambda: Grammar.ebnf("root ::= r0\n" + "".join(f"r{i} ::= r{i + 1}\n" for i in range(5_000)) + 'r5000 ::= "a"'),
        lambda: Grammar.regex("a" * 300_000),
    ],
)
def test_hostile_input_is_too_large_not_a_crash(make: Any) -> None:
    with pytest.raises(GrammarTooLarge):
        make()
