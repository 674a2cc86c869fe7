"""A generated conversation, and the check of its expected last answer."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

Message = dict[str, Any]

UNKNOWN = "The text does not say."
NO_TOOL = "Sorry, I have no tool for that."
CANNOT = "Sorry, I cannot help with that."
_CALL = re.compile(r"<tool_call>\n(.*?)\n</tool_call>", re.DOTALL)


@dataclass(frozen=True)
class Expected:
    """Requirements of the last answer: ``text`` contains every string, ``calls`` and ``json`` are equal by value."""

    kind: str
    value: Any

    def met_by(self, answer: str) -> bool:
        """Whether a generated answer (decoded, without the end-of-turn token) is a success."""
        if self.kind == "calls":
            return bool(parse_calls(answer) == self.value)
        if "<tool_call>" in answer:
            return False
        if self.kind == "json":
            try:
                found = json.loads(answer)
            except ValueError:
                return False
            return bool(typed(found) == typed(self.value))
        if self.kind == "exact":
            return bool(answer.strip() == self.value)
        return all(contains(answer, part) for part in self.value)


@dataclass
class Conversation:
    """Messages in OpenAI form, the tools offered, and what the last assistant message must achieve."""

    skill: str
    messages: list[Message]
    expected: Expected
    tools: list[dict[str, Any]] | None = None
    tags: list[str] = field(default_factory=list)

    @property
    def prompt(self) -> list[Message]:
        """Everything before the last assistant message."""
        return self.messages[:-1]


def contains(text: str, part: str) -> bool:
    """Whether the text has the part as a whole: not inside a longer word or number."""
    before = r"(?<![\w])" if part[:1].isalnum() else ""
    after = r"(?![\w])" if part[-1:].isalnum() else ""
    return re.search(before + re.escape(part) + after, text, re.IGNORECASE) is not None


def typed(value: Any) -> Any:
    """The value with booleans kept apart from the equal integers 0 and 1."""
    if isinstance(value, dict):
        return {key: typed(item) for key, item in value.items()}
    if isinstance(value, list):
        return [typed(item) for item in value]
    return (type(value).__name__, value) if isinstance(value, bool) else value


def parse_calls(answer: str) -> list[list[Any]] | None:
    """``[[name, arguments], ...]`` of a generated answer, or None when it is not made of well-formed calls."""
    calls = []
    for body in _CALL.findall(answer):
        try:
            call = json.loads(body)
            calls.append([call["name"], call["arguments"]])
        except (ValueError, KeyError, TypeError):
            return None
    return calls or None


def system(text: str) -> Message:
    return {"role": "system", "content": text}


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}


def calling(calls: Iterable[tuple[str, dict[str, Any]]], text: str | None = None) -> Message:
    """An assistant message made of tool calls."""
    return {
        "role": "assistant",
        "content": text,
        "tool_calls": [
            {"type": "function", "id": f"call_{index}", "function": {"name": name, "arguments": arguments}}
            for index, (name, arguments) in enumerate(calls)
        ],
    }


def result(text: str, index: int = 0) -> Message:
    return {"role": "tool", "tool_call_id": f"call_{index}", "content": text}
