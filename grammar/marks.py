"""A format's texts in Lark: parts that are special tokens of a tokenizer, and parts that are spelled out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from asyncengine.grammar.lark import literal

NUMBER = "{#}"
"""Placeholder, in the texts of a format, of a number that the model chooses, such as a call's index."""


@dataclass(frozen=True, slots=True)
class Markers:
    """The special tokens of a tokenizer: `special` maps their names to ids."""

    special: Mapping[str, int]

    def among(self, texts: Iterable[object]) -> dict[str, int]:
        """The special tokens that any of `texts` mentions."""
        joined = "\0".join(text for text in texts if isinstance(text, str))
        return {name: token for name, token in self.special.items() if name and name in joined}

    def parts(self, text: str) -> list[str]:
        """`text` as Lark strings, special tokens and numbers."""
        matches = [(text.index(name), -len(name), name) for name in (*self.special, NUMBER) if name and name in text]
        if not matches:
            return [literal(text)] if text else []
        offset, _, name = min(matches)
        symbol = "/[0-9]{1,4}/" if name == NUMBER else f"<[{self.special[name]}]>"
        return [*self.parts(text[:offset]), symbol, *self.parts(text[offset + len(name) :])]

    def lark(self, text: str) -> str:
        """`text` as a sequence of Lark; empty for no text."""
        return " ".join(self.parts(text))

    def split(self, text: str) -> tuple[str, str, str]:
        """`text` before its first special token, that token, and the rest, the last two as Lark."""
        matches = [(text.index(name), -len(name), name) for name in self.special if name and name in text]
        if not matches:
            return text, "", ""
        offset, _, name = min(matches)
        return text[:offset], f"<[{self.special[name]}]>", self.lark(text[offset + len(name) :])

    def behind_special(self, text: str) -> tuple[str, str]:
        """`text` up to its last special token, and the rest."""
        ends = [text.rindex(name) + len(name) for name in self.special if name and name in text]
        end = max(ends, default=0)
        return text[:end], text[end:]

    def is_text(self, marker: str) -> bool:
        """Whether `marker` contains no special token."""
        return not any(name and name in marker for name in self.special)


def sequence(*parts: str) -> str:
    return " ".join(part for part in parts if part)
