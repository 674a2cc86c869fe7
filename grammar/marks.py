"""Tokenizations of a format's texts: as special tokens or spelled out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from asyncengine.grammar.lark import literal

NUMBER = "{#}"
"""In the texts of a format: where the model writes a number of its own, such as a call's index."""


@dataclass(frozen=True, slots=True)
class Markers:
    """Markers of a tokenizer: `special` maps the names of its special tokens to their ids."""

    special: Mapping[str, int]

    def among(self, texts: Iterable[object]) -> dict[str, int]:
        """The special tokens that any of `texts` mentions."""
        said = "\0".join(text for text in texts if isinstance(text, str))
        return {name: token for name, token in self.special.items() if name and name in said}

    def parts(self, text: str) -> list[str]:
        """`text` as Lark strings, special tokens and numbers."""
        found = [(text.index(name), -len(name), name) for name in (*self.special, NUMBER) if name and name in text]
        if not found:
            return [literal(text)] if text else []
        at, _, name = min(found)
        mark = "/[0-9]{1,4}/" if name == NUMBER else f"<[{self.special[name]}]>"
        return [*self.parts(text[:at]), mark, *self.parts(text[at + len(name) :])]

    def lark(self, text: str) -> str:
        """`text` as a sequence of Lark; empty for no text."""
        return " ".join(self.parts(text))

    def split(self, text: str) -> tuple[str, str, str]:
        """`text` before its first special token, that token, and the rest, the last two as Lark."""
        found = [(text.index(name), -len(name), name) for name in self.special if name and name in text]
        if not found:
            return text, "", ""
        at, _, name = min(found)
        return text[:at], f"<[{self.special[name]}]>", self.lark(text[at + len(name) :])

    def behind_special(self, text: str) -> tuple[str, str]:
        """`text` up to its last special token, and the rest."""
        ends = [text.rindex(name) + len(name) for name in self.special if name and name in text]
        at = max(ends, default=0)
        return text[:at], text[at:]

    def is_text(self, marker: str) -> bool:
        """Written with ordinary tokens."""
        return not any(name and name in marker for name in self.special)


def sequence(*parts: str) -> str:
    return " ".join(part for part in parts if part)
