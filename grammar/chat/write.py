"""Writes tools, calls and results into the contents of messages, for templates that leave them out."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from asyncengine.grammar.chat.formats import RESULT, TABLES, TEXT, ToolFormat
from asyncengine.grammar.marks import NUMBER
from asyncengine.grammar.schema.arguments import Members

Message = dict[str, Any]


def with_calls_in_content(messages: Sequence[Message], form: ToolFormat) -> list[Message]:
    """Checked messages for a template that renders no calls: each message's calls are at the end of its content."""
    turns = []
    for message in messages:
        turns.append({key: value for key, value in message.items() if key != "tool_calls"})
        functions = [call["function"] for call in message.get("tool_calls") or ()]
        if functions:
            given = [(each["name"], each["arguments"]) for each in functions]
            calls = [(name, json.loads(each) if isinstance(each, str) else each) for name, each in given]
            turns[-1]["content"] = _joined([message.get("content") or "", written_calls(form, calls)], "")
    return turns


def with_results_as_questions(messages: Sequence[Message]) -> list[Message]:
    """Checked messages for a template that knows no results: the user says them, all that stand together at once, and
    what else he says next."""
    turns, pending = list[Message](), list[Any]()
    for message in messages:
        if message["role"] == "tool":
            pending += [RESULT[0].strip(), message["content"], RESULT[1]]
            continue
        more = message["role"] == "user"
        if pending and not more:
            turns.append({"role": "user", "content": _joined(pending)})
        turns.append({**message, "content": _joined([*pending, message["content"]])} if pending and more else message)
        pending = []
    return [*turns, {"role": "user", "content": _joined(pending)}] if pending else turns


def with_tools_in_content(
    messages: Sequence[Message], tools: Sequence[Any], form: ToolFormat, has_system: bool
) -> list[Message]:
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
    parts = [turns[first]["content"], text] if has_system else [text, turns[first]["content"]]
    turns[first] = {**turns[first], "content": _joined(parts, "\n\n")}
    return turns


def _joined(parts: Sequence[Any], between: str = "\n") -> Any:
    """Contents as one: a text, or blocks where one of them has any."""
    if all(isinstance(part, str) for part in parts):
        return between.join(parts)
    blocks = [[{"type": "text", "text": part}] if isinstance(part, str) else part for part in parts]
    return [block for part in blocks for block in part]


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
