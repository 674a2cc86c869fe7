"""transformers' `generate`: prompts padded on the left, everybody runs as long as the longest output."""

from __future__ import annotations

from typing import Any

from benchmarks.peers.drivers.base import Clock, Settings
from benchmarks.peers.workloads import Request, Trace


def load_model(settings: Settings) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(settings.threads)
    model = AutoModelForCausalLM.from_pretrained(settings.checkpoint, dtype=getattr(torch, settings.dtype)).eval()
    model.generation_config.eos_token_id = None
    return model


class GenerateDriver:
    async def load(self, settings: Settings) -> dict[str, Any]:
        self._model = load_model(settings)
        return {
            "weights": settings.weights,
            "kv": None,
            "note": f"attention: {self._model.config._attn_implementation}",
        }

    async def run(self, requests: list[Request], way: str) -> list[Trace]:
        import torch

        longest = max(len(request.prompt) for request in requests)
        missing = [longest - len(request.prompt) for request in requests]
        inputs = torch.tensor([[0] * gap + request.prompt for gap, request in zip(missing, requests, strict=True)])
        mask = torch.ones_like(inputs)
        for row, gap in enumerate(missing):
            mask[row, :gap] = 0
        output = max(request.output for request in requests)
        clock = Clock()
        with torch.inference_mode():
            found = self._model.generate(
                inputs, attention_mask=mask, max_new_tokens=output, do_sample=False, pad_token_id=0
            )
        end = clock()
        rows = found[:, longest:].tolist()
        return [Trace(row[: request.output], end) for row, request in zip(rows, requests, strict=True)]

    async def close(self) -> None:
        pass


make = GenerateDriver
