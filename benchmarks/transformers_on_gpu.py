"""transformers' continuous batching on a GPU, under the load that `python -m tools.gpucheck` reports for this
engine as "256 x 128/256".

    python -m benchmarks.transformers_on_gpu [--device cuda] [--seed 0]
"""

from __future__ import annotations

import argparse
import logging
import time
from collections.abc import Sequence
from typing import Any

import torch

from tools.gpucheck.environment import wait_for
from tools.gpucheck.shapes import SMALL, Shape
from tools.gpucheck.speed import BATCH, PEER_LENGTHS
from tools.gpucheck.workloads import random_prompts


def transformers_batching(
    shape: Shape, device: torch.device, prompts: Sequence[Sequence[int]], output: int
) -> tuple[float | None, str]:
    """Output tokens per second, or None and why not."""
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    prompts = random_prompts([PEER_LENGTHS] * BATCH, SMALL.vocab, arguments.seed)
    rate, note = transformers_batching(SMALL, torch.device(arguments.device), prompts, PEER_LENGTHS[1])
    print(
        f"{SMALL.name}, {BATCH} x {PEER_LENGTHS[0]}/{PEER_LENGTHS[1]}:",
        "absent" if rate is None else f"{rate:.0f} tokens/s",
    )
    print(note)


if __name__ == "__main__":
    main()
