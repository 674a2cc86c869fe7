"""Writes calls as a format has them, for templates that leave them out."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from asyncengine.chat.formats import NUMBER, Members, ToolFormat


def with_calls_in_content(messages: Sequence[Any], form: ToolFormat | None) -> Sequence[Any]:
    """`messages` for a template that does not render calls: each message's calls are at the end of its content.

    What is no list of messages, or has calls of no known shape, is left for those who check it.
    """
    if form is None or form.rendered or isinstance(messages, str) or not isinstance(messages, Sequence):
        return messages
    return [_rewritten(message, form) for message in messages]


def _rewritten(message: object, form: ToolFormat) -> object:
    calls = message.get("tool_calls") if isinstance(message, Mapping) else None
    if not isinstance(message, Mapping) or not isinstance(calls, (list, tuple)) or not calls:
        return message
    content = message.get("content") or ""
    if not isinstance(content, (str, list, tuple)):
        return message
    try:
        written = written_calls(form, [_name_and_arguments(call) for call in calls])
    except (KeyError, TypeError, ValueError, AttributeError):
        return message
    whole = content + written if isinstance(content, str) else [*content, {"type": "text", "text": written}]
    return {**{key: value for key, value in message.items() if key != "tool_calls"}, "content": whole}


def _name_and_arguments(call: Any) -> tuple[str, dict[str, Any]]:
    function = call["function"]
    arguments = function.get("arguments") or {}
    parsed = json.loads(arguments) if isinstance(arguments, str) else arguments
    return str(function["name"]), dict(parsed)


def written_calls(form: ToolFormat, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    """The calls (name, arguments) as the model would have written them."""
    begin = form.trigger + form.opening
    bodies = [_numbered(_call(form, name, arguments), index) for index, (name, arguments) in enumerate(calls)]
    if form.each:
        return form.separator.join(begin + body for body in bodies)
    if form.list_for_several and len(bodies) > 1:
        return f"[{form.separator.join(bodies)}]"
    return begin + form.separator.join(bodies) + form.closing


def _numbered(text: str, index: int) -> str:
    return text.replace(NUMBER, str(index))


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
