"""vLLM's CPU build, offline: `LLM.generate` on a list of prompts."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from benchmarks.peers.drivers.base import Clock, Settings
from benchmarks.peers.workloads import Request, Trace


def prepare(settings: Settings, bind: str) -> dict[str, Any]:
    """Set what vLLM reads from its environment, and the arguments of both its engines."""
    os.environ |= {
        "VLLM_CPU_OMP_THREADS_BIND": bind,
        "VLLM_CACHE_ROOT": str(Path(settings.scratch) / "vllm"),
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
    }
    return {
        "model": settings.checkpoint, "dtype": settings.dtype, "skip_tokenizer_init": True,
        "max_num_seqs": settings.max_seqs, "max_model_len": settings.max_len,
        "kv_cache_memory_bytes": settings.kv_bytes, "enable_prefix_caching": True, "disable_log_stats": True,
    }  # fmt: skip


def cores(count: int) -> str:
    """The first `count` of the cores that this process may use, as vLLM wants them: "0-1"."""
    found = sorted(os.sched_getaffinity(0))[:count]
    if found == list(range(found[0], found[0] + len(found))):
        return f"{found[0]}-{found[-1]}" if len(found) > 1 else str(found[0])
    return ",".join(map(str, found))


class OfflineDriver:
    async def load(self, settings: Settings) -> dict[str, Any]:
        given = prepare(settings, cores(settings.threads))
        from vllm import LLM

        self._llm = LLM(**given)
        return {
            "weights": settings.weights,
            "kv": settings.kv_bytes,
            "note": f"bound to cores {cores(settings.threads)}",
        }

    async def run(self, requests: list[Request], way: str) -> list[Trace]:
        from vllm import SamplingParams

        prompts = [{"prompt_token_ids": request.prompt} for request in requests]
        params = [
            SamplingParams(temperature=0.0, max_tokens=request.output, ignore_eos=True, detokenize=False)
            for request in requests
        ]
        clock = Clock()
        found = self._llm.generate(prompts, params, use_tqdm=False)
        end = clock()
        return [Trace(list(answer.outputs[0].token_ids), end) for answer in found]

    async def close(self) -> None:
        pass


make = OfflineDriver
