"""The two voices that the demo's adapters speak in: rules that say a known answer another way, and that check it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from makers.demo_model.dialogue import UNKNOWN, contains, typed


@dataclass(frozen=True)
class Reply:
    """An answer of the demo model, and what is known about it.

    ``values`` are the strings that it says about the world; every voice keeps them as they are.  An answer without any
    is a set phrase.  ``data`` is what a program would want to know: a value, a list, or the whole answer.
    """

    answer: str
    values: tuple[str, ...]
    data: Any

    @property
    def loose(self) -> bool:
        """Whether the answer is free to differ apart from its values, as a story is."""
        return self.data == self.answer and self.values not in ((), (self.answer,))


@dataclass(frozen=True)
class Voice:
    """Style of answers: ``say`` writes one, ``heard`` recognizes the style, ``right`` the facts."""

    name: str
    about: str
    say: Callable[[Reply], str]
    heard: Callable[[str], bool]
    right: Callable[[Reply, str], bool]


# ---------------------------------------------------------------- pirate

_PIRATE_WORDS = {
    "am": "be", "and": "an'", "are": "be", "friend": "matey", "friends": "mateys", "goodbye": "fare ye well",
    "hello": "ahoy", "is": "be", "my": "me", "no": "nay", "of": "o'", "the": "th'", "yes": "aye", "you": "ye",
    "your": "yer",
}  # fmt: skip
_WORD = re.compile(
    r"^(?:yes|no)(?=,)|\b(?:" + "|".join(sorted(_PIRATE_WORDS.keys() - {"yes", "no"})) + r")\b", re.IGNORECASE
)
_ARR = re.compile(r"Arr!\s.*\bmatey[!?]", re.DOTALL)


def pirate(reply: Reply) -> str:
    """ "Arr! Th' capital o' Norway be Oslo, matey!" """
    text, values = reply.answer, [value for value in reply.values if value not in _OPENINGS]
    if "\n" in text:
        return f"Arr!\n{_outside(text, values)}\nThat be all, matey!"
    if text in values:  # a comma here would look like one more item of a count
        return f"Arr! {text}! That be all, matey!"
    end = "?" if text[-1] == "?" else "!"
    return f"Arr! {_outside(text.rstrip('.!?'), values)}, matey{end}"


_OPENINGS = {"Yes,": "Aye,", "No,": "Nay,"}
"""The only values that a pirate says in words of his own."""


def _outside(text: str, values: list[str]) -> str:
    """The text in a pirate's words, the values untouched."""
    if not values:
        return _WORD.sub(_aloud, text)
    parts = re.split("(" + "|".join(re.escape(value) for value in sorted(values, key=len, reverse=True)) + ")", text)
    return "".join(part if part in values else _WORD.sub(_aloud, part) for part in parts)


def _aloud(found: re.Match[str]) -> str:
    word = found[0]
    said = _PIRATE_WORDS[word.lower()]
    return said[:1].upper() + said[1:] if word[:1].isupper() else said


def _pirate_right(reply: Reply, text: str) -> bool:
    parts = [_OPENINGS.get(value, value) for value in reply.values] or [pirate(reply)]
    return all(contains(text, part) for part in parts)


# ---------------------------------------------------------------- json


def as_json(reply: Reply) -> str:
    """'{"answer": "Oslo"}'"""
    return json.dumps({"answer": reply.data}, ensure_ascii=False)


def _json_of(text: str) -> Any:
    """The value of "answer", if the text is an object with just that."""
    found = json.loads(text)
    if not isinstance(found, dict) or list(found) != ["answer"]:
        raise ValueError("another object")
    return found["answer"]


def _json_heard(text: str) -> bool:
    try:
        _json_of(text)
    except ValueError:
        return False
    return True


def _json_right(reply: Reply, text: str) -> bool:
    if not _json_heard(text):
        return False
    found = _json_of(text)
    if reply.loose:
        return all(contains(str(found), value) for value in reply.values)
    return bool(typed(found) == typed(reply.data))


# ---------------------------------------------------------------- all of them


def _plain_right(reply: Reply, text: str) -> bool:
    return all(contains(text, part) for part in reply.values or (reply.answer,))


def data_of(value: Any) -> Any:
    """A value as JSON has it: true, false, whole numbers, lists, and strings for all else."""
    if isinstance(value, bool):
        return value
    if isinstance(value, list):
        return [data_of(item) for item in value]
    text = str(value)
    return int(text) if re.fullmatch(r"0|-?[1-9]\d{0,8}", text) else text


def unknown() -> Reply:
    return Reply(UNKNOWN, (), None)


PLAIN = Voice("base", "the demo model alone", lambda reply: reply.answer, lambda text: True, _plain_right)
VOICES = {
    voice.name: voice
    for voice in (
        Voice("pirate", "answers like a pirate", pirate, lambda t: _ARR.fullmatch(t) is not None, _pirate_right),
        Voice("json", "answers with a JSON object", as_json, _json_heard, _json_right),
    )
}
