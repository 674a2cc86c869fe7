"""`ChatAsyncEngine`: LangChain's chat model over an in-process engine.

Sync calls go through the engine's sync twin, async ones await the engine natively; all of them, from any loop and
any thread, join the same batch.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import BaseChatModel, LanguageModelInput, ModelProfile
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import ChatGenerationChunk, ChatResult, LLMResult
from langchain_core.runnables import Runnable, RunnableConfig
from langchain_core.runnables.config import ContextThreadPoolExecutor, get_config_list
from langchain_core.tools import BaseTool
from pydantic import ConfigDict

from asyncengine.errors import InvalidParameter
from asyncengine.integrations.langchain import structured
from asyncengine.integrations.langchain.errors import mapped_errors
from asyncengine.integrations.langchain.fields import MAX_BATCH_THREADS, LangChainFields
from asyncengine.integrations.langchain.messages import chat_chunks, chat_result, to_openai, total_usage
from asyncengine.integrations.langchain.tools import AnyTool, openai_choice, openai_tools, several_calls
from asyncengine.integrations.results import checked, each_chunk, each_chunk_async


class ChatAsyncEngine(LangChainFields, BaseChatModel):
    """Chat model on an in-process engine; see `EngineFields` for its fields, to which all of `EngineConfig` belong.

    Constructing is cheap: the model loads at the first call, once per process for equal (model, engine settings).
    Every `SamplingParams` field is also a keyword of each call, as are `model` (a LoRA adapter's name, or the base
    model's for none), `adapter`, `timeout`, `priority`, `cache_salt`, `prediction`, `speculation`, `enable_thinking`,
    `reasoning_effort`, `max_thinking_tokens` and `template_kwargs`; anything else is refused by name.

    Errors are the engine's and LangChain's at once (`langchain_core.exceptions`). A deadline that passes raises
    `RequestTimeout` with the partial text.

    Example:
        chat = ChatAsyncEngine(model="demo", temperature=0, max_tokens=64)
        await chat.ainvoke("Hello")
    """

    model_config = ConfigDict(extra="forbid")
    ls_model_type = "chat"

    # -- one request

    def _generate(
        self, messages: list[BaseMessage], stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None, **kwargs: Any,
    ) -> ChatResult:  # fmt: skip
        with mapped_errors():
            call, prompt = self._request(stop, self._in_thread(run_manager, kwargs)), to_openai(messages)
            completion = self._engines().sync().chat(prompt, call.params, **call.keywords)
            return chat_result(checked(completion), call.model_name)

    async def _agenerate(
        self, messages: list[BaseMessage], stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None, **kwargs: Any,
    ) -> ChatResult:  # fmt: skip
        with mapped_errors():
            call, prompt = self._request(stop, self._in_thread(run_manager, kwargs)), to_openai(messages)
            engine = await self._engines().aio()
            completion = await engine.chat(prompt, call.params, **call.keywords)
            return chat_result(checked(completion), call.model_name)

    def _stream(
        self, messages: list[BaseMessage], stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None, **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:  # fmt: skip
        # The base class calls on_llm_new_token for every chunk; calling it here would report tokens twice.
        with mapped_errors():
            call, prompt = self._stream_request(stop, self._in_thread(run_manager, kwargs)), to_openai(messages)
            arguments = dict[int, str]()
            for chunk in each_chunk(call.stream(self._engines().sync(), prompt)):
                yield from chat_chunks(chunk, call.model_name, arguments)

    async def _astream(
        self, messages: list[BaseMessage], stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None, **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:  # fmt: skip
        with mapped_errors():
            call, prompt = self._stream_request(stop, self._in_thread(run_manager, kwargs)), to_openai(messages)
            arguments = dict[int, str]()
            async with aclosing(each_chunk_async(call.stream(await self._engines().aio(), prompt))) as chunks:
                async for chunk in chunks:
                    for message in chat_chunks(chunk, call.model_name, arguments):
                        yield message

    # -- tools and structured output

    def bind_tools(
        self, tools: Sequence[AnyTool], *, tool_choice: Mapping[str, Any] | str | bool | None = None,
        strict: bool | None = None, parallel_tool_calls: bool | None = None, response_format: Any = None, **kwargs: Any,
    ) -> Runnable[LanguageModelInput, AIMessage]:  # fmt: skip
        """A model that may call `tools`. Arguments of its calls are always valid against the tools' schemas.

        `tool_choice`: a tool's name, "auto", "none", "any" (also "required", True), or a dict as OpenAI or Anthropic
        have it. An answer may hold several calls; where a call is forced, only with `parallel_tool_calls=True`.
        `strict=False` leaves the schemas open and out of them what the grammar library cannot enforce.
        `response_format` is what an answer that is no call must be: OpenAI's dict, a pydantic class, a TypedDict or a
        JSON schema. `kwargs` are further keywords of each call. Raises `InvalidParameter` naming what is wrong.
        """
        with mapped_errors():
            offered = openai_tools(tools, strict)
            choice = openai_choice(tool_choice, offered)
            answer = None if response_format is None else structured.response_format(response_format, strict)
        bound = {
            "tools": offered or None, "tool_choice": choice,
            "parallel_tool_calls": several_calls(parallel_tool_calls, tool_choice, choice), "response_format": answer,
        }  # fmt: skip
        return self.bind(**{name: value for name, value in bound.items() if value is not None}, **kwargs)

    def with_structured_output(
        self, schema: Any = None, *, method: structured.Method = "json_schema", include_raw: bool = False,
        strict: bool | None = None, **kwargs: Any,
    ) -> Runnable[LanguageModelInput, Any]:  # fmt: skip
        """A model whose answers are objects of `schema`: a pydantic class (v1 or v2), a dataclass, a type such as
        `list[int]` or `A | B`, a TypedDict, a JSON schema or an OpenAI tool. Classes and types give what they say, the
        others dicts.

        With "json_schema" and "json_mode" the answer's text is the object; "json_mode" may go without a schema and
        then gives any JSON object. With "function_calling" the model calls a tool made of the schema, which it is told
        of in the prompt. `strict` as in `bind_tools`; `kwargs` are further keywords of each call. An answer that the
        engine had to close, as its budget ended, is LangChain's `OutputParserException`, or the `parsing_error`, unless
        `on_budget` is "offer".
        """
        with mapped_errors():
            structured.check_method(method, schema)
            traced = structured.traced_format(schema, method)
            if method != "function_calling":
                answer = structured.response_format(schema, strict)
                writer = self.bind(response_format=answer, ls_structured_output_format=traced, **kwargs)
                return structured.parsed(writer, structured.text_parser(schema), include_raw)
            tool = structured.as_tool(schema, strict)
        name = tool["function"]["name"]
        kwargs = {"parallel_tool_calls": False, "ls_structured_output_format": traced, **kwargs}
        caller = self.bind_tools([tool], tool_choice=name, **kwargs)
        return structured.parsed(caller, structured.call_parser(schema, name), include_raw)

    # -- many requests from one thread: all of them wait in the engine, not in a pool of six threads

    def batch(
        self, inputs: list[LanguageModelInput], config: RunnableConfig | list[RunnableConfig] | None = None, *,
        return_exceptions: bool = False, **kwargs: Any,
    ) -> list[AIMessage]:  # fmt: skip
        """Submits everything at once (up to `MAX_BATCH_THREADS`), unless the config sets `max_concurrency`."""
        widened = self._for_threads(config, _count(inputs))
        return super().batch(inputs, widened, return_exceptions=return_exceptions, **kwargs)

    async def abatch(
        self, inputs: list[LanguageModelInput], config: RunnableConfig | list[RunnableConfig] | None = None, *,
        return_exceptions: bool = False, **kwargs: Any,
    ) -> list[AIMessage]:  # fmt: skip
        """Submits everything at once, unless the config sets `max_concurrency`."""
        _widened(config, _count(inputs))  # checks max_concurrency: with 0 the base class would wait for ever
        return await super().abatch(inputs, config, return_exceptions=return_exceptions, **kwargs)

    def batch_as_completed(  # type: ignore[override]  # the base class spells it as two overloads
        self, inputs: Sequence[LanguageModelInput], config: RunnableConfig | Sequence[RunnableConfig] | None = None, *,
        return_exceptions: bool = False, **kwargs: Any,
    ) -> Iterator[tuple[int, AIMessage | Exception]]:  # fmt: skip
        widened = self._for_threads(config, _count(inputs))
        return super().batch_as_completed(inputs, widened, return_exceptions=return_exceptions, **kwargs)  # type: ignore[call-overload]

    def _for_threads(
        self, config: RunnableConfig | Sequence[RunnableConfig] | None, length: int
    ) -> RunnableConfig | list[RunnableConfig] | None:
        """`_widened`, after a check that threads may wait for the engine. Raises `WrongLoop` if they would for ever."""
        if length > 1:
            with mapped_errors():
                self._engines().check_waiting()
        return _widened(config, length)

    def generate(
        self, messages: list[list[BaseMessage]], stop: list[str] | None = None, callbacks: Any = None, **kwargs: Any,
    ) -> LLMResult:  # fmt: skip
        """Submit all prompts at once, where the base class generates one answer after the other.

        Raises the first error in the order of `messages`, after every other request has ended.
        """
        if len(messages) < 2:
            return super().generate(messages, stop, callbacks, **kwargs)
        self._for_threads(None, len(messages))
        run_id = kwargs.pop("run_id", None)
        single = super().generate

        def answer_one(index: int) -> LLMResult:
            return single([messages[index]], stop, callbacks, **kwargs, **({} if index else {"run_id": run_id}))

        with ContextThreadPoolExecutor(max_workers=min(len(messages), MAX_BATCH_THREADS)) as executor:
            results = list(executor.map(answer_one, range(len(messages))))
        return LLMResult(
            generations=[result.generations[0] for result in results],
            llm_output=self._combine_llm_outputs([result.llm_output for result in results]),
            run=[run for result in results for run in result.run or ()],
        )

    # -- counting

    def get_num_tokens_from_messages(
        self,
        messages: list[BaseMessage],
        tools: Sequence[dict[str, Any] | type | Callable[..., Any] | BaseTool] | None = None,
    ) -> int:
        """Prompt tokens that these messages become, chat template included. Loads the model."""
        with mapped_errors():
            offered = openai_tools(tools) if tools else None
            return self._engines().sync().count_tokens(to_openai(messages), tools=offered)

    # -- identity for LangChain's caches and tracers

    @property
    def _llm_type(self) -> str:
        return "asyncengine-chat"

    def _get_llm_string(self, stop: list[str] | None = None, **kwargs: Any) -> str:
        """The key of LangChain's caches. The base class would use the text of `dumps`, which has nothing of a model
        with an engine of its caller's own, and only the name of a class that is the grammar."""
        params = {**self._get_invocation_params(stop=stop, **kwargs), **kwargs}
        return str(sorted(params.items()))

    def _combine_llm_outputs(self, _llm_outputs: list[dict[str, Any] | None], /) -> dict[str, Any]:
        outputs = [output for output in _llm_outputs if output and "token_usage" in output]
        if not outputs:
            return {}
        usage = total_usage([output["token_usage"] for output in outputs])
        return {"token_usage": usage, "model_name": outputs[0]["model_name"]}

    def _resolve_model_profile(self) -> ModelProfile:
        """Abilities of the model, as far as they are known without loading it.

        Tool calling is known from a `tool_format` in the settings, else from the chat template once the model is
        loaded. Reasoning and pictures are known once it is loaded. Unknown abilities are left out.
        """
        config, model = self._settings(), self._engines().info_if_loaded()
        grammars, limit = config.get("grammar_backend") != "none", config.get("max_model_len")
        calls = True if config.get("tool_format", "auto") != "auto" else None
        profile = ModelProfile(
            name=self._name(), open_weights=True, text_inputs=True, text_outputs=True, audio_inputs=False,
            video_inputs=False, pdf_inputs=False, pdf_tool_message=False, structured_output=grammars, temperature=True,
        )  # fmt: skip
        if model is not None:
            calls, limit = model.tool_format is not None, model.max_model_len
            profile["reasoning_output"] = model.reasons
            profile["image_inputs"] = profile["image_tool_message"] = model.no_images is None
        if calls is not None or not grammars:
            profile["tool_calling"] = profile["tool_choice"] = profile["tool_call_streaming"] = bool(calls and grammars)
        if isinstance(limit, int):
            profile["max_input_tokens"] = limit
        return profile


def _count(inputs: object) -> int:
    if isinstance(inputs, str) or not isinstance(inputs, Sequence):
        raise InvalidParameter("inputs", "must be a list of inputs, one for each answer", inputs)
    return len(inputs)


def _widened(
    config: RunnableConfig | Sequence[RunnableConfig] | None, length: int
) -> RunnableConfig | list[RunnableConfig] | None:
    """The configs with as many threads as there are inputs, where the caller set no limit."""
    if length < 2:
        return config if config is None or isinstance(config, dict) else list(config)
    configs = get_config_list(config, length)
    most = configs[0].get("max_concurrency")
    if most is not None and (not isinstance(most, int) or most < 1):
        raise InvalidParameter("max_concurrency", "must be an integer >= 1, or None", most)
    if most is None:
        configs[0] = {**configs[0], "max_concurrency": min(length, MAX_BATCH_THREADS)}
    return configs
