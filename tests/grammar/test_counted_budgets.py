"""Grammars with large counts and random budgets: refused where no output fits, complete and within the budget else.

What fits is computed independently (`unrolled`). `ASYNCENGINE_LONG=20` runs twenty times as many cases.
"""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import pytest
from support.big_tokenizers import SMALL
from support.grammar_walks import text_of, walk
from support.long import TIMES
from support.small_vocabulary import TOKENS

from asyncengine.errors import GrammarError, GrammarTooLarge
from asyncengine.grammar import Grammar
from asyncengine.grammar.llguidance_backend import LlguidanceBackend
from asyncengine.grammar.matcher import Matcher
from asyncengine.grammar.vocabulary import MAX_TOKEN_BYTES, Vocabulary

from .torture import real_vocabulary
from .unrolled import Tree, accepts, alt, least_tokens, seq, text, times

CASES = 24 * TIMES
LARGE = 240 if CASES > 100 else 60
"""Counts; the independent computation unrolls them."""
ORDINARY = [data for data in TOKENS[:-3] if data]
SETS = {
    "[a-z]": bytes(range(97, 123)),
    "[ab]": b"ab",
    "[0-9]": b"0123456789",
    "[a-z ,:]": b" ,:" + bytes(range(97, 123)),
}
WORDS = ("ab", "ba", "the", "x", "name", "00", "zz", "abc", ", ", "c")
LETTER = Tree("set", chars=bytes(byte for byte in range(32, 127) if byte not in b'"\\'))
DIGIT = Tree("set", chars=SETS["[0-9]"])
QUOTE = text(b'"')
AMPLE = 8
"""Budgets of so many times the least one are never refused. Tokens that cross the ends of counted parts make the least:
`([a-z ,:][a-z ,:]{0,2}([ab]|, |[a-z])){203,}` has an output of 82 tokens, and the shortest known has 406."""
BLANK = alt(text(b""), text(b" "))


