"""llama-cpp-python in process: one request at a time, as LangChain's ChatLlamaCpp runs it, without its text."""

from __future__ import annotations

from typing import Any

from benchmarks.peers.drivers.base import Clock, Settings
from benchmarks.peers.workloads import Request, Trace


class LlamaDriver:
    async def load(self, settings: Settings) -> dict[str, Any]:
        from llama_cpp import Llama

        self._llama = Llama(
            settings.gguf, n_ctx=settings.max_len, n_threads=settings.threads, n_threads_batch=settings.threads,
            verbose=False,
        )  # fmt: skip
        return {"weights": settings.gguf_bytes, "kv": None, "note": "one request after the other"}

    async def run(self, requests: list[Request], way: str) -> list[Trace]:
        clock = Clock()
        traces = []
        for request in requests:
            trace = Trace([], 0.0)
            for token in self._llama.generate(request.prompt, top_k=1, temp=0.0):
                trace.tokens.append(token)
                trace.times.append(clock())
                if len(trace.tokens) == request.output:
                    break
            trace.end = clock()
            traces.append(trace)
        return traces

    async def close(self) -> None:
        self._llama.close()


make = LlamaDriver
