"""Tokenizations of a format's texts: as special tokens or spelled out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from asyncengine.grammar.chat.formats import NUMBER
from asyncengine.grammar.lark import literal


@dataclass(frozen=True, slots=True)
class Markers:
    """Markers of a tokenizer: `special` maps the names of its special tokens to their ids."""

    special: Mapping[str, int]

    def lark(self, text: str) -> str:
        """`text` as a sequence of Lark strings and special tokens; empty for no text."""
        if NUMBER in text:
            before, _, after = text.partition(NUMBER)
            return sequence(self.lark(before), "/[0-9]{1,4}/", self.lark(after))
        before, special, rest = self.split(text)
        return sequence(literal(before) if before else "", special, rest)

    def split(self, text: str) -> tuple[str, str, str]:
        """`text` before its first special token, that token, and the rest, the last two as Lark."""
        found = [(text.index(name), -len(name), name) for name in self.special if name and name in text]
        if not found:
            return text, "", ""
        at, _, name = min(found)
        return text[:at], f"<[{self.special[name]}]>", self.lark(text[at + len(name) :])

    def behind_special(self, text: str) -> tuple[str, str]:
        """`text` up to its last special token, as Lark, and the rest."""
        ends = [text.rindex(name) + len(name) for name in self.special if name and name in text]
        at = max(ends, default=0)
        return (self.lark(text[:at]) if at else ""), text[at:]

    def is_text(self, marker: str) -> bool:
        """Written with ordinary tokens."""
        return not any(name and name in marker for name in self.special)


def literal_pattern(text: str) -> str:
    """A regular expression for exactly `text`, fit to stand between slashes."""
    return "".join(char if char.isalnum() and char.isascii() else f"\\x{{{ord(char):x}}}" for char in text)


def sequence(*parts: str) -> str:
    return " ".join(part for part in parts if part)
