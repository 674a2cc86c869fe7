"""Facts about the ways in which families of models write tool calls and reasoning: plain data."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import resources
from types import MappingProxyType
from typing import Any, Literal

from asyncengine.grammar.schema.arguments import Members

ReasoningState = Literal["none", "open", "closed", "undecided"]
"""The part that the model begins with: none, inside reasoning, after it, or it may begin one."""


TEXT = ("<text>\n", "</text>")
"""Marks of an answer in words, where the model was told of tools by a text of the engine's."""
RESULT = ("<tool_response>\n", "</tool_response>")
"""Marks of a call's result there."""


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """The exact text of calls. One call is `name_open` + name + `name_close` + arguments + `call_close`.

    With `each` every call is written `trigger` + `opening` + call, joined by `separator`; else the calls, joined by
    `separator`, stand between one `trigger` + `opening` and one `closing`.
    """

    family: str
    trigger: str = ""
    """Announces calls; text before it is content. Empty where calls are the whole message."""
    opening: str = ""
    name_open: str = '{"name": "'
    name_close: str = '", "arguments": '
    call_close: str = "}"
    separator: str = ", "
    closing: str = ""
    each: bool = False
    optional_trigger: bool = False
    """Calls are the whole message, with or without the trigger before them."""
    single: bool = False
    """There is one call at most."""
    others: tuple[tuple[str, str], ...] = ()
    """Texts that models write in place of `trigger` where no grammar holds them, each with the text that closes it."""
    loose: tuple[str, ...] = ()
    """Parts of the texts that models leave out where no grammar holds them."""
    list_for_several: bool = False
    """One call is written bare, several as a JSON list."""
    members: Members | None = None
    """The form of arguments; None: one JSON object."""
    signs: tuple[str, ...] = field(default=(), compare=False)
    """Texts that tell the format where a template renders no calls: parts of the template, or names of special
    tokens."""
    rendered: bool = True
    """The template writes calls. Else they have to be in the content that it gets."""
    generic: bool = False
    """The template reads no tools and writes no calls: the model knows the format from a text of the engine's alone."""

    @property
    def title(self) -> str:
        """Name of the format, and whether the model was only told of it."""
        return f"{self.family} (generic)" if self.generic else self.family

    @property
    def only_whole(self) -> bool:
        """Calls cannot follow text."""
        return not self.trigger or self.optional_trigger

    @property
    def is_object(self) -> bool:
        """A call is a JSON object with a member "name", perhaps among others."""
        return '"name"' in self.name_open

    @property
    def stem(self) -> str:
        """The first part of what stands before a name; empty if that comes first."""
        whole = self.name_open
        for part in self.loose:
            whole = whole.replace(part, "")
        return re.sub(r"(?s)(?<=>).+|\s.*", "", whole)

    @property
    def end_marker(self) -> str:
        """The text that closes a call after its arguments (or the JSON object around them), without whitespace; may
        be empty."""
        end = self.call_close.strip()
        return end.removeprefix("}").strip() if self.is_object else end

    @property
    def triggers(self) -> dict[str, str]:
        """All texts that announce calls, each with what closes them, but for a list's bracket. Where calls need none,
        JSON's brackets do."""
        own = {self.trigger: self.closing.strip().removeprefix("]").strip()} if self.trigger else {}
        return {**own, **dict(self.others), **({"{": "", "[": ""} if self.only_whole and self.is_object else {})}

    @property
    def texts(self) -> tuple[str, ...]:
        """All that is written around names, keys and values."""
        found = [self.trigger, self.opening, self.name_open, self.name_close, self.call_close, self.closing]
        if (own := self.members) is not None:
            found += [own.key_open, own.key_close, own.string_key_close, own.value_close, own.quote]
        return tuple(text for text in found if text.strip())


@dataclass(frozen=True, slots=True)
class Reasoning:
    """The markers around what a model thinks before its answer."""

    start: str
    end: str
    answer: str = ""
    """May stand before the answer's text, and `answer_end` after it; neither is content."""
    answer_end: str = ""
    sign: str = ""
    """Stands in a template of this kind too."""
    others: tuple[str, str] = ("", "")
    """Marks that may stand in the place of `answer` and `answer_end`."""

    def with_marked_text(self, after_results: bool) -> Reasoning:
        """With the marks of an answer where the model was told of tools; small ones go on with results behind some."""
        return replace(self, answer=TEXT[0], answer_end=TEXT[1], others=RESULT if after_results else ("", ""))


def _frozen(value: Any) -> Any:
    """`value` with tuples for lists."""
    if isinstance(value, dict):
        return {name: _frozen(inner) for name, inner in value.items()}
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


TABLES = _frozen(tomllib.loads((resources.files(__package__) / "families.toml").read_text(encoding="utf-8")))


_MEMBERS = {name: Members(**table["members"]) for name, table in TABLES["formats"].items() if "members" in table}
TOOL_FORMATS: Mapping[str, ToolFormat] = MappingProxyType(
    {
        name: ToolFormat(**{"family": name, **table, "members": _MEMBERS.get(name)})
        for name, table in TABLES["formats"].items()
    }
)
"""The usual text of each family. What a model's own template writes goes before it: `detect.find_tool_format`."""
REASONING_MARKERS = tuple(Reasoning(**table) for table in TABLES["reasoning"])
"""Markers in use; of several that fit a template, the first counts."""


def reasoning_state(prompt_tail: str, reasoning: Reasoning | None, specials: Sequence[str] = ()) -> ReasoningState:
    """The state in which the end of a rendered prompt leaves the model.

    A marker counts if nothing but whitespace follows it, or nothing that begins or ends a turn: no name of a special
    token (`specials`). Without knowing any, only whitespace may follow.
    """
    if reasoning is None:
        return "none"
    starts, ends = prompt_tail.rfind(reasoning.start), prompt_tail.rfind(reasoning.end)
    if starts < 0 and ends < 0:
        return "undecided"
    is_open = starts > ends
    marker = reasoning.start if is_open else reasoning.end
    rest = prompt_tail[max(starts, ends) + len(marker) :]
    turns = [name for name in specials if name and name not in (reasoning.start, reasoning.end)]
    if rest.strip() and (not turns or any(name in rest for name in turns)):
        return "undecided"
    return "open" if is_open else "closed"
