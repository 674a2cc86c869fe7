"""`with_structured_output`: keywords to bind to the model, and parsers of its answer."""

from __future__ import annotations

import dataclasses
import json
import types
from collections.abc import AsyncIterator, Iterator, Mapping
from enum import Enum
from operator import itemgetter
from typing import Any, Literal, get_args, get_origin

from langchain_core.exceptions import OutputParserException
from langchain_core.language_models import LanguageModelInput
from langchain_core.messages import AIMessage
from langchain_core.output_parsers import BaseOutputParser, JsonOutputParser, PydanticOutputParser
from langchain_core.output_parsers.openai_tools import JsonOutputKeyToolsParser, PydanticToolsParser
from langchain_core.outputs import Generation
from langchain_core.runnables import Runnable, RunnableGenerator, RunnableMap, RunnablePassthrough
from langchain_core.utils.function_calling import convert_to_json_schema
from pydantic import BaseModel, ConfigDict, PydanticUserError, RootModel, TypeAdapter, ValidationError

from asyncengine.errors import GrammarError, InvalidParameter
from asyncengine.grammar import Grammar, as_meant, pydantic_schema
from asyncengine.integrations.langchain.tools import OpenAITool, is_model, model_schema, openai_tools, tool_name
from asyncengine.integrations.results import why_not_read

Method = Literal["json_schema", "function_calling", "json_mode"]
Answerer = Runnable[LanguageModelInput, AIMessage]
JSONSchema = dict[str, Any]
NAMELESS = "response"
"""Name of a JSON schema without a title."""
VALUE = "value"
"""Name of the only argument of a tool that is made of a type other than an object, such as a list."""


class TypeParser(BaseOutputParser[Any]):
    """Reads text that is JSON as a value of a Python type: a dataclass, `list[int]`, a union."""

    model_config = ConfigDict(arbitrary_types_allowed=True)
    target: Any

    def parse(self, text: str) -> Any:
        return value_of(self.target, text)


class CallTypeParser(JsonOutputKeyToolsParser):
    """Reads the arguments of a call as a value of a Python type, or with `inside` the argument of that name."""

    target: Any
    inside: str | None

    def parse_result(self, result: list[Generation], *, partial: bool = False) -> Any:
        arguments = super().parse_result(result, partial=partial)
        if arguments is None:
            return None
        try:
            return value_of(self.target, json.dumps(arguments if self.inside is None else arguments.get(self.inside)))
        except OutputParserException:
            if partial:  # the rest of the arguments is still to come
                return None
            raise


def value_of(target: Any, text: str) -> Any:
    """The value of JSON text as a value of `target`. Raises `OutputParserException`."""
    try:
        return TypeAdapter(target).validate_json(text)
    except ValidationError as error:
        raise OutputParserException(f"the answer is no {target!r}: {error}", llm_output=text) from error


def is_type(schema: Any) -> bool:
    """A dataclass, a plain type or one put together of others (`list[int]`, `A | B`), rather than a class of pydantic,
    a TypedDict, a function or a dict."""
    if isinstance(schema, type):
        return dataclasses.is_dataclass(schema) or issubclass(schema, Enum) or schema in (str, int, float, bool)
    return get_origin(schema) is not None or isinstance(schema, types.UnionType)


def type_schema(target: Any) -> JSONSchema:
    """The JSON schema of a Python type, as pydantic means it. Raises `InvalidParameter` for what has none."""
    try:
        return as_meant(pydantic_schema(TypeAdapter(target)))
    except PydanticUserError as error:
        raise InvalidParameter("schema", f"has no JSON schema: {error.message}") from error


def _is_object(schema: JSONSchema) -> bool:
    return schema.get("type") == "object"


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
    described = {"name": name, "schema": json_schema(schema), **({} if strict is None else {"strict": strict})}
    return {"type": "json_schema", "json_schema": described}


def json_schema(schema: Any) -> JSONSchema:
    """A schema as its author wrote it, since LangChain's conversion cuts recursive schemas short and knows only
    objects. That is used for TypedDicts, which may have LangChain's defaults in annotations, and for tools."""
    if is_model(schema):
        return model_schema(schema)
    if is_type(schema):
        return type_schema(schema)
    return dict(schema) if _is_json_schema(schema) else converted(schema)


