"""vLLM's CPU build through its asyncio engine, AsyncLLM."""

from __future__ import annotations

import itertools
from typing import Any

from benchmarks.peers.drivers.base import Clock, Settings, at_once
from benchmarks.peers.drivers.vllm_offline import prepare
from benchmarks.peers.workloads import Request, Trace


class AsyncDriver:
    def __init__(self) -> None:
        self._names = itertools.count()

    async def load(self, settings: Settings) -> dict[str, Any]:
        given = prepare(settings, "auto")  # its own choice is faster here than all cores
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        self._engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**given))
        return {"weights": settings.weights, "kv": settings.kv_bytes, "note": "automatic core binding"}

    async def run(self, requests: list[Request], way: str) -> list[Trace]:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        kind = RequestOutputKind.DELTA if way == "stream" else RequestOutputKind.FINAL_ONLY

        async def one(request: Request, clock: Clock) -> Trace:
            params = SamplingParams(
                temperature=0.0, max_tokens=request.output, ignore_eos=True, detokenize=False, output_kind=kind
            )
            trace = Trace([], 0.0)
            wanted = {"prompt_token_ids": request.prompt}
            async for answer in self._engine.generate(wanted, params, str(next(self._names))):
                found = list(answer.outputs[0].token_ids)
                trace.tokens += found
                trace.times += [clock()] * len(found)
            trace.end = clock()
            return trace

        traces = await at_once(requests, one)
        if way != "stream":
            for trace in traces:
                trace.times = []
        return traces

    async def close(self) -> None:
        self._engine.shutdown()


make = AsyncDriver
