"""Checks chat messages of the OpenAI shape and brings them into the form a chat template expects."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

from asyncengine.checks import as_text, check_unicode
from asyncengine.errors import InvalidParameter
from asyncengine.text.media import PARTS, ImageParts

ROLE = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,63}")
MAX_DEPTH = 64
"""Nesting of lists and dicts in messages, tools and template variables."""

MAX_INTEGER_BITS = 4096
"""Python refuses to write integers that are much longer."""

REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names of an answer's reasoning; the first is what most templates read, gpt-oss' the second."""

NAMES = tomllib.loads((resources.files(__package__) / "chat_templates.toml").read_text(encoding="utf-8"))
"""Names that chat templates may use, or must not; the file says which."""

_PICTURES = frozenset(("image", "images", "image_url", "audio", "audios", "video", "videos"))
"""Keys under which other servers take media (Ollama's `images`): a template would not read them."""


@dataclass(frozen=True, slots=True)
class TemplateForm:
    """The parts of a message that a template can read."""

    blocks: bool = False
    """It reads content given as a list of {"type": "text", "text": ...}."""
    strings: bool = True
    """It reads content given as a string."""
    arguments_as_text: bool = False
    """It wants a tool call's arguments as JSON text rather than as a dict."""
    needs_content: bool = False
    """It fails on a message without content; such a message gets an empty one."""


@dataclass(slots=True)
class Budget:
    """Characters all inputs of one rendering may have together, and the pictures among them."""

    limit: int
    used: int = field(default=0)
    images: ImageParts | None = None
    """Collects them; None: this model reads none."""

    def spend(self, name: str, amount: int) -> None:
        self.used += amount
        if self.used > self.limit:
            raise InvalidParameter(name, f"the chat is longer than max_chat_chars={self.limit}")


def check_messages(messages: object, form: TemplateForm, budget: Budget) -> list[dict[str, Any]]:
    """Copies of the messages, normalised for the template. Raises `InvalidParameter` naming the faulty part."""
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise InvalidParameter("messages", "must be a list of dicts with role and content", messages)
    if not messages:
        raise InvalidParameter("messages", "must not be empty")
    return [_message(f"messages[{i}]", message, form, budget) for i, message in enumerate(messages)]


def check_tools(tools: object, budget: Budget) -> list[Any]:
    """Tool definitions: {"type": "function", "function": {"name": ...}} or a bare {"name": ...}."""
    if isinstance(tools, (str, bytes, Mapping)) or not isinstance(tools, Sequence):
        raise InvalidParameter("tools", "must be a list of dicts", tools)
    for i, tool in enumerate(tools):
        if not isinstance(tool, Mapping):
            raise InvalidParameter(f"tools[{i}]", "must be a dict with the function's JSON schema", tool)
        function = tool.get("function", tool)
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise InvalidParameter(f"tools[{i}].function.name", "must be a str")
    return [plain(f"tools[{i}]", tool, budget) for i, tool in enumerate(tools)]


