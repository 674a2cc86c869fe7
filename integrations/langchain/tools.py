"""LangChain's tools, tool choices and response formats -> OpenAI's, which the engine takes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from typing import Any

from langchain_core.tools import BaseTool
from langchain_core.utils.function_calling import convert_to_openai_tool
from langchain_core.utils.pydantic import is_basemodel_subclass

from asyncengine.errors import InvalidParameter
from asyncengine.grammar import as_meant, pydantic_schema, take_formats

AnyTool = Mapping[str, Any] | type | Callable[..., Any] | BaseTool
"""A LangChain tool, a function, a pydantic class (v1 or v2), a TypedDict, or a dict of OpenAI's, Anthropic's or
Bedrock's shape or a JSON schema with a title."""
OpenAITool = dict[str, Any]
REFERENCE = re.compile(r'"\$ref": "#/(?:\$defs|definitions)/([^"]+)"')


def openai_tools(tools: Sequence[AnyTool], strict: bool | None = None) -> list[OpenAITool]:
    """The tools in OpenAI's shape, keys in LangChain's order. `strict`, if not None, replaces a tool's own.

    Raises `InvalidParameter` naming the tool for one that is no function, such as a provider's web search.
    """
    sequence: Any = tools
    if isinstance(sequence, str) or not isinstance(sequence, Iterable):
        raise InvalidParameter("tools", "must be a sequence of tools", sequence)
    return [_openai_tool(f"tools[{position}]", tool, strict) for position, tool in enumerate(tools)]


def _openai_tool(where: str, tool: AnyTool, strict: bool | None) -> OpenAITool:
    try:
        converted = convert_to_openai_tool(tool)
    except (ValueError, TypeError) as error:
        raise InvalidParameter(where, f"cannot be read as a tool: {error}") from error
    if converted.get("type", "function") != "function":
        raise InvalidParameter(f"{where}.type", "must be 'function': nobody else runs tools here", converted["type"])
    function = dict(converted.get("function", converted))
    function.pop("type", None)
    whole = _argument_schema(tool)
    if _refers_to_itself(whole):
        function["parameters"] = {key: value for key, value in whole.items() if key not in ("title", "description")}
    elif whole and isinstance(function.get("parameters"), dict):
        as_meant(function["parameters"])
        take_formats(function["parameters"], whole, whole)
    if is_model(tool):
        function["name"] = tool_name(function["name"])
    if strict is not None:
        function["strict"] = strict
    # The engine is strict unless told otherwise; models were trained on tools without this key.
    if function.get("strict") is not False:
        function.pop("strict", None)
    return {"type": "function", "function": function}


def is_model(schema: Any) -> bool:
    """A pydantic class, of version 1 or 2."""
    return isinstance(schema, type) and is_basemodel_subclass(schema)


def model_schema(model: Any) -> dict[str, Any]:
    """The JSON schema of a pydantic class, as pydantic means it."""
    return as_meant(pydantic_schema(model) if hasattr(model, "model_json_schema") else dict(model.schema()))


def tool_name(name: str) -> str:
    """A name that a tool can have: of `Box[list[int]]` it is `Box_list_int`."""
    allowed = re.sub(r"[^\w.:/-]+", "_", name)
    return (name if allowed == name else allowed.strip("_"))[:128]


def _argument_schema(tool: AnyTool) -> dict[str, Any]:
    """The schema of the arguments of a LangChain tool or a pydantic class, before LangChain resolves its references."""
    schema: Any = tool.tool_call_schema if isinstance(tool, BaseTool) else tool
    if is_model(schema):
        return model_schema(schema)
    return schema if isinstance(tool, BaseTool) and isinstance(schema, dict) else {}


def _refers_to_itself(schema: Mapping[str, Any]) -> bool:
    """Whether a schema is recursive: LangChain cuts such a one short, and below the cut anything would be valid."""
    schemas = {**schema.get("definitions", {}), **schema.get("$defs", {})}
    try:
        TopologicalSorter({name: REFERENCE.findall(json.dumps(inner)) for name, inner in schemas.items()}).prepare()
    except CycleError:
        return True
    return False


def openai_choice(tool_choice: object, tools: Sequence[OpenAITool]) -> str | dict[str, Any] | None:
    """The engine's form of any tool choice that LangChain's users know; None: the default, which is "auto".

    The forms: a tool's name; "auto"; "none"; "any", "required" or True; OpenAI's and Anthropic's dicts; None or False.
    Raises `InvalidParameter` naming the tools there are.
    """
    names = [tool["function"].get("name") for tool in tools]
    name = tool_choice
    match tool_choice:
        case None | False:
            return None
        case str() if tool_choice in names:
            pass  # a tool may have any name, even "auto"
        case "auto" | "none":
            return str(tool_choice)
        case {"type": "auto" | "none" as mode}:
            return str(mode)
        case True | "any" | "required" | {"type": "any" | "required"}:
            if not names:
                raise InvalidParameter("tool_choice", "asks for a call, and there are no tools", tool_choice)
            return "required"
        case {"type": "function", "function": {"name": str(name)}} | {"type": "function" | "tool", "name": str(name)}:
            pass
    if not isinstance(name, str) or name not in names:
        listed = ", ".join(map(repr, names)) or "none"
        forms = "must be 'auto', 'none', 'any', True, a tool's name or a dict that names one"
        raise InvalidParameter("tool_choice", f"{forms}; the tools are: {listed}", tool_choice)
    return {"type": "function", "function": {"name": name}}


def several_calls(parallel: bool | None, tool_choice: object, choice: object) -> bool | None:
    """Whether one answer may hold several calls; None: the engine's default, which is yes.

    If the caller does not say and forces a call, it is one call: a model that would not have called by itself does not
    know when to stop either, and LangChain's agents take a second structured answer for an error. `tool_choice`: the
    caller's, which Anthropic's form may answer. `choice`: the same as `openai_choice` has converted it.
    """
    if parallel is None and isinstance(tool_choice, Mapping) and "disable_parallel_tool_use" in tool_choice:
        return not tool_choice["disable_parallel_tool_use"]
    if parallel is None and (choice == "required" or isinstance(choice, dict)):
        return False
    return parallel
