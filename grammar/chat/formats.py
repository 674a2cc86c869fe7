"""The formats in which families of models write tool calls and reasoning, as plain data, and calls in these formats."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from types import MappingProxyType
from typing import Any, Literal

from asyncengine.grammar.marks import NUMBER
from asyncengine.grammar.schema.arguments import Members

ReasoningState = Literal["none", "open", "closed", "undecided"]
"""The state in which the output begins: without reasoning, inside it, behind it, or where it may come."""


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
        text = self.name_open
        for omitted in self.loose:
            text = text.replace(omitted, "")
        return re.sub(r"(?s)(?<=>).+|\s.*", "", text)

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
        closes = {self.trigger: self.closing.strip().removeprefix("]").strip()} if self.trigger else {}
        return {**closes, **dict(self.others), **({"{": "", "[": ""} if self.only_whole and self.is_object else {})}

    @property
    def texts(self) -> tuple[str, ...]:
        """All that is written around names, keys and values."""
        texts = [self.trigger, self.opening, self.name_open, self.name_close, self.call_close, self.closing]
        if (members := self.members) is not None:
            texts += [members.key_open, members.key_close, members.string_key_close, members.value_close, members.quote]
        return tuple(text for text in texts if text.strip())


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


# Tools, calls and results in the contents of messages, for templates that leave them out.


def with_calls_in_content(messages: Sequence[dict[str, Any]], form: ToolFormat) -> list[dict[str, Any]]:
    """Checked messages for a template that renders no calls: each message's calls are at the end of its content."""
    turns = []
    for message in messages:
        turns.append({key: value for key, value in message.items() if key != "tool_calls"})
        functions = [call["function"] for call in message.get("tool_calls") or ()]
        if functions:
            written = [(function["name"], function["arguments"]) for function in functions]
            calls = [(name, json.loads(value) if isinstance(value, str) else value) for name, value in written]
            turns[-1]["content"] = _joined([message.get("content") or "", written_calls(form, calls)], "")
    return turns


def with_results_as_questions(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Checked messages for a template that knows no results: the user says them, all that stand together at once, and
    what else he says next."""
    turns, pending = list[dict[str, Any]](), list[Any]()
    for message in messages:
        if message["role"] == "tool":
            pending += [RESULT[0].strip(), message["content"], RESULT[1]]
            continue
        user = message["role"] == "user"
        if pending and not user:
            turns.append({"role": "user", "content": _joined(pending)})
        turns.append({**message, "content": _joined([*pending, message["content"]])} if pending and user else message)
        pending = []
    return [*turns, {"role": "user", "content": _joined(pending)}] if pending else turns


def with_tools_in_content(
    messages: Sequence[dict[str, Any]], tools: Sequence[Any], form: ToolFormat, has_system: bool
) -> list[dict[str, Any]]:
    """Checked messages for a template that reads no tools: the system's message describes them, or the user's first
    one where the template has none of the system's."""
    described = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    call = written_calls(form, [("NAME", {"ARGUMENT": "VALUE"})])
    answer = "To answer the user:\n{}...\n{}\n\n".format(*TEXT) if form.generic else ""
    text = TABLES["preamble"].format(tools=described, call=call, text=answer)
    turns = list(messages)
    first = next((i for i, turn in enumerate(turns) if turn["role"] == ("system" if has_system else "user")), None)
    if first is None:
        return [{"role": "system" if has_system else "user", "content": text}, *turns]
    contents = [turns[first]["content"], text] if has_system else [text, turns[first]["content"]]
    turns[first] = {**turns[first], "content": _joined(contents, "\n\n")}
    return turns


def _joined(contents: Sequence[Any], between: str = "\n") -> Any:
    """Contents as one: a text, or blocks where one of them has any."""
    if all(isinstance(content, str) for content in contents):
        return between.join(contents)
    blocks = [[{"type": "text", "text": content}] if isinstance(content, str) else content for content in contents]
    return [block for content in blocks for block in content]


def written_calls(form: ToolFormat, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    """The calls (name, arguments) as the model would have written them."""
    begin = form.trigger + form.opening
    bodies = [_call(form, name, arguments).replace(NUMBER, str(index)) for index, (name, arguments) in enumerate(calls)]
    if form.each:
        return form.separator.join(begin + body for body in bodies)
    if form.list_for_several and len(bodies) > 1:
        return f"[{form.separator.join(bodies)}]"
    return begin + form.separator.join(bodies) + form.closing


def _call(form: ToolFormat, name: str, arguments: Mapping[str, Any]) -> str:
    members = form.members
    if members is None:
        written = json.dumps(arguments, ensure_ascii=False)
    else:
        written = members.separator.join(_member(members, key, value) for key, value in arguments.items())
    return f"{form.name_open}{name}{form.name_close}{written}{form.call_close}"


def _member(members: Members, key: str, value: Any) -> str:
    close = members.string_key_close if isinstance(value, str) and members.string_key_close else members.key_close
    return f"{members.key_open}{key}{close}{_value(members, value)}{members.value_close}"


def _value(members: Members, value: Any) -> str:
    if members.values == "raw":
        return members.string(value) if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    if isinstance(value, str):
        return f"{members.quote}{value}{members.quote}" if members.quote else json.dumps(value, ensure_ascii=False)
    if isinstance(value, Mapping):
        keys = (key if members.values == "bare" else json.dumps(key, ensure_ascii=False) for key in value)
        colon = members.key_close if members.values == "bare" else ": "
        pairs = zip(keys, value.values(), strict=True)
        return "{" + members.separator.join(f"{key}{colon}{_value(members, inner)}" for key, inner in pairs) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + members.separator.join(_value(members, item) for item in value) + "]"
    if members.values == "python" and (value is None or isinstance(value, bool)):
        return repr(value)
    return json.dumps(value, ensure_ascii=False)
