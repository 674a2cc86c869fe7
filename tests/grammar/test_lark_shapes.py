"""Hand-written grammars: their shortest ends are known by arithmetic, where the lexer is greedy or lazy, too."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from support.grammar_walks import text_of, walk
from support.long import TIMES
from support.tables import table

from asyncengine.grammar import Grammar
from asyncengine.grammar.llguidance_backend import LlguidanceBackend
from asyncengine.grammar.matcher import Matcher
from asyncengine.grammar.shapes import products
from asyncengine.grammar.shapes.nodes import Shape
from asyncengine.grammar.shapes.patterns import regex_shape
from asyncengine.grammar.shapes.products import Product, State
from asyncengine.grammar.shapes.schemas import leaf_shape
from asyncengine.grammar.vocabulary import Vocabulary

SUM = """
?start: sum
?sum: product | sum "+" product | sum "-" product
?product: atom | product "*" atom
?atom: NUMBER | "-" atom | "(" sum ")"
NUMBER: /[0-9]+/
"""
PERSON = (
    '{"type": "object", "properties": {"name": {"type": "string"}, "n": {"type": "integer"}}, "required": ["name"]}'
)
GRAMMARS = table(__file__, "shapes of Lark")
"""Lark, and a shortest text."""
SHORT = (
    "letters of either case", "itself twice", "left recursion", "a lexeme that goes on", "blanks between",
    "blanks before a special token", "blanks behind nothing", "a product in another that nothing matches",
)  # fmt: skip
"""Grammars whose outputs mostly end by themselves."""


@pytest.mark.parametrize("name", GRAMMARS)
def test_no_output_of_lark_is_lost_from_the_stated_minimum_on(name: str, vocabulary: Vocabulary) -> None:
    lark, shortest = GRAMMARS[name]
    template = LlguidanceBackend(vocabulary).compile(Grammar.lark(lark))
    assert template.min_tokens <= len(vocabulary.tokenize(shortest)) + 2
    steered = 0
    for seed in range(12 * TIMES):
        rng = random.Random(f"{name} {seed}")
        budget = template.min_tokens + rng.choice([0, 0, 1, 2, 5, 9, 30])
        matcher = Matcher(template, budget, "close")
        tokens, _ = walk(vocabulary, matcher, budget, rng, jump=bool(seed % 2))
        assert matcher.overrun() is None
        assert matcher.closing is not None
        assert not matcher.closing.lost
        assert text_of(vocabulary, tokens)
        steered += matcher.steered_from is not None
    assert steered or name in SHORT


@pytest.mark.parametrize(
    "lark",
    ['start: x\nx: y "b" | "a"\ny: x "c"', 'start: "<" %regex {"substring_words": "a b c"} ">"'],
    ids=["rules that begin one another", "an expression of the library's own"],
)
def test_what_has_no_shape_is_not_steered(lark: str, vocabulary: Vocabulary) -> None:
    """An output that ends by itself is complete; one that its budget cuts is an error, never passed off as complete."""
    template = LlguidanceBackend(vocabulary).compile(Grammar.lark(lark))
    assert template.min_tokens == 0
    ended = 0
    for seed in range(20):
        matcher = Matcher(template, 1 + seed % 4, "close")
        walk(vocabulary, matcher, 1 + seed % 4, random.Random(seed))
        assert matcher.steered_from is None
        assert (matcher.overrun() is None) == matcher.state.is_accepting()
        ended += matcher.overrun() is None
    assert 0 < ended < 20


def test_looking_for_the_end_of_a_product_is_bounded(vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many readings cost more than few: what counts is time."""
    looked = 0
    after = Product._step

    def counted(self: Product, state: State, byte: int) -> State | None:
        nonlocal looked
        looked += sum(map(len, state))
        return after(self, state, byte)

    monkeypatch.setattr(Product, "_step", counted)
    monkeypatch.setattr(products, "MAX_STEPS", 2_000)
    parts = "/(a|b)*a(a|b){12}/ & /(a|b)*b(a|b){13}/ & ~/(a|b)*(aa|bb)(a|b){14}/"
    LlguidanceBackend(vocabulary).compile(Grammar.lark(f"start: A\nA: {parts}"))
    assert looked < 300_000


def test_the_end_of_a_long_key_is_looked_for_among_ascii_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """A key that `^.{1,255}$` leaves over is 256 letters: by the bytes of all letters that takes 30,000 steps."""
    monkeypatch.setattr(products, "MAX_STEPS", 5_000)
    shape = leaf_shape(r'/"[^"\\\x00-\x1f\x7f]*"/ & ~/"(?:.{1,255})"/')
    assert isinstance(shape, Product)
    state, _ = shape.on(shape.on(b"", ord('"'))[0], ord("k"))
    assert [len(text) for text in shape.endings(state)] == [len("a" * 255 + '"')]


@pytest.mark.parametrize("shape_of", [regex_shape, lambda pattern: leaf_shape(f"/{pattern}/")])
def test_shapes_of_short_patterns_alone_are_kept(shape_of: Callable[[str], Shape]) -> None:
    """Thousands are, and the shape of a long one takes megabytes."""
    assert shape_of("ab?c") is shape_of("ab?c")
    assert shape_of("ab?" * 2000) is not shape_of("ab?" * 2000)