def plain(name: str, value: object, budget: Budget, depth: int = 0) -> Any:
    """A copy made of plain JSON types only, so that a template can call no method of a caller's object."""
    if depth > MAX_DEPTH:
        raise InvalidParameter(name, f"is nested deeper than {MAX_DEPTH}")
    budget.spend(name, len(value) if isinstance(value, str) else 1)
    if isinstance(value, int) and value.bit_length() > MAX_INTEGER_BITS:
        raise InvalidParameter(name, f"must not have integers of more than {MAX_INTEGER_BITS} bits")
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, str):
        return str(value)
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise InvalidParameter(name, "keys must be str", key)
            budget.spend(name, len(key))
        return {str(key): plain(f"{name}.{key[:40]}", item, budget, depth + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(f"{name}[{i}]", item, budget, depth + 1) for i, item in enumerate(value)]
    raise InvalidParameter(name, f"must be plain JSON data, not {type(value).__name__}")


def _message(name: str, message: object, form: TemplateForm, budget: Budget) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise InvalidParameter(name, "must be a dict with role and content", message)
    role = message.get("role")
    if not isinstance(role, str) or not ROLE.fullmatch(role):
        raise InvalidParameter(f"{name}.role", "must be a str like 'system', 'user', 'assistant' or 'tool'", role)
    out: dict[str, Any] = {"role": role}
    for key, value in message.items():
        if not isinstance(key, str):
            raise InvalidParameter(name, "keys must be str", key)
        if key in _PICTURES and value:
            raise InvalidParameter(f"{name}.{key}", "must be left out: text is served, images and sounds are not")
        if key not in ("role", "content", "tool_calls") and value is not None:
            out[key] = plain(f"{name}.{key[:40]}", value, budget)
    for key in ("name", "tool_call_id", *REASONING):
        if not isinstance(out.get(key, ""), str):
            raise InvalidParameter(f"{name}.{key}", "must be a str", out[key])
    calls = message.get("tool_calls")
    if calls is not None:
        out["tool_calls"] = _tool_calls(f"{name}.tool_calls", role, calls, form, budget)
    content = _content(f"{name}.content", message.get("content"), form, budget)
    if content is not None:
        out["content"] = content
    elif role != "assistant" or not (out.get("tool_calls") or any(map(out.get, REASONING))):
        raise InvalidParameter(f"{name}.content", "must be a str or a list of text blocks")
    elif form.needs_content:
        out["content"] = ""
    return out


def _content(name: str, content: object, form: TemplateForm, budget: Budget) -> str | list[dict[str, str]] | None:
    """The content as the template reads it. A picture goes to `budget.images`, and {"type": "image"} into its place."""
    if content is None:
        return None
    if isinstance(content, str):
        budget.spend(name, len(content) + 1)
        check_unicode(name, content)
        return str(content) if form.strings else [{"type": "text", "text": str(content)}]
    if not isinstance(content, (list, tuple)):
        raise InvalidParameter(name, "must be a str, None or a list of text blocks", content)
    texts: list[str] = []
    blocks: list[dict[str, str]] = []
    for i, block in enumerate(content):
        if not isinstance(block, Mapping):
            raise InvalidParameter(f"{name}[{i}]", 'must be a dict like {"type": "text", "text": ...}', block)
        if block.get("type") in PARTS and budget.images is not None:
            if not form.blocks:
                raise InvalidParameter(f"{name}[{i}]", "is a picture, and this model's chat template reads none")
            budget.images.add(f"{name}[{i}]", block)
            blocks.append({"type": "image"})
            continue
        if block.get("type") != "text":
            read = ": text is served, images are not" if budget.images is None else ", 'image_url' or 'image'"
            raise InvalidParameter(f"{name}[{i}].type", f"must be 'text'{read}", block.get("type"))
        text = as_text(f"{name}[{i}].text", block.get("text"))
        budget.spend(f"{name}[{i}].text", len(text) + 1)
        check_unicode(f"{name}[{i}].text", text)
        texts.append(str(text))
        blocks.append({"type": "text", "text": texts[-1]})
    return blocks if form.blocks else "\n".join(texts)


def _tool_calls(name: str, role: str, calls: object, form: TemplateForm, budget: Budget) -> list[dict[str, Any]]:
    if role != "assistant":
        raise InvalidParameter(name, "only an assistant message may have tool calls")
    if not isinstance(calls, (list, tuple)):
        raise InvalidParameter(name, "must be a list", calls)
    out = []
    for i, call in enumerate(calls):
        at = f"{name}[{i}]"
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise InvalidParameter(f"{at}.function.name", "must be a str")
        copy = plain(at, {**call, "function": {**function, "arguments": None}}, budget)
        copy.setdefault("type", "function")
        copy["function"]["arguments"] = _arguments(f"{at}.function.arguments", function, form, budget)
        out.append(copy)
    return out


def _arguments(name: str, function: Mapping[str, Any], form: TemplateForm, budget: Budget) -> Any:
    """OpenAI sends the arguments as JSON text; most templates apply `tojson` themselves and want a dict."""
    value = function.get("arguments")
    if isinstance(value, str):
        budget.spend(name, len(value))
        try:
            parsed = json.loads(value) if value.strip() else {}
        except (ValueError, RecursionError):
            parsed = None
    else:
        parsed = {} if value is None else value
    if not isinstance(parsed, Mapping):
        raise InvalidParameter(name, "must be a JSON object, as text or as a dict", value)
    # text was paid for above, and its parsed copy is no larger
    checked = plain(name, parsed, Budget(budget.limit) if isinstance(value, str) else budget)
    if form.arguments_as_text:
        return value if isinstance(value, str) and value.strip() else json.dumps(checked, ensure_ascii=False)
    return checked


def template_tools(tools: object) -> list[Any] | None:
    """The tools as the model sees them: without `strict`, which is meant for the engine. None if there are none.

    Raises `InvalidParameter` unless they are a list; the tools themselves are checked later.
    """
    if tools is None:
        return None
    if isinstance(tools, (str, bytes)) or not isinstance(tools, Sequence):
        raise InvalidParameter("tools", "must be a list of dicts", tools)
    return [_without_strict(tool) if isinstance(tool, Mapping) else tool for tool in tools] or None


def _without_strict(tool: Mapping[str, Any]) -> dict[str, Any]:
    shown = {name: value for name, value in tool.items() if name != "strict"}
    function = shown.get("function")
    if isinstance(function, Mapping):
        shown["function"] = {name: value for name, value in function.items() if name != "strict"}
    return shown
