"""Checks a request's tools and its tool_choice."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from asyncengine.errors import InvalidParameter
from asyncengine.grammar.chat.schemas import tool_schema

NAME = re.compile(r"[\w.:/-]{1,128}")
MAX_TOOLS = 1024


@dataclass(frozen=True, slots=True)
class Tool:
    """A function the model may call."""

    name: str
    schema: Mapping[str, Any]
    """The JSON schema of its arguments, ready for a grammar."""
    strict: bool = True
    """Every part of the schema must be enforced; else what the grammar library cannot enforce is left out."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The tool choice of a request. `name` with mode "named" only."""

    mode: Literal["none", "auto", "required", "named"]
    name: str = ""
    allowed: frozenset[str] | None = None
    """Names of the tools that may be called; None: all of them."""

    def among(self, tools: Sequence[Tool]) -> tuple[Tool, ...]:
        """The tools that may be called."""
        if self.mode == "none":
            return ()
        named = frozenset((self.name,)) if self.mode == "named" else self.allowed
        return tuple(tool for tool in tools if named is None or tool.name in named)


def check_tools(tools: object) -> list[Tool]:
    """OpenAI's {"type": "function", "function": {...}} or the bare function. Raises `InvalidParameter`."""
    if tools is None:
        return []
    if isinstance(tools, (str, bytes, Mapping)) or not isinstance(tools, Sequence):
        raise InvalidParameter("tools", "must be a list of dicts", tools)
    if len(tools) > MAX_TOOLS:
        raise InvalidParameter("tools", f"at most {MAX_TOOLS} tools", len(tools))
    checked = [_check_tool(f"tools[{i}]", tool) for i, tool in enumerate(tools)]
    first: dict[str, int] = {}
    for i, tool in enumerate(checked):
        if first.setdefault(tool.name, i) != i:
            raise InvalidParameter(f"tools[{i}].function.name", f"is that of tools[{first[tool.name]}] too", tool.name)
    return checked


def _check_tool(field: str, tool: object) -> Tool:
    if not isinstance(tool, Mapping):
        raise InvalidParameter(field, "must be a dict with the function's JSON schema", tool)
    if "function" in tool:
        if tool.get("type", "function") != "function":
            raise InvalidParameter(f"{field}.type", "must be 'function'", tool["type"])
        function, inside = tool["function"], f"{field}.function"
        if not isinstance(function, Mapping):
            raise InvalidParameter(inside, "must be a dict with name and parameters", function)
    else:
        function, inside = tool, field
    name = function.get("name")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        limit = "must be a str of 1 to 128 letters, digits or any of _ . : / -"
        raise InvalidParameter(f"{inside}.name", limit, name)
    strict = next((said for each in (function, tool) if (said := each.get("strict")) is not None), None)
    if strict is not None and not isinstance(strict, bool):
        raise InvalidParameter(f"{inside}.strict", "must be a bool", strict)
    schema = tool_schema(f"{inside}.parameters", function.get("parameters"), strict is not False, name)
    return Tool(str(name), schema, strict is not False)


def check_choice(tool_choice: object, tools: Sequence[Tool]) -> Choice:
    """Raises `InvalidParameter` for what is unknown, or asks for a call where there are no tools."""
    if tool_choice is not None and not isinstance(tool_choice, (str, Mapping)):
        raise InvalidParameter("tool_choice", _SHAPE, tool_choice)  # not even compared: an array answers with an array
    known = [tool.name for tool in tools]
    match tool_choice:
        case None | "auto":
            return Choice("auto" if tools else "none")
        case "none":
            return Choice("none")
        case "required" | "any":
            if not tools:
                raise InvalidParameter("tool_choice", "needs tools to choose from: pass tools", tool_choice)
            return Choice("required")
        case (
            str(name) | {"type": "function", "function": {"name": str(name)}} | {"type": "function", "name": str(name)}
        ):
            if name not in known:
                limit = f"must be 'none', 'auto', 'required' or a tool's name, and the tools are: {_listed(known)}"
                raise InvalidParameter("tool_choice", limit, name)
            return Choice("named", name)
        case {"type": "allowed_tools", "allowed_tools": {"mode": "auto" | "required" as mode, "tools": list(listed)}}:
            named = [each.get("function", each) if isinstance(each, Mapping) else each for each in listed]
            names: list[Any] = [each.get("name") if isinstance(each, Mapping) else each for each in named]
            for index, each in enumerate(names):
                if each not in known:
                    where = f"tool_choice.allowed_tools.tools[{index}]"
                    raise InvalidParameter(where, f"must name one of the tools, which are: {_listed(known)}", each)
            if not names:
                raise InvalidParameter("tool_choice.allowed_tools.tools", "must not be empty")
            return Choice(mode, allowed=frozenset(names))
    raise InvalidParameter("tool_choice", _SHAPE, tool_choice)


_SHAPE = (
    "must be 'none', 'auto', 'required', a name, {'type': 'function', 'function': {'name': ...}} or "
    "{'type': 'allowed_tools', 'allowed_tools': {'mode': 'auto' or 'required', 'tools': [...]}}"
)


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:20])
    return (shown + (f" and {len(names) - 20} more" if len(names) > 20 else "")) or "none"
