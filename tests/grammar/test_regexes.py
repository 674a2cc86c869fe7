"""Patterns mean what Python's `re` says, or are refused by name."""

from __future__ import annotations

import itertools
import re
import warnings
from typing import Any

import pytest

from asyncengine.errors import GrammarError, GrammarUnsupported
from asyncengine.grammar import Grammar

from .oracle import accepts


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        ("^a$", "a"),
        ("^(a|b)$", "(a|b)"),
        ("^a|b$", "a|b"),
        (r"\Aa\Z", "a"),
        ("(?i)^a$", "(?i)a"),
        ("a{,3}", "a{0,3}"),
        ("[[a&&b]", r"[\[a\&\&b]"),
        ("[+--]", r"[+-\-]"),
        ("[]a]", r"[\]a]"),
        ("a{x}", r"a\{x\}"),
        (r"\<a\>", "<a>"),
        (r"[\b]", r"[\x08]"),
        ("", ""),
    ],
)
def test_patterns_are_rewritten_where_the_dialects_differ(pattern: str, text: str) -> None:
    assert Grammar.regex(pattern).text == text


@pytest.mark.parametrize(
    ("pattern", "feature"),
    [
        ("a(?=b)", "look-ahead"),
        ("a(?!b)", "look-ahead"),
        ("(?<=a)b", "look-behind"),
        (r"(a)\1", "back-reference"),
        ("(?P<x>a)(?P=x)", "back-reference"),
        (r"\bx", "word boundary"),
        ("(?>a)", "atomic group"),
        ("a++", "possessive quantifier"),
        ("a^b", "^ in the middle"),
        ("(^a)*", "^ in the middle"),
        ("(a$)+", "$ in the middle"),
        ("a$b", "$ in the middle"),
    ],
)
def test_what_no_automaton_has_is_refused_by_name(pattern: str, feature: str) -> None:
    with pytest.raises(GrammarUnsupported) as caught:
        Grammar.regex(pattern)
    assert caught.value.features == ((feature, ""),)


@pytest.mark.parametrize("pattern", ["(", "a)", "[", "[]", "[^]", "a\\", "[" * 60_000, "a\0", "\ud800", r"\0", 3, None])
def test_malformed_patterns_are_refused_at_once(pattern: Any) -> None:
    with pytest.raises(GrammarError):
        Grammar.regex(pattern)


@pytest.mark.parametrize(
    "pattern",
    [
        "^a|b$", "a{,2}b", "[[a&&b]+", "[+--]*", "[--/]", "[]a]+", "[^]a]", r"\<a\>", "(?i)ab", "(a|ab)(b|)", "a*?b",
        "a{x}", "{}", "]", r"[a\-b]", r"[\]\\]", "(^a|b)b", "a(b$|a$)", "^^a$$", r"[a-]", "(?:a|(b))?-", "[~~&&]",
        r"\.\*", "(?P<n>a)b", "a|", r"\x61\u0062",
    ],
)  # fmt: skip
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
