"""`with_structured_output`: what to bind to the model, and how to read its answer back."""

from __future__ import annotations

import json
from collections.abc import Mapping
from operator import itemgetter
from typing import Any, Literal, get_args

from langchain_core.language_models import LanguageModelInput
from langchain_core.messages import AIMessage
from langchain_core.output_parsers import BaseOutputParser, JsonOutputParser, PydanticOutputParser
from langchain_core.output_parsers.openai_tools import JsonOutputKeyToolsParser, PydanticToolsParser
from langchain_core.runnables import Runnable, RunnableMap, RunnablePassthrough
from langchain_core.utils.function_calling import convert_to_json_schema

from asyncengine.errors import InvalidParameter
from asyncengine.grammar import Grammar
from asyncengine.integrations.langchain.tools import OpenAITool, is_model, model_schema, openai_tools

Method = Literal["json_schema", "function_calling", "json_mode"]
Answerer = Runnable[LanguageModelInput, AIMessage]
JSONSchema = dict[str, Any]
NAMELESS = "response"
"""Name of a JSON schema without a title."""


def check_method(method: object, schema: object) -> None:
    """Raises `InvalidParameter` for an unknown method, or one that cannot do without a schema."""
    if method not in get_args(Method):
        raise InvalidParameter("method", f"must be one of {', '.join(map(repr, get_args(Method)))}", method)
    if schema is None and method != "json_mode":
        raise InvalidParameter("schema", f"must be given for method={method!r}; 'json_mode' can do without")


def response_format(schema: Any, strict: bool | None) -> dict[str, Any]:
    """OpenAI's `response_format` for a pydantic class (v1 or v2), a TypedDict, a JSON schema or anything that LangChain
    can make one of. None is any JSON object; a dict that is a `response_format` already stays as it is.
    """
    if schema is None:
        return {"type": "json_object"}
    if isinstance(schema, Mapping) and schema.get("type") in ("text", "json_object", "json_schema"):
        return dict(schema)
    name = converted(schema)["title"]
    named = {"name": name, "schema": json_schema(schema), **({} if strict is None else {"strict": strict})}
    return {"type": "json_schema", "json_schema": named}


def json_schema(schema: Any) -> JSONSchema:
    """As its author wrote it: LangChain's own conversion cuts recursive schemas short and knows objects only. It is
    needed for TypedDicts with LangChain's defaults in annotations, and for tools."""
    if is_model(schema):
        return model_schema(schema)
    return dict(schema) if _is_json_schema(schema) else converted(schema)


def converted(schema: Any) -> JSONSchema:
    """What LangChain makes of it, always with a title. LangChain may convert the result again without changing it."""
    try:
        return convert_to_json_schema(schema)
    except (TypeError, ValueError):  # a JSON schema without a title, or a TypedDict with NotRequired
        return {"title": getattr(schema, "__name__", NAMELESS), **json.loads(Grammar.json_schema(schema).text)}


def as_tool(schema: Any, strict: bool | None) -> OpenAITool:
    """The tool whose arguments are the answer."""
    if not _is_json_schema(schema):
        tool = schema if is_model(schema) or isinstance(schema, Mapping) else converted(schema)
        return openai_tools([tool], strict)[0]
    parameters = dict(schema)
    about = {"name": parameters.pop("title", NAMELESS), "description": parameters.pop("description", "")}
    return openai_tools([{**about, "parameters": parameters}], strict)[0]


def _is_json_schema(schema: Any) -> bool:
    """A dict that describes the answer itself, rather than a function."""
    return isinstance(schema, Mapping) and not any(key in schema for key in ("function", "toolSpec", "name"))


def traced_format(schema: Any, method: Method) -> dict[str, Any]:
    """What tracers are told. The base class takes it out of the call's keywords before the model sees them."""
    return {"kwargs": {"method": method}, "schema": converted({} if schema is None else schema)}


def text_parser(schema: Any) -> BaseOutputParser[Any]:
    """Reads an answer that is JSON."""
    return PydanticOutputParser(pydantic_object=schema) if is_model(schema) else JsonOutputParser()


def call_parser(schema: Any, name: str) -> BaseOutputParser[Any]:
    """Reads an answer that is one call of the tool `name`."""
    if is_model(schema):
        return PydanticToolsParser(tools=[schema], first_tool_only=True)
    return JsonOutputKeyToolsParser(key_name=name, first_tool_only=True)


def parsed(model: Answerer, parser: BaseOutputParser[Any], include_raw: bool) -> Runnable[LanguageModelInput, Any]:
    """With `include_raw` the result is {"raw", "parsed", "parsing_error"}, and parsing raises nothing."""
    if not include_raw:
        return model | parser
    read = RunnablePassthrough.assign(parsed=itemgetter("raw") | parser, parsing_error=lambda _: None)
    failed = RunnablePassthrough.assign(parsed=lambda _: None)
    return RunnableMap(raw=model) | read.with_fallbacks([failed], exception_key="parsing_error")