def converted(schema: Any) -> JSONSchema:
    """LangChain's conversion of a schema, always with a title. LangChain may convert the result again without
    changing it."""
    if is_type(schema):
        return {"title": getattr(schema, "__name__", NAMELESS), **type_schema(schema)}
    try:
        return convert_to_json_schema(schema)
    except (TypeError, ValueError):  # a JSON schema without a title, or a TypedDict with NotRequired
        pass
    try:
        return {"title": getattr(schema, "__name__", NAMELESS), **json.loads(Grammar.json_schema(schema).text)}
    except GrammarError as error:
        raise InvalidParameter("schema", error.limit, schema) from None


def as_tool(schema: Any, strict: bool | None) -> OpenAITool:
    """The tool whose arguments are the answer, or whose only argument `VALUE` is, for an answer that is no object."""
    if _is_whole(schema):
        whole = type_schema(schema)
        name = tool_name(getattr(schema, "__name__", NAMELESS))
        about = {"name": name, "description": whole.pop("description", "")}
        if not _is_object(whole):
            shared = {key: whole.pop(key) for key in ("$defs",) if key in whole}
            whole = {"type": "object", "properties": {VALUE: whole}, "required": [VALUE], **shared}
        return openai_tools([{**about, "parameters": whole}], strict)[0]
    if not _is_json_schema(schema):
        tool = schema if is_model(schema) or isinstance(schema, Mapping) else converted(schema)
        return openai_tools([tool], strict)[0]
    parameters = dict(schema)
    about = {
        "name": tool_name(str(parameters.pop("title", NAMELESS))) or NAMELESS,
        "description": parameters.pop("description", ""),
    }
    return openai_tools([{**about, "parameters": parameters}], strict)[0]


def _is_whole(schema: Any) -> bool:
    """A type, or a class with one value in place of fields: its value may be no object."""
    return is_type(schema) or (isinstance(schema, type) and issubclass(schema, RootModel))


def _is_json_schema(schema: Any) -> bool:
    """A dict that describes the answer itself, rather than a function."""
    return isinstance(schema, Mapping) and not any(key in schema for key in ("function", "toolSpec", "name"))


def traced_format(schema: Any, method: Method) -> dict[str, Any]:
    """The format for tracers. The base class removes it from the call's keywords before the model gets them."""
    return {"kwargs": {"method": method}, "schema": converted({} if schema is None else schema)}


def text_parser(schema: Any) -> BaseOutputParser[Any]:
    """Reads an answer that is JSON."""
    if is_type(schema):
        return TypeParser(target=schema)
    return PydanticOutputParser(pydantic_object=schema) if is_model(schema) else JsonOutputParser()


def call_parser(schema: Any, name: str) -> BaseOutputParser[Any]:
    """Reads an answer that is one call of the tool `name`."""
    titled = isinstance(schema, type) and issubclass(schema, BaseModel)
    # LangChain's own parser looks for the class's title or name, which may differ from the tool's
    if _is_whole(schema) or (titled and name != (schema.model_config.get("title") or schema.__name__)):
        inside = None if _is_object(type_schema(schema)) or not _is_whole(schema) else VALUE
        return CallTypeParser(key_name=name, first_tool_only=True, target=schema, inside=inside)
    if is_model(schema):
        return PydanticToolsParser(tools=[schema], first_tool_only=True)
    return JsonOutputKeyToolsParser(key_name=name, first_tool_only=True)


def _checked(message: AIMessage) -> AIMessage:
    if (why := why_not_read(message.response_metadata)) is not None:
        raise OutputParserException(why, llm_output=message.text)
    return message


def _all_checked(messages: Iterator[AIMessage]) -> Iterator[AIMessage]:
    yield from map(_checked, messages)


async def _aall_checked(messages: AsyncIterator[AIMessage]) -> AsyncIterator[AIMessage]:
    async for message in messages:
        yield _checked(message)


def parsed(model: Answerer, parser: Runnable[AIMessage, Any], include_raw: bool) -> Runnable[LanguageModelInput, Any]:
    """With `include_raw` the result is {"raw", "parsed", "parsing_error"}, and parsing raises nothing."""
    parser = RunnableGenerator(_all_checked, _aall_checked) | parser
    if not include_raw:
        return model | parser
    read = RunnablePassthrough.assign(parsed=itemgetter("raw") | parser, parsing_error=lambda _: None)
    failed = RunnablePassthrough.assign(parsed=lambda _: None)
    return RunnableMap(raw=model) | read.with_fallbacks([failed], exception_key="parsing_error")
