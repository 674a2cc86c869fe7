"""transformers' continuous batching: the manager behind `generate_batch`, which lets each request have its length."""

from __future__ import annotations

import logging
from typing import Any

from benchmarks.peers.drivers.base import Clock, Settings
from benchmarks.peers.drivers.transformers_generate import load_model
from benchmarks.peers.workloads import Request, Trace

_PAGE = 256
"""Tokens; its own default."""


class BatchingDriver:
    async def load(self, settings: Settings) -> dict[str, Any]:
        from transformers import ContinuousBatchingConfig

        self._model = load_model(settings)
        # Twice the tokens of the others' caches: a page is 256 tokens, and each request leaves one partly empty. Left
        # to itself it would take nine tenths of the machine's memory.
        self._limits = ContinuousBatchingConfig(num_blocks=2 * settings.kv_tokens // _PAGE, page_size=_PAGE)
        logging.getLogger("ContinuousBatchingLogger").setLevel(logging.ERROR)
        return {"weights": settings.weights, "kv": None, "note": "the cache is made anew at each run, untimed"}

    async def run(self, requests: list[Request], way: str) -> list[Trace]:
        import torch
        from transformers import GenerationConfig
        from transformers.generation.continuous_batching.utils import WorkloadHints

        config = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
        hints = WorkloadHints(
            max(len(request.prompt) for request in requests), max(request.output for request in requests), len(requests)
        )
        found: dict[str, Trace] = {}
        with (
            torch.no_grad(),  # its thread's buffers must not be inference tensors
            self._model.continuous_batching_context_manager(
                config, timeout=5, workload_hints=hints, warmup=False, continuous_batching_config=self._limits
            ) as manager,
        ):
            clock = Clock()
            names = [
                manager.add_request(list(request.prompt), max_new_tokens=request.output, eos_token_id=-1)
                for request in requests
            ]
            while len(found) < len(requests):
                result = manager.get_result(timeout=1)
                if result is not None and result.is_finished():
                    found[result.request_id] = Trace(list(result.generated_tokens), clock())
                elif result is None and not manager.is_running():
                    raise RuntimeError("its thread ended with requests left")
        return [found[name] for name in names]

    async def close(self) -> None:
        pass


make = BatchingDriver
