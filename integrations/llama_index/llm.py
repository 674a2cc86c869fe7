"""`AsyncEngineLLM`: LlamaIndex's LLM over an in-process engine.

Each of the eight calls is a prompt, one of four ways to run it, and the response's shape. The async ones
await the engine natively and never touch its sync twin.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

from llama_index.core.base.llms.generic_utils import messages_to_prompt
from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    ChatResponseAsyncGen,
    ChatResponseGen,
    CompletionResponse,
    CompletionResponseAsyncGen,
    CompletionResponseGen,
    LLMMetadata,
    MessageRole,
)
from llama_index.core.constants import DEFAULT_NUM_OUTPUTS
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
from llama_index.core.llms.function_calling import FunctionCallingLLM
from llama_index.core.llms.llm import ToolSelection
from llama_index.core.prompts.base import PromptTemplate
from llama_index.core.tools.types import BaseTool
from llama_index.core.types import Model, PydanticProgramMode
from pydantic import ConfigDict, Field

from asyncengine import ModelInfo
from asyncengine.errors import InvalidParameter
from asyncengine.grammar import pydantic_schema, take_formats
from asyncengine.integrations.fields import Call, EngineFields
from asyncengine.integrations.http.dialects.openai_shape import Message, message
from asyncengine.integrations.llama_index import structured
from asyncengine.integrations.llama_index.messages import Answer, check_messages, partial_object, to_openai, tool_calls
from asyncengine.integrations.llama_index.structured import Keywords
from asyncengine.integrations.results import each_chunk, each_chunk_async

# LlamaIndex's tools -> keywords of a chat, and its answer -> the calls to make.


def openai_tool(tool: BaseTool, where: str = "tool") -> Message:
    """OpenAI's {"type": "function", ...}. Raises `InvalidParameter` naming `where` for anything but a tool.

    The name stays the tool's own, as LlamaIndex looks the tool up by it; `to_openai_tool` would put underscores in.
    """
    if not isinstance(tool, BaseTool):
        raise InvalidParameter(where, "must be a LlamaIndex tool, as FunctionTool.from_defaults makes one", tool)
    converted: Message = tool.metadata.to_openai_tool(skip_length_check=True)
    function = {**converted["function"], "name": tool.metadata.get_name()}
    if tool.metadata.fn_schema is not None:  # LlamaIndex's own does not say which times have a zone
        schema = pydantic_schema(tool.metadata.fn_schema)
        take_formats(function["parameters"], schema, schema)
    return {**converted, "function": {key: value for key, value in function.items() if value is not None}}


def selections(response: ChatResponse, error_on_no_tool_call: bool) -> list[ToolSelection]:
    """The calls of an answer, or of its beginning: then the newest one's arguments may be partial.

    Raises `ValueError` for an answer without calls if `error_on_no_tool_call`.
    """
    calls = tool_calls(response.message)
    if not calls and error_on_no_tool_call:
        raw = response.raw if isinstance(response.raw, Mapping) else {}
        raise ValueError(
            "Expected at least one tool call, but got 0 tool calls "
            f"(finish_reason {raw.get('finish_reason')!r}, content {response.message.content!r}, "
            f"{len(raw.get('broken_calls', ()))} calls without readable arguments)"
        )
    return [
        ToolSelection(
            tool_id=call["id"],
            tool_name=call["function"]["name"],
            tool_kwargs=partial_object(call["function"]["arguments"]),
        )
        for call in calls
    ]


Response = TypeVar("Response")


class AsyncEngineLLM(EngineFields, FunctionCallingLLM):
    """LLM on an in-process engine; see `EngineFields` for its fields, to which all of `EngineConfig` belong.

    Constructing is cheap: the model loads at the first call (or read of `metadata`), once per process for equal
    (model, engine settings). Every `SamplingParams` field but `n` is also a keyword of each call, as are `model` (a
    LoRA adapter's name, or the base model's for none), `adapter`, `timeout`, `priority`, `cache_salt`, `prediction`,
    `speculation`, and of chats `enable_thinking`, `reasoning_effort`, `max_thinking_tokens`, `template_kwargs`,
    `tools`, `tool_choice`, `parallel_tool_calls` and `response_format`; anything else is refused by name. Errors are
    the engine's own (`asyncengine.errors`); a deadline that passes raises `RequestTimeout` with the partial text.

    Example:
        llm = AsyncEngineLLM(model="demo", temperature=0, max_tokens=64)
        await llm.acomplete("Hello")
    """

    model_config = ConfigDict(extra="forbid")

    context_window: int | None = Field(default=None, ge=1)
    """Tokens of prompt and answer that LlamaIndex may plan with; None takes the model's."""
    is_chat_model: bool | None = None
    """Whether prompts go through the model's chat template; None: where the model has one."""
    is_function_calling_model: bool | None = None
    """Whether LlamaIndex may offer a chat model tools; None: where `info.tool_format` has a form of calls. Where not,
    LlamaIndex's agents describe tools in words."""
    schema_in_prompt: bool = True
    """Whether `structured_predict` tells the model the schema; False where your prompts do. It is enforced anyway."""

    @classmethod
    def class_name(cls) -> str:
        return "AsyncEngine_llm"

    @property
    def model_name(self) -> str:
        return self._name()

    @property
    def additional_kwargs(self) -> dict[str, Any]:
        """LlamaIndex's name for `model_kwargs`."""
        return self.model_kwargs

    @property
    def metadata(self) -> LLMMetadata:
        """Facts for LlamaIndex. Loads the model if `context_window` or one of the two switches is None."""
        window, chat, calls = self.context_window, self.is_chat_model, self.is_function_calling_model
        if window is None or chat is None or calls is None:
            info = self._engines().info()
            window, chat = info.max_model_len if window is None else window, self._chats(info)
            calls = info.tool_format is not None if calls is None else calls
        if not isinstance(window, int) or window < 1:  # it may have been assigned
            raise InvalidParameter("context_window", "must be an integer >= 1", window)
        return LLMMetadata(
            context_window=window, num_output=self.max_tokens or min(DEFAULT_NUM_OUTPUTS, window // 4),
            is_chat_model=chat, is_function_calling_model=chat and calls, model_name=self._name(),
            system_role=MessageRole.SYSTEM,
        )  # fmt: skip

    def to_payload(self) -> dict[str, Any]:
        """The payload for observers. Each call sends it from the caller's loop, so it must not load the model."""
        return {"class_name": self.class_name(), "model_name": self._name(), **self._defaults()}

    def tokenize(self, text: str) -> list[int]:
        """Token ids by the model's own tokenizer; give it to LlamaIndex as `Settings.tokenizer`. Loads the model."""
        return self._engines().sync().tokenize(text)

    # -- the eight calls

    @llm_chat_callback()
    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        return self._run(messages, kwargs).chat()

    @llm_chat_callback()
    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        return (await self._arun(messages, kwargs)).chat()

    @llm_chat_callback()
    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseGen:
        return self._stream(messages, kwargs, Answer.chat)

    @llm_chat_callback()
    async def astream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseAsyncGen:
        return self._astream(messages, kwargs, Answer.chat)

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        return self._run(_text(prompt), kwargs, formatted).complete()

    @llm_completion_callback()
    async def acomplete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        return (await self._arun(_text(prompt), kwargs, formatted)).complete()

    @llm_completion_callback()
    def stream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseGen:
        return self._stream(_text(prompt), kwargs, Answer.complete, formatted)

    @llm_completion_callback()
    async def astream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseAsyncGen:
        return self._astream(_text(prompt), kwargs, Answer.complete, formatted)

    # -- the four ways to run a prompt

    def _run(self, prompt: str | Sequence[ChatMessage], kwargs: Mapping[str, Any], formatted: bool = False) -> Answer:
        call, engine = self._single(kwargs), self._engines().sync()
        with call.stream(engine, self._prompt(engine.info, prompt, formatted)) as stream:
            return Answer(call.model_name).whole(stream.result()).checked()

    async def _arun(
        self, prompt: str | Sequence[ChatMessage], kwargs: Mapping[str, Any], formatted: bool = False
    ) -> Answer:
        call, engine = self._single(kwargs), await self._engines().aio()
        async with call.stream(engine, self._prompt(engine.info, prompt, formatted)) as stream:
            return Answer(call.model_name).whole(await stream.result()).checked()

    def _stream(
        self, prompt: str | Sequence[ChatMessage], kwargs: Mapping[str, Any], shape: Callable[[Answer], Response],
        formatted: bool = False,
    ) -> Generator[Response, None, None]:  # fmt: skip
        call, engine = self._single(kwargs), self._engines().sync()
        answer, ready = Answer(call.model_name), self._prompt(engine.info, prompt, formatted)
        for chunk in each_chunk(call.stream(engine, ready)):
            yield shape(answer.grow(chunk))

    async def _astream(
        self, prompt: str | Sequence[ChatMessage], kwargs: Mapping[str, Any], shape: Callable[[Answer], Response],
        formatted: bool = False,
    ) -> AsyncGenerator[Response, None]:  # fmt: skip
        call, engine = self._single(kwargs), await self._engines().aio()
        answer, ready = Answer(call.model_name), self._prompt(engine.info, prompt, formatted)
        async with aclosing(each_chunk_async(call.stream(engine, ready))) as chunks:
            async for chunk in chunks:
                yield shape(answer.grow(chunk))

    def _single(self, kwargs: Mapping[str, Any]) -> Call:
        call = self._call(None, kwargs)
        if call.params.n != 1:
            raise InvalidParameter("n", "must be 1: a LlamaIndex response holds one answer", call.params.n)
        return call

    def _prompt(self, info: ModelInfo, prompt: str | Sequence[ChatMessage], formatted: bool) -> list[Message] | str:
        """Messages for the chat template, or a text as it is: a chat model reads a plain prompt as the user's
        message, other models read messages as one text."""
        if not isinstance(prompt, str):
            check_messages(prompt)
            if self._chats(info):
                return to_openai(prompt)
            return _text(
                (self.messages_to_prompt or messages_to_prompt)(prompt), "messages_to_prompt", "must return a str"
            )
        if formatted or self.completion_to_prompt is None:
            return prompt
        text = _text(self.completion_to_prompt(prompt), "completion_to_prompt", "must return a str")
        # A text that completion_to_prompt has put into the model's own format must not be wrapped once more.
        return [message("user", text)] if self._chats(info) and text == prompt else text

    def _chats(self, info: ModelInfo) -> bool:
        return info.has_chat_template if self.is_chat_model is None else self.is_chat_model

    # -- tools

    def _prepare_chat_with_tools(
        self, tools: Sequence[BaseTool], user_msg: str | ChatMessage | None = None,
        chat_history: list[ChatMessage] | None = None, verbose: bool = False, allow_parallel_tool_calls: bool = False,
        tool_required: bool = False, tool_choice: str | Mapping[str, Any] | None = None, **kwargs: Any,
    ) -> dict[str, Any]:  # fmt: skip
        """`tool_choice`: "auto", "none", "required", a tool's name or OpenAI's dict for one; it says more than
        `tool_required`. Without tools neither asks for one, unless a call is required, which the engine refuses."""
        listed: object = tools
        if isinstance(listed, str) or not isinstance(listed, Sequence | None):
            raise InvalidParameter("tools", "must be a list of LlamaIndex's tools", tools)
        if isinstance(chat_history, str) or not isinstance(chat_history, Sequence | None):
            raise InvalidParameter("chat_history", "must be a list of LlamaIndex's ChatMessage", chat_history)
        messages = list(chat_history or ())
        if user_msg is not None:
            if not isinstance(user_msg, str | ChatMessage):
                raise InvalidParameter("user_msg", "must be a str or a ChatMessage", user_msg)
            messages += [ChatMessage(user_msg, role=MessageRole.USER) if isinstance(user_msg, str) else user_msg]
        keywords = {**kwargs, "messages": messages}
        choice = tool_choice or ("required" if tool_required else None)
        if tools:
            keywords["tools"] = [openai_tool(tool, f"tools[{index}]") for index, tool in enumerate(tools)]
            keywords["parallel_tool_calls"] = allow_parallel_tool_calls
        if choice is not None and (tools or choice not in ("auto", "none")):
            keywords["tool_choice"] = choice
        return keywords

    def get_tool_calls_from_response(
        self, response: ChatResponse, error_on_no_tool_call: bool = True, **kwargs: Any
    ) -> list[ToolSelection]:
        """The calls of a response, also of one in a stream: the newest call's arguments are then partial."""
        return selections(response, error_on_no_tool_call)

    # -- structured output: held to the schema by a grammar; other modes are LlamaIndex's own programs

    def structured_predict(
        self, output_cls: type[Model], prompt: PromptTemplate, llm_kwargs: Keywords | None = None, **prompt_args: Any
    ) -> Model:
        keywords = structured.checked(output_cls, llm_kwargs)
        if self.pydantic_program_mode is not PydanticProgramMode.DEFAULT:
            return super().structured_predict(output_cls, prompt, llm_kwargs, **prompt_args)
        structured.begin(output_cls, prompt, prompt_args)
        response = self.chat(**structured.chat_of(self, output_cls, prompt, keywords, prompt_args))
        return structured.end(structured.read(output_cls, response))

    async def astructured_predict(
        self, output_cls: type[Model], prompt: PromptTemplate, llm_kwargs: Keywords | None = None, **prompt_args: Any
    ) -> Model:
        keywords = structured.checked(output_cls, llm_kwargs)
        if self.pydantic_program_mode is not PydanticProgramMode.DEFAULT:
            return await super().astructured_predict(output_cls, prompt, llm_kwargs, **prompt_args)
        structured.begin(output_cls, prompt, prompt_args)
        await self._engines().aio()  # a prompt may ask for the model's metadata: load it off the loop
        response = await self.achat(**structured.chat_of(self, output_cls, prompt, keywords, prompt_args))
        return structured.end(structured.read(output_cls, response))

    def _structured_stream_call(
        self, output_cls: type[Model], prompt: PromptTemplate, llm_kwargs: Keywords | None = None, **prompt_args: Any
    ) -> Generator[Any, None, None]:
        """Objects for `stream_structured_predict`."""
        keywords = structured.checked(output_cls, llm_kwargs)
        if self.pydantic_program_mode is not PydanticProgramMode.DEFAULT:
            return super()._structured_stream_call(output_cls, prompt, llm_kwargs, **prompt_args)
        return structured.stream(self, output_cls, prompt, keywords, prompt_args)

    async def _structured_astream_call(
        self, output_cls: type[Model], prompt: PromptTemplate, llm_kwargs: Keywords | None = None, **prompt_args: Any
    ) -> AsyncGenerator[Any, None]:
        """Objects for `astream_structured_predict`."""
        keywords = structured.checked(output_cls, llm_kwargs)
        if self.pydantic_program_mode is not PydanticProgramMode.DEFAULT:
            return await super()._structured_astream_call(output_cls, prompt, llm_kwargs, **prompt_args)
        return structured.astream(self, output_cls, prompt, keywords, prompt_args)


def _text(prompt: object, field: str = "prompt", limit: str = "must be a str; messages go to chat") -> str:
    if not isinstance(prompt, str):
        raise InvalidParameter(field, limit, prompt)
    return prompt
