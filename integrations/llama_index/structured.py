"""`structured_predict` in its four forms, held to the class's schema by a grammar.

The model is also told the schema, in LlamaIndex's own words: a grammar alone forbids, it does not explain. What the
grammar library cannot enforce (a validator of the class, a rare keyword) pydantic checks at the end.
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
from asyncengine.integrations.llama_index.outputs import partial_object
from asyncengine.integrations.results import why_not_own

if TYPE_CHECKING:
    from asyncengine.integrations.llama_index.llm import AsyncEngineLLM

dispatcher = get_dispatcher(__name__)

Keywords = dict[str, Any]


def predict(
    llm: AsyncEngineLLM, output_cls: type[Model], prompt: PromptTemplate, llm_kwargs: Keywords, args: Keywords
) -> Model:
    """Raises pydantic's `ValidationError` for an answer that only the class itself refuses, and `RequestFailed` for one
    that is not all the model's own, as its budget ended."""
    dispatcher.event(LLMStructuredPredictStartEvent(output_cls=output_cls, template=prompt, template_args=args))
    response = llm.chat(_messages(llm, output_cls, prompt, args), **_keywords(output_cls, llm_kwargs))
    return _ended(output_cls.model_validate_json(_own_text(response)))


async def apredict(
    llm: AsyncEngineLLM, output_cls: type[Model], prompt: PromptTemplate, llm_kwargs: Keywords, args: Keywords
) -> Model:
    """An object of the class, as `predict`, awaited."""
    dispatcher.event(LLMStructuredPredictStartEvent(output_cls=output_cls, template=prompt, template_args=args))
    await llm._engines().aio()  # a prompt may ask for the model's metadata: load it off the loop
    response = await llm.achat(_messages(llm, output_cls, prompt, args), **_keywords(output_cls, llm_kwargs))
    return _ended(output_cls.model_validate_json(_own_text(response)))


def checked(output_cls: object, llm_kwargs: object) -> Keywords:
    """The keywords of the call. Raises `InvalidParameter` where either is of another kind than it has to be."""
    if not (isinstance(output_cls, type) and issubclass(output_cls, BaseModel)):
        raise InvalidParameter("output_cls", "must be a pydantic class", output_cls)
    if llm_kwargs is None:
        return {}
    if not isinstance(llm_kwargs, dict):
        raise InvalidParameter("llm_kwargs", "must be a dict of a call's keywords", llm_kwargs)
    return llm_kwargs


def _own_text(response: ChatResponse) -> str:
    if (why := why_not_own(response.raw or {})) is not None:
        raise RequestFailed(why)
    return response.message.content or ""


def _ended(result: Model) -> Model:
    dispatcher.event(LLMStructuredPredictEndEvent(output=result))
    return result


def stream(
    llm: AsyncEngineLLM, output_cls: type[Model], prompt: PromptTemplate, llm_kwargs: Keywords, args: Keywords
) -> Generator[Model | FlexibleModel, None, None]:
    """The object as far as it is written, each time it has grown; then the whole one. Raises as `predict`."""
    growing, response = Growing(output_cls), ChatResponse(message=ChatMessage())
    for response in llm.stream_chat(_messages(llm, output_cls, prompt, args), **_keywords(output_cls, llm_kwargs)):
        if (part := growing.read(response.message.content or "")) is not None:
            yield part
    yield output_cls.model_validate_json(_own_text(response))


async def astream(
    llm: AsyncEngineLLM, output_cls: type[Model], prompt: PromptTemplate, llm_kwargs: Keywords, args: Keywords
) -> AsyncGenerator[Model | FlexibleModel, None]:
    """Objects of the class, as `stream`, awaited."""
    await llm._engines().aio()
    growing, response = Growing(output_cls), ChatResponse(message=ChatMessage())
    messages, keywords = _messages(llm, output_cls, prompt, args), _keywords(output_cls, llm_kwargs)
    async for response in await llm.astream_chat(messages, **keywords):
        if (part := growing.read(response.message.content or "")) is not None:
            yield part
    yield output_cls.model_validate_json(_own_text(response))


def _keywords(output_cls: type[Model], llm_kwargs: Keywords) -> dict[str, Any]:
    return {**llm_kwargs, "grammar": Grammar.json_schema(output_cls, unsupported="ignore")}


def _messages(
    llm: AsyncEngineLLM, output_cls: type[Model], prompt: PromptTemplate, args: Keywords
) -> list[ChatMessage]:
    messages = llm._extend_messages(prompt.format_messages(llm=llm, **args))
    return with_schema(messages, output_cls) if llm.schema_in_prompt else messages


def with_schema(messages: list[ChatMessage], output_cls: type[Model]) -> list[ChatMessage]:
    """The messages with the schema where LlamaIndex's parser puts it: at the end of a system message that begins the
    chat, else of the last message, here always the user's. Nothing passed in is changed."""
    # escape_json is for text that will be a template once more
    schema = PydanticOutputParser(output_cls).get_format_string(escape_json=False).strip()
    place = 0 if messages and messages[0].role is MessageRole.SYSTEM else len(messages) - 1
    if not messages or messages[place].role not in (MessageRole.SYSTEM, MessageRole.USER):
        return [*messages, ChatMessage(schema, role=MessageRole.USER)]
    message = messages[place]
    blocks = list(message.blocks)
    if blocks and isinstance(blocks[-1], TextBlock):
        blocks[-1] = TextBlock(text=f"{blocks[-1].text}\n\n{schema}")
    else:
        blocks.append(TextBlock(text=schema))
    return [*messages[:place], message.model_copy(update={"blocks": blocks}), *messages[place + 1 :]]


class Growing:
    """Reads an object out of JSON text that is still growing."""

    def __init__(self, output_cls: type[BaseModel]) -> None:
        self._flexible = create_flexible_model(output_cls)
        self._seen: dict[str, Any] | None = None

    def read(self, text: str) -> FlexibleModel | None:
        """The fields so far, None for those not written yet; nothing where nothing has been added.

        Not of the class itself, even where that would do: a text in the making is not the text.
        """
        found = partial_object(text)
        if found == self._seen:
            return None
        self._seen = found
        return self._flexible.model_validate(found)
