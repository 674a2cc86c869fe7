"""`AsyncEngineLLM`: LangChain's text completion over an in-process engine, without a chat template."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from typing import Any

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import BaseLLM
from langchain_core.outputs import GenerationChunk, LLMResult
from pydantic import ConfigDict

from asyncengine.integrations.langchain.errors import mapped_errors
from asyncengine.integrations.langchain.fields import LangChainFields
from asyncengine.integrations.langchain.messages import text_chunk, text_result
from asyncengine.integrations.results import checked, each_chunk, each_chunk_async


class AsyncEngineLLM(LangChainFields, BaseLLM):
    """Text completion on an in-process engine; fields, per-call keywords and errors as in `ChatAsyncEngine`.

    A list of prompts is submitted as a whole, so `batch`, `abatch` and `generate` run as one batch.
    """

    model_config = ConfigDict(extra="forbid")
    ls_model_type = "llm"

    def _generate(
        self, prompts: list[str], stop: list[str] | None = None, run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> LLMResult:  # fmt: skip
        with mapped_errors():
            call = self._request(stop, kwargs)
            completions = self._engines().sync().generate_many(prompts, call.params, **call.for_text())
            return text_result([checked(completion) for completion in completions], call.model_name)

    async def _agenerate(
        self, prompts: list[str], stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None, **kwargs: Any,
    ) -> LLMResult:  # fmt: skip
        with mapped_errors():
            call = self._request(stop, kwargs)
            keywords = call.for_text()
            engine = await self._engines().aio()
            tasks = [asyncio.ensure_future(engine.generate(prompt, call.params, **keywords)) for prompt in prompts]
            try:
                completions = await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()  # after an error of one: the others' answers have no reader any more
            return text_result([checked(completion) for completion in completions], call.model_name)

    def _stream(
        self, prompt: str, stop: list[str] | None = None, run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[GenerationChunk]:  # fmt: skip
        with mapped_errors():
            call = self._stream_request(stop, kwargs)
            for generation in map(text_chunk, each_chunk(call.stream(self._engines().sync(), prompt))):
                if run_manager is not None:
                    run_manager.on_llm_new_token(generation.text, chunk=generation)
                yield generation

    async def _astream(
        self, prompt: str, stop: list[str] | None = None, run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[GenerationChunk]:  # fmt: skip
        with mapped_errors():
            call = self._stream_request(stop, kwargs)
            async with aclosing(each_chunk_async(call.stream(await self._engines().aio(), prompt))) as chunks:
                async for chunk in chunks:
                    generation = text_chunk(chunk)
                    if run_manager is not None:
                        await run_manager.on_llm_new_token(generation.text, chunk=generation)
                    yield generation

    @property
    def _llm_type(self) -> str:
        return "asyncengine"