def pattern(rng: random.Random, depth: int, room: int) -> tuple[str, Tree]:
    """A random pattern whose counts multiply to `room` at most, and the same as a tree."""
    kind = rng.choice(["set", "word", "seq", "alt", "times", "times", "times"] if depth else ["set", "word"])
    if kind == "set":
        name = rng.choice(list(SETS))
        return name, Tree("set", chars=SETS[name])
    if kind == "word":
        word = rng.choice(WORDS)
        return word, text(word.encode())
    if kind == "times":
        least = rng.randrange(room // 4, room + 1)
        most = rng.choice([least, least + rng.randrange(1, 9), None])
        inner, tree = pattern(rng, depth - 1, max(1, room // max(1, least)))
        top = "" if most is None else str(most)
        return f"(?:{inner}){{{least},{top}}}", times(tree, least, most)
    parts = [pattern(rng, depth - 1, max(1, room // 2)) for _ in range(rng.randrange(2, 4))]
    inside = ("|" if kind == "alt" else "").join(part for part, _ in parts)
    return f"(?:{inside})", (alt if kind == "alt" else seq)(*(tree for _, tree in parts))


def string(rng: random.Random, room: int) -> tuple[dict[str, Any], Tree]:
    least = rng.randrange(room // 2, room + 1)
    most = rng.choice([None, least, least + 3])
    schema: dict[str, Any] = {"type": "string", "minLength": least}
    if most is not None:
        schema["maxLength"] = most
    return schema, seq(text(b'"'), times(LETTER, least, most), text(b'"'))


def value(rng: random.Random, depth: int, room: int) -> tuple[dict[str, Any], Tree]:
    """A random schema whose counts multiply to `room` at most, and its texts as a tree."""
    if not depth or room < 4:
        return string(rng, room)
    if rng.random() < 0.5:
        least = rng.randrange(1, max(2, room // 4))
        schema, tree = value(rng, depth - 1, room // least)
        more = times(seq(BLANK, text(b","), BLANK, tree), least - 1, None)
        array = {"type": "array", "minItems": least, "items": schema}
        return array, seq(text(b"["), BLANK, tree, more, BLANK, text(b"]"))
    (first, one), (second, two) = (value(rng, depth - 1, room // 2) for _ in range(2))
    keys = [seq(text(f'"{key}"'.encode()), BLANK, text(b":"), BLANK) for key in ("name", "x")]
    inside = seq(keys[0], one, BLANK, text(b","), BLANK, keys[1], two)
    properties = {"name": first, "x": second}
    needed = {"type": "object", "properties": properties, "required": ["name", "x"], "additionalProperties": False}
    return needed, seq(text(b"{"), BLANK, inside, BLANK, text(b"}"))


def checked(vocabulary: Vocabulary, grammar: Grammar, tree: Tree, rng: random.Random) -> None:
    """No output is claimed that there is not; one is written whenever the budget is taken, and it is if it is ample.

    Between the least budget there is and the least known lie outputs of odd tokens (`": "` is a string of two letters).
    """
    exact = least_tokens(tree, ORDINARY)
    template = LlguidanceBackend(vocabulary).compile(grammar)
    known = template.min_tokens
    assert exact <= known <= AMPLE * exact, (exact, known, grammar.text)
    for budget in (known, known + 1, known + rng.randrange(2, 9), 2 * known, AMPLE * known):
        try:
            matcher = Matcher(template, budget, "close")
        except GrammarError:  # the last output hit a limit of the library: the service compiles again, too
            template = LlguidanceBackend(vocabulary).compile(grammar)
            matcher = Matcher(template, budget, "close")
        tokens, _ = walk(vocabulary, matcher, budget, rng, jump=bool(budget % 2))
        assert len(tokens) <= budget
        assert matcher.overrun() is None, budget
        output = text_of(vocabulary, tokens)
        if grammar.kind == "regex":
            assert accepts(tree, output.encode()), output
        else:
            jsonschema.validate(json.loads(output), json.loads(grammar.text))


@pytest.mark.parametrize("kind", ["regex", "schema"])
def test_whatever_fits_is_written_and_nothing_else_is_begun(vocabulary: Vocabulary, kind: str) -> None:
    too_large: list[str] = []
    for seed in range(CASES // 2):
        rng = random.Random(f"{kind} {seed}")
        if kind == "regex":
            said, tree = pattern(rng, 3, LARGE)
            grammar = Grammar.regex(said)
        else:
            schema, tree = value(rng, 2, LARGE)
            grammar = Grammar.json_schema(schema)
        try:
            checked(vocabulary, grammar, tree, rng)
        except GrammarTooLarge as error:  # an honest end, where the library itself cannot follow what is written
            too_large.append(f"{grammar.text}: {error}")
    assert len(too_large) <= CASES // 100, too_large


@pytest.mark.parametrize(
    ("grammar", "tree"),
    [
        (Grammar.regex("[a-z ,:]{54,60}"), times(Tree("set", chars=SETS["[a-z ,:]"]), 54, 60)),
        (Grammar.regex("[a-z ,:]{54}"), times(Tree("set", chars=SETS["[a-z ,:]"]), 54, 54)),
        (Grammar.regex("(?:ab|ba)[0-9]{200,}"), seq(alt(text(b"ab"), text(b"ba")), times(DIGIT, 200, None))),
        (Grammar.regex("(?:ab|cde){120}c"), seq(times(alt(text(b"ab"), text(b"cde")), 120, 120), text(b"c"))),
        (Grammar.json_schema({"type": "string", "minLength": 301}), seq(QUOTE, times(LETTER, 301, None), QUOTE)),
    ],
)
def test_the_least_budget_is_exact_up_to_where_counted_parts_meet(
    vocabulary: Vocabulary, grammar: Grammar, tree: Tree
) -> None:
    template = LlguidanceBackend(vocabulary).compile(grammar)
    least = least_tokens(tree, ORDINARY)
    assert least <= template.min_tokens <= least + 1


def test_a_long_text_is_neither_begun_nor_searched_for(vocabulary: Vocabulary) -> None:
    """60,000 letters and 700 tokens: the least number needed is known as soon as the grammar is compiled."""
    schema = {"type": "object", "properties": {"note": {"type": "string", "minLength": 60_000}}, "required": ["note"]}
    template = LlguidanceBackend(vocabulary).compile(Grammar.json_schema(schema))
    assert 12_000 <= template.min_tokens < 12_010


@pytest.mark.parametrize("sign", [r"\d", r"\s", r"\w", r"\D", r"\S", r"\W", r"[\w.]", r"[^\d_]"])
@pytest.mark.parametrize("of_schema", [False, True])
def test_classes_of_characters_are_those_of_the_library(vocabulary: Vocabulary, sign: str, of_schema: bool) -> None:
    """Words and digits of other scripts are such in expressions, but not in patterns of schemas, as in ECMAScript."""
    pattern = f"{sign}{{40}}x"
    grammar = (
        Grammar.json_schema({"type": "string", "pattern": f"^{pattern}$"}) if of_schema else Grammar.regex(pattern)
    )
    template = LlguidanceBackend(vocabulary).compile(grammar)
    assert template.has_costs(0)
    quote = b'"' if of_schema else b""
    for letter in "aZ_5 .-\u00a0\u00e9\u0663\u03b1\u2028\u0923\u65e5\u212a":
        begin, matcher = quote + letter.encode(), Matcher(template, 400, "close")
        if template.fresh_matcher().try_consume_tokens([*begin]) < len(begin):
            continue
        for token in begin:
            assert matcher.accept(token, jump=False) == [token]
        walk(vocabulary, matcher, 400 - len(begin), random.Random(2))
        assert matcher.overrun() is None
        assert not matcher.closing.lost  # type: ignore[union-attr]


@pytest.mark.parametrize("letters", ["abcdefghijklmnopqrstuvwxyz", " 01:x", "".join(map(chr, range(128))), "é", ""])
def test_tokens_within_a_set_of_letters_are_all_of_them(letters: str) -> None:
    """The set is checked against every token of a real vocabulary, looked at letter by letter."""
    vocabulary = real_vocabulary(SMALL)
    allowed = {letter for letter in letters.encode() if letter < 128}
    wanted: dict[int, int] = {}
    for token, data in enumerate(vocabulary.token_bytes):
        if 1 < len(data) <= MAX_TOKEN_BYTES and set(data) <= allowed and token not in vocabulary.special_ids:
            wanted.setdefault(len(data), token)
    found = vocabulary.within(sum(1 << letter for letter in letters.encode()))
    assert list(found.items()) == sorted(wanted.items(), reverse=True)


def test_tokens_too_long_to_be_looked_for_are_in_no_way_to_the_end() -> None:
    """They are counted nowhere: a cost that one of them would keep is lost once the text is spelled."""
    long = b"-" * (2 * MAX_TOKEN_BYTES)
    pieces = [*(bytes([i]) for i in range(256)), b"--", b"-" * 10, long, b"<eos>"]
    vocabulary = Vocabulary(pieces, [259], [], 260)
    template = LlguidanceBackend(vocabulary).compile(Grammar.json_schema({"type": "string", "minLength": 30}))
    assert template.min_tokens == 5  # two quotes, ten dashes three times
    for budget in range(5, 20):
        matcher = Matcher(template, budget, "close")
        output, _ = walk(vocabulary, matcher, budget, random.Random(budget))
        assert len(json.loads(text_of(vocabulary, output))) >= 30
