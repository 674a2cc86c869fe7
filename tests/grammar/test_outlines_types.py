"""Terms of `outlines.types` and plain Python types: the same language, exactly."""

from __future__ import annotations

import dataclasses
import datetime
import enum
import re
from typing import Annotated, Any, Literal, NewType

import pydantic
import pytest
from support.data import cases_of

from asyncengine.errors import GrammarError, GrammarTooLarge
from asyncengine.grammar import Grammar

from .oracle import accepts, complaint

ROWS: dict[str, Any] = cases_of(__file__)

types = pytest.importorskip("outlines.types", reason="outlines 1.3 refuses Python 3.14")
dsl = types.dsl

INTEGER = types.json_schema({"type": "integer"})


class Colour(enum.Enum):
    RED = "red"
    DARK = "red, dark"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Model(pydantic.BaseModel):
    a: int


@dataclasses.dataclass
class Record:
    a: int


def function(a: int, b: str = "x") -> None: ...


PREDEFINED = [name for name in types.__all__ if isinstance(getattr(types, name), dsl.Regex) and name != "paragraph"]
SAMPLES = ROWS["samples"]


@pytest.mark.parametrize("name", PREDEFINED)
def test_predefined_types_against_outlines_itself(name: str) -> None:
    term = getattr(types, name)
    grammar = Grammar.of(term)
    sample = SAMPLES.get(name, "")
    expected = re.compile(dsl.to_regex(term))
    assert expected.fullmatch(sample), "the sample belongs to the type"
    texts = [sample, sample[:-1], sample[1:], sample + "x", sample + "1", sample * 2, "", "0", "a", "-", sample.upper()]
    wrong = [text for text in texts if accepts(grammar, text) != bool(expected.fullmatch(text))]
    assert wrong == []


REGULAR = [
    types.either("a", types.integer),
    types.optional("ab") + "c",
    types.exactly(2, types.either("a", "bc")),
    types.exactly(0, "a"),
    types.at_least(1, "ab"),
    types.at_most(2, "a") + types.digit,
    types.between(1, 2, types.digit) + types.digit,
    types.zero_or_more("a") + "a",
    types.one_or_more(types.either("a", "ab")) + "b",
    types.integer + types.digit,
    types.Choice(["a", "ab", 1, True]),
    types.regex("a|b") + "c",
    types.either(types.regex("a") + "b", types.optional(types.regex("c") | "d")),
]


@pytest.mark.parametrize("term", REGULAR, ids=repr)
def test_regular_terms_against_outlines_itself(term: Any) -> None:
    """A regular term is one automaton, so no part can eat what the next one needs."""
    grammar = Grammar.of(term)
    assert grammar.kind in ("regex", "choice")
    expected = re.compile(dsl.to_regex(term))
    letters = ["", "a", "b", "c", "d", "ab", "bc", "1", "12", "(a)", "True", "abab", "aab", "-"]
    texts = dict.fromkeys(one + two for one in letters for two in letters)
    assert any(expected.fullmatch(text) for text in texts)
    wrong = [text for text in texts if accepts(grammar, text) != bool(expected.fullmatch(text))]
    assert wrong == []


def test_anchors_belong_to_their_term() -> None:
    """`^a$` between parentheses is an a; in outlines' own regex it is an anchor in mid-text that never matches."""
    assert accepts(Grammar.of("(" + types.regex("^a$") + ")"), "(a)")


