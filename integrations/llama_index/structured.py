"""`structured_predict` in its four forms, held to the class's schema by a grammar.

The prompt also has the schema, in LlamaIndex's own words: a grammar forbids wrong tokens but does not tell the model
which are right. Rules that the grammar cannot enforce (a class's validator, a rare keyword) pydantic checks at the end.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator
from typing import TYPE_CHECKING, Any

from llama_index.core.base.llms.types import ChatMessage, ChatResponse, MessageRole, TextBlock
from llama_index.core.instrumentation import get_dispatcher  # type: ignore[attr-defined]
from llama_index.core.instrumentation.events.llm import LLMStructuredPredictEndEvent, LLMStructuredPredictStartEvent
from llama_index.core.output_parsers.pydantic import PydanticOutputParser
from llama_index.core.program.utils import FlexibleModel, create_flexible_model
from llama_index.core.prompts.base import PromptTemplate
from llama_index.core.types import Model
from pydantic import BaseModel

from asyncengine.errors import InvalidParameter, RequestFailed
from asyncengine.grammar import Grammar
from asyncengine.integrations.llama_index.messages import partial_object
from asyncengine.integrations.results import why_not_read

if TYPE_CHECKING:
    from asyncengine.integrations.llama_index.llm import AsyncEngineLLM

dispatcher = get_dispatcher(__name__)

Keywords = dict[str, Any]


def checked(output_cls: object, llm_kwargs: object) -> Keywords:
    """The keywords of the call. Raises `InvalidParameter` if either argument has a wrong type."""
    if not (isinstance(output_cls, type) and issubclass(output_cls, BaseModel)):
        raise InvalidParameter("output_cls", "must be a pydantic class", output_cls)
    if llm_kwargs is not None and not isinstance(llm_kwargs, dict):
        raise InvalidParameter("llm_kwargs", "must be a dict of a call's keywords", llm_kwargs)
    return llm_kwargs or {}


def begin(output_cls: type[Model], prompt: PromptTemplate, args: Keywords) -> None:
    """Tell LlamaIndex's observers of the call."""
    dispatcher.event(LLMStructuredPredictStartEvent(output_cls=output_cls, template=prompt, template_args=args))


def chat_of(
    llm: AsyncEngineLLM, output_cls: type[Model], prompt: PromptTemplate, llm_kwargs: Keywords, args: Keywords
) -> Keywords:
    """Keywords of the chat that gives the object, its messages among them."""
    messages = llm._extend_messages(prompt.format_messages(llm=llm, **args))
    messages = with_schema(messages, output_cls) if llm.schema_in_prompt else messages
    return {**llm_kwargs, "messages": messages, "grammar": Grammar.json_schema(output_cls, unsupported="ignore")}


def read(output_cls: type[Model], response: ChatResponse) -> Model:
    """The object of an answer. Raises pydantic's `ValidationError` for one that only the class itself refuses, and
    `RequestFailed` for one that the engine had to close, as its budget ended."""
    if (why := why_not_read(response.raw or {})) is not None:
        raise RequestFailed(why)
    return output_cls.model_validate_json(response.message.content or "")


def end(result: Model) -> Model:
    """Tell LlamaIndex's observers of the object."""
    dispatcher.event(LLMStructuredPredictEndEvent(output=result))
    return result


def stream(
    llm: AsyncEngineLLM, output_cls: type[Model], prompt: PromptTemplate, llm_kwargs: Keywords, args: Keywords
) -> Generator[Model | FlexibleModel, None, None]:
    """The object as far as it is written, each time it has grown; then the whole one. Raises as `read`."""
    growing, response = Growing(output_cls), ChatResponse(message=ChatMessage())
    for response in llm.stream_chat(**chat_of(llm, output_cls, prompt, llm_kwargs, args)):
        if (partial := growing.read(response.message.content or "")) is not None:
            yield partial
    yield read(output_cls, response)


async def astream(
    llm: AsyncEngineLLM, output_cls: type[Model], prompt: PromptTemplate, llm_kwargs: Keywords, args: Keywords
) -> AsyncGenerator[Model | FlexibleModel, None]:
    """Objects of the class, as `stream`, awaited."""
    await llm._engines().aio()
    growing, response = Growing(output_cls), ChatResponse(message=ChatMessage())
    async for response in await llm.astream_chat(**chat_of(llm, output_cls, prompt, llm_kwargs, args)):
        if (partial := growing.read(response.message.content or "")) is not None:
            yield partial
    yield read(output_cls, response)


def with_schema(messages: list[ChatMessage], output_cls: type[Model]) -> list[ChatMessage]:
    """The messages with the schema where LlamaIndex's parser puts it: at the end of a system message that begins the
    chat, else of the last message, here always the user's. Nothing passed in is changed."""
    # escape_json is for text that will be a template once more
    schema = PydanticOutputParser(output_cls).get_format_string(escape_json=False).strip()
    position = 0 if messages and messages[0].role is MessageRole.SYSTEM else len(messages) - 1
    if not messages or messages[position].role not in (MessageRole.SYSTEM, MessageRole.USER):
        return [*messages, ChatMessage(schema, role=MessageRole.USER)]
    message = messages[position]
    blocks = list(message.blocks)
    if blocks and isinstance(blocks[-1], TextBlock):
        blocks[-1] = TextBlock(text=f"{blocks[-1].text}\n\n{schema}")
    else:
        blocks.append(TextBlock(text=schema))
    return [*messages[:position], message.model_copy(update={"blocks": blocks}), *messages[position + 1 :]]


class Growing:
    """Reads an object out of JSON text that is still growing."""

    def __init__(self, output_cls: type[BaseModel]) -> None:
        self._flexible = create_flexible_model(output_cls)
        self._seen: dict[str, Any] | None = None

    def read(self, text: str) -> FlexibleModel | None:
        """The object so far, whose missing fields are None; None if nothing was added since the last call.

        It is never of the class itself, even where it would validate: only a finished text makes that.
        """
        fields = partial_object(text)
        if fields == self._seen:
            return None
        self._seen = fields
        return self._flexible.model_validate(fields)
