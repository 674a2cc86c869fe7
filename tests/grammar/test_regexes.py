"""Patterns mean what Python's `re` says, or are refused by name."""

from __future__ import annotations

import itertools
import re
import warnings
from random import Random
from typing import Any

import pytest
from support.data import cases_of
from support.long import TIMES
from support.tables import table

from asyncengine.errors import GrammarError, GrammarImpossible, GrammarUnsupported
from asyncengine.grammar import Grammar

from .oracle import accepts

ROWS: dict[str, Any] = cases_of(__file__)


@pytest.mark.parametrize(("pattern", "text"), table(__file__, "rewritten patterns"))
def test_patterns_are_rewritten_where_the_dialects_differ(pattern: str, text: str) -> None:
    assert Grammar.regex(pattern).text == text


@pytest.mark.parametrize(("pattern", "feature"), table(__file__, "refused patterns"))
def test_what_no_automaton_has_is_refused_by_name(pattern: str, feature: str) -> None:
    with pytest.raises(GrammarUnsupported) as caught:
        Grammar.regex(pattern)
    assert caught.value.features == ((feature, ""),)


@pytest.mark.parametrize("pattern", ["(", "a)", "[", "[]", "[^]", "a\\", "[" * 60_000, "a\0", "\ud800", r"\0", 3, None])
def test_malformed_patterns_are_refused_at_once(pattern: Any) -> None:
    with pytest.raises(GrammarError):
        Grammar.regex(pattern)


@pytest.mark.parametrize("pattern", ROWS["patterns_mean_what_python_says"])
def test_patterns_mean_what_python_says(pattern: str) -> None:
    """All texts up to three letters of an alphabet with every awkward character, against `re.fullmatch`."""
    grammar = Grammar.regex(pattern)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python wonders about [[ and &&, which is the point
        expected = re.compile(pattern)
    letters = "abAB<>{}[]()&-+,./^~x*\\,|"
    texts = ["", *letters, *map("".join, itertools.product("ab<>&]-+{x}.,", repeat=2)), "abb", "<a>", "aab", "a{x}"]
    wrong = [text for text in texts if accepts(grammar, text) != bool(expected.fullmatch(text))]
    assert wrong == []


@pytest.mark.parametrize("seed", range(TIMES))
def test_look_aheads_mean_what_python_says(seed: int) -> None:
    """Random patterns, whole and found in strings of a schema. Mostly none is refused; that is so by name."""
    random = Random(seed)
    texts = ["".join(letters) for size in range(5) for letters in itertools.product("abc", repeat=size)]
    refused, found = 0, 0
    for pattern in (_looking_ahead(random, 0) for _ in range(50)):
        expected = re.compile(pattern)
        try:
            grammars = Grammar.regex(pattern), Grammar.json_schema({"type": "string", "pattern": pattern})
            said = [(accepts(grammars[0], text), accepts(grammars[1], f'"{text}"')) for text in texts]
        except GrammarUnsupported as error:
            refused += error.features[0][0] in ("look-ahead", "pattern", "^ in the middle", "$ in the middle")
            continue
        except GrammarImpossible:
            said = [(False, False)] * len(texts)
        meant = [(bool(expected.fullmatch(text)), bool(expected.search(text))) for text in texts]
        assert said == meant, pattern
        found += 1
    assert refused + found == 50
    assert found > 25


def _looking_ahead(random: Random, depth: int) -> str:
    def item() -> str:
        inner = _looking_ahead(random, depth + 1) if depth < 2 and random.random() < 0.5 else ""
        if inner:
            return random.choice(("(?!{})", "(?={})", "({})", "({})?")).format(inner)
        return random.choice(("a", "b", "c", "[ab]", ".", "a*", "b?", "((?!ab).)*$" if not depth else ".*"))

    branch = "".join(item() for _ in range(random.randint(1, 3)))
    return random.choice(("^", "")) * (not depth) + branch + random.choice(("", "", "$", f"|{item()}"))