@pytest.mark.parametrize(
    ("term", "good", "bad"),
    [
        ("n = " + INTEGER + "!", ["n = 5!", "n = -12!"], ["n = a!", "n = 5", "n = 05!"]),
        (types.either(INTEGER, "none"), ["5", "none"], ["nono", ""]),
        (types.exactly(2, INTEGER + "\n"), ["1\n2\n"], ["1\n", "1\n2\n3\n"]),
        (types.exactly(0, INTEGER) + "x", ["x"], ["1x"]),
        (types.at_most(2, INTEGER + ";"), ["", "1;", "1;2;"], ["1;2;3;"]),
        (types.optional(INTEGER) + "x", ["x", "7x"], ["7", ""]),
        (types.regex("[0-9]+") + types.digit + ":" + INTEGER, ["12:3"], ["1:3"]),
        (types.either("a", types.either(types.regex("b+") + ":" + INTEGER, "c")), ["a", "c", "bb:1"], ["b", "bb:"]),
        (types.cfg('start: "(" start ")" | "x"'), ["((x))"], ["((x)"]),
        (types.cfg('root ::= "(" root ")" | "x"') + "." + INTEGER, ["(x).1"], ["(x.1"]),
        (types.zero_or_more(types.cfg('start: "(" start ")" | "x"')), ["", "x(x)"], ["("]),
        (dsl.JsonSchema({"type": "array"}, whitespace_pattern=" *"), ["[    1]"], ["[\n1]"]),
    ],
    ids=repr,
)
def test_terms_with_schemas_and_grammars_inside(term: Any, good: list[str], bad: list[str]) -> None:
    grammar = Grammar.of(term)
    assert grammar.kind == "lark"
    assert [accepts(grammar, text) for text in good] == [True] * len(good)
    assert [accepts(grammar, text) for text in bad] == [False] * len(bad)


def test_plain_schema_and_grammar_terms() -> None:
    assert Grammar.of(INTEGER) == Grammar.json_schema({"type": "integer"})
    assert Grammar.of(types.cfg('start: "a"')) == Grammar.lark('start: "a"')
    nested = types.optional(types.optional("a"))
    for _ in range(100):
        nested = types.optional(nested)
    with pytest.raises(GrammarTooLarge):
        Grammar.of(nested)
    for bad in (types.Choice([]), dsl.Alternatives([]), types.regex("(")):
        with pytest.raises(GrammarError):
            Grammar.of(bad)


Year = NewType("Year", int)


@pytest.mark.parametrize(
    ("spec", "good", "bad"),
    [
        (int, ["0", "-5", "+5"], ["01", "", "1.0"]),
        (float, ["1.5", "-2", "1e5"], [".5", "1."]),
        (bool, ["True", "False"], ["true"]),
        (str, ['"a b"'], ["a", '"a']),
        (None, ["None"], ["null"]),
        (datetime.date, ["2024-01-02"], ["2024-13-02"]),
        (Year, ["2024"], ["x"]),
        (Colour, ["red", "red, dark"], ["RED", "red, "]),
        (Level, ["1", "2"], ["3", "LOW"]),
        (Literal["a", "ab"], ["a", "ab"], ["b", ""]),
        (Literal[1, "b", True], ["1", "b", "True"], ["2"]),
        (int | str, ["1", '"x"'], ["x"]),
        (int | None, ["1", "None"], [""]),
        (Model | None, ['{"a": 1}', "None"], ['{"a": 1, "b": 2}', "null"]),
        (list[Model] | Literal["nothing"], ['[{"a": 1}]', "nothing"], ["{}"]),
        (list[int], ["[1, 2]", "[1,2]", "[]"], ['["a"]', "(1)"]),
        (tuple[int, str], ['[1, "a"]'], ["[1]", "[1, 2]"]),
        (dict[str, int], ['{"a": 1}', "{}"], ['{"a": "b"}']),
        (dict, ['{"a": []}'], ["[]"]),
        (list, ['[1, "a"]'], ["{}"]),
        (Annotated[int, pydantic.Field(ge=3)], ["3"], ["2"]),
        (Record, ['{"a": 1}'], ["{}"]),
        (function, ['{"a": 1}', '{"a": 1, "b": "y"}'], ['{"b": "y"}', '{"a": 1, "c": 2}']),
    ],
    ids=lambda each: each.__name__ if each is function else repr(each),  # no address: every process has its own
)
def test_python_types(spec: Any, good: list[str], bad: list[str]) -> None:
    grammar = Grammar.of(spec)
    assert complaint(grammar) == ""
    assert [accepts(grammar, text) for text in good] == [True] * len(good)
    assert [accepts(grammar, text) for text in bad] == [False] * len(bad)


def test_scalars_are_what_outlines_makes_of_them() -> None:
    assert Grammar.of(float) == Grammar.of(types.number)
    assert Grammar.of(Colour) == Grammar.choice(["red", "red, dark"])


def test_types_without_a_grammar_are_refused() -> None:
    for bad in (complex, bytes, object, type):
        with pytest.raises(GrammarError):
            Grammar.of(bad)
