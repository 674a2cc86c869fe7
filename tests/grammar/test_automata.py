"""Words and other keys by states: what they take, and that what they say leads to an end does."""

from __future__ import annotations

import itertools
import json
import random
import re

import pytest

from asyncengine.grammar.shapes.automata import OtherKey, Words
from asyncengine.grammar.shapes.lark import expression_shape

NAMES = ["a", "ab", "abc", "", "é", "éa", "€", "中文", "\U0001f600", 'q"t', "b\\s", "n\n", "line\u0001"]
LETTERS = [*"abcq", "é", "ê", "€", "中", "丮", "\U0001f600", "\U0001f601", "ࠀ", "퟿", "\U0010ffff", '"', "\\", "\n"]


def said(shape: Words, text: bytes) -> bool:
    """It takes `text`; from each state on the way all endings lead to an end."""
    state: object = b""
    for index, byte in enumerate(text):
        for ending in shape.endings(state):
            assert taken(shape, state, ending), (text[:index], ending)
        assert shape.endings(state), text[:index]
        state, ended = shape.on(state, byte)
        if index + 1 == len(text):
            return ended
        if state is None:
            return False
    return False


def taken(shape: Words, state: object, text: bytes) -> bool:
    ended = state in shape.words
    for byte in text:
        if state is None:
            return False
        state, ended = shape.on(state, byte)
    return ended


def escaped(name: str) -> str:
    return json.dumps(name, ensure_ascii=False)


@pytest.mark.parametrize("escapes", [True, False])
def test_other_keys_are_all_keys_but_the_names(escapes: bool) -> None:
    rng = random.Random(4)
    texts = {"".join(letters) for size in range(3) for letters in itertools.product(LETTERS, repeat=size)}
    for _ in range(12):
        names = rng.sample(NAMES, rng.randrange(len(NAMES)))
        shape = OtherKey([escaped(name)[1:-1] for name in names], escapes=escapes)
        for text in [*names, *rng.sample(sorted(texts), 60)]:
            plain = escapes or escaped(text)[1:-1] == text
            wanted = text not in names and (plain or any(escaped(name).startswith(escaped(text)) for name in names))
            if text in names or plain:
                assert said(shape, escaped(text).encode()) == wanted, (names, text)


def test_bytes_that_are_no_letter_are_no_key() -> None:
    shape = OtherKey(["é"], escapes=True)
    for text in (
        b'"\x80"',
        b'"\xc3"',
        b'"\xc3\xa9',
        b'"\xe4\xb8"',
        b'"\xff"',
        b'"\x1f"',
        b'"\x7f"',
        b'"\\u0041"',
        b'x"',
    ):
        assert not said(shape, text), text


def test_words_are_said_in_full() -> None:
    rng = random.Random(5)
    words = [bytes(rng.choices(b"ab\xc3\xa9", k=rng.randrange(1, 6))) for _ in range(60)]
    shape = Words(words)
    for size in range(5):
        for text in itertools.product(b"ab\xc3", repeat=size):
            if any(word.startswith(bytes(text)) for word in words):
                assert said(shape, bytes(text)) == (bytes(text) in words), text
    assert not Words([]).endings(b"")
    assert shape.endings(b"") == sorted(shape.endings(b""), key=len)


def test_products_are_what_all_of_some_patterns_match_and_none_of_others() -> None:
    """Products equal Python's own matching for every text of a few letters; none leads to an end where none is."""
    rng = random.Random(6)
    some = ["[ab]*", "(ab|a)*1?", ".{3}", "a.*|1", "(.*b)?a{2,}.*", "[^b]+", "(?s:.*)1(?s:.*)", "(?i:AB)+", "b*|a+"]
    texts = ["".join(letters) for size in range(5) for letters in itertools.product("ab1", repeat=size)]
    for _ in range(12):
        parts, wrong = rng.sample(some, 2), rng.sample(some, rng.randrange(2))
        shape = expression_shape(" & ".join([*(f"/{one}/" for one in parts), *(f"~/{one}/" for one in wrong)]))
        assert isinstance(shape, Words)
        right = [
            text
            for text in texts
            if all(re.fullmatch(one, text) for one in parts) and not any(re.fullmatch(one, text) for one in wrong)
        ]
        for text in texts[1:]:
            state: object = b""
            for index, byte in enumerate(text.encode()):
                state, ended = shape.on(state, byte)
                assert ended == (text[: index + 1] in right), (parts, wrong, text)
                if state is None:
                    assert not any(one.startswith(text[: index + 1]) and one != text[: index + 1] for one in right)
                    break
                assert all(taken(shape, state, ending) or ending == b"" for ending in shape.endings(state))
                assert shape.endings(state), (parts, wrong, text)
        assert (b"" in shape.words) == ("" in right)
