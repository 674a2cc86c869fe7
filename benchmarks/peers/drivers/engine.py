"""This engine through its public asyncio API, and through LangChain's `abatch`."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from benchmarks.peers.drivers.base import Absent, Clock, Settings, at_once
from benchmarks.peers.shapes import as_text
from benchmarks.peers.workloads import Request, Trace


class EngineDriver:
    async def load(self, settings: Settings) -> dict[str, Any]:
        from asyncengine import AsyncEngine, EngineConfig, SamplingParams

        given: dict[str, Any] = {}
        if settings.quantization != "none" and not settings.gguf:
            if "quantization" not in {field.name for field in fields(EngineConfig)}:
                raise Absent("the engine of this checkout has no setting `quantization` yet")
            given["quantization"] = settings.quantization
        if "speculation" in {field.name for field in fields(EngineConfig)}:
            given["speculation"] = "off"  # what random weights say goes round in circles, which look-ups guess
        self._engine = await AsyncEngine.from_pretrained(
            settings.gguf or settings.checkpoint, dtype=settings.dtype, device="cpu", num_threads=settings.threads,
            max_num_seqs=settings.max_seqs, max_model_len=settings.max_len, kv_cache_memory=settings.kv_bytes,
            show_progress=False, grammar_backend="none", **given,
        )  # fmt: skip
        self._greedy = SamplingParams(temperature=0.0, top_p=1.0, top_k=0, repetition_penalty=1.0, ignore_eos=True)
        info = self._engine.info
        return {"weights": info.weight_bytes, "kv": info.kv_cache_bytes, "note": "fused: " + ", ".join(info.fused)}

    async def run(self, requests: list[Request], way: str) -> list[Trace]:
        if way == "chat":
            return await self._chat(requests)
        return await at_once(requests, self._stream if way == "stream" else self._generate)

    async def _generate(self, request: Request, clock: Clock) -> Trace:
        done = await self._engine.generate(request.prompt, self._greedy.replace(max_tokens=request.output))
        return Trace(list(done.token_ids), clock())

    async def _stream(self, request: Request, clock: Clock) -> Trace:
        tokens: list[int] = []
        times: list[float] = []
        async for chunk in self._engine.stream(request.prompt, self._greedy.replace(max_tokens=request.output)):
            tokens += chunk.token_ids
            times += [clock()] * len(chunk.token_ids)
        return Trace(tokens, clock(), times)

    async def _chat(self, requests: list[Request]) -> list[Trace]:
        """The template writes contents as they are, so the token ids are those of the requests."""
        from asyncengine.integrations.langchain import ChatAsyncEngine

        output = requests[0].output
        model = ChatAsyncEngine(engine=self._engine, temperature=0, max_tokens=output)
        clock = Clock()
        messages = await model.abatch(
            [as_text(request.prompt) for request in requests],
            top_p=1.0, top_k=0, repetition_penalty=1.0, ignore_eos=True, skip_special_tokens=False,
        )  # fmt: skip
        end = clock()
        for request, message in zip(requests, messages, strict=True):
            used = message.usage_metadata
            if used is None or used["input_tokens"] != len(request.prompt):
                raise RuntimeError("the chat did not have the token ids of the request")
        return [Trace([int(word) for word in str(message.content).split()], end) for message in messages]

    async def close(self) -> None:
        await self._engine.aclose()


make = EngineDriver
