"""Words and other keys by states: what they take, and that what they say leads to an end does."""

from __future__ import annotations

import itertools
import json
import random

import pytest

from asyncengine.grammar.shapes.automata import OtherKey, Words

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
