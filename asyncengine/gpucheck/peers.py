"""Other engines on the same weights and the same machine, where they are installed and run."""

from __future__ import annotations

import importlib.util
import logging
import time
from collections.abc import Sequence
from typing import Any

import torch

from asyncengine.gpucheck.environment import wait_for
from asyncengine.gpucheck.shapes import Shape

OTHERS = ("vllm", "sglang", "nanovllm", "minisgl")
"""Looked for, not driven: each wants the GPU, and often another torch, for itself."""


def transformers_batching(
    shape: Shape, device: torch.device, prompts: Sequence[Sequence[int]], output: int
) -> tuple[float | None, str]:
    """Output tokens per second of transformers' continuous batching, or None and why not."""
    try:
        return _transformers_batching(shape.config, device, prompts, output), "second of two runs"
    except Exception as error:  # whatever it is, it is the peer's
        return None, f"{type(error).__name__}: {error}".splitlines()[0][:200]


def _transformers_batching(config: Any, device: torch.device, prompts: Sequence[Sequence[int]], output: int) -> float:
    from transformers import AutoModelForCausalLM, GenerationConfig

    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa").eval()
    wanted = GenerationConfig(max_new_tokens=output, do_sample=False, eos_token_id=-1, pad_token_id=0)
    rate = 0.0
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.CRITICAL)
    for _ in range(2):
        wait_for(device)
        began = time.perf_counter()
        with torch.no_grad():
            found = model.generate_batch([list(prompt) for prompt in prompts], generation_config=wanted)
        seconds = time.perf_counter() - began
        counts = [len(result.generated_tokens) for result in found.values()]
        if counts != [output] * len(prompts):
            raise RuntimeError(f"gave {sum(counts)} of {output * len(prompts)} tokens")
        rate = sum(counts) / seconds
    return rate


def others() -> dict[str, str]:
    """What is said of each peer that is not driven."""
    return {
        name: "not installed" if importlib.util.find_spec(name) is None else "installed, but not driven from here"
        for name in OTHERS
    }
