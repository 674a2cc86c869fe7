"""transformers on a GPU, under loads that `python -m tools.gpucheck ladder` gives to this engine.

    python -m benchmarks.transformers_on_gpu [--device cuda] [--seed 0] [--seconds 120]

`generate` on one prompt, then its continuous batching. Without flash-attn, which cannot be had everywhere, that attends
through a dense mask over all requests' keys, so many streams may not end in time: what has come by then counts.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # it would look there for attention kernels, and wait

import torch

from tools.gpucheck.environment import wait_for
from tools.gpucheck.shapes import SMALL, TINY, Shape
from tools.gpucheck.workloads import random_prompts

LOADS = ((1, 128, 128), (16, 128, 128), (64, 128, 128), (256, 128, 256))
"""Streams, and prompt and output tokens of each."""


def make_model(config: Any, device: torch.device) -> Any:
    """Random weights, made up on the device."""
    from transformers import AutoModelForCausalLM

    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa").eval()


def generated(model: Any, prompt: Sequence[int], output: int, device: torch.device) -> float:
    """Tokens per second of `generate`, greedy, alone; the better of two."""
    inputs = torch.tensor([list(prompt)], device=device)
    best = 0.0
    for _ in range(2):
        wait_for(device)
        began = time.perf_counter()
        with torch.inference_mode():
            model.generate(
                inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=output, do_sample=False,
                eos_token_id=None, pad_token_id=0,
            )  # fmt: skip
        wait_for(device)
        best = max(best, output / (time.perf_counter() - began))
    return best


def batched(manager: Any, prompts: Sequence[Sequence[int]], output: int, seconds: float) -> tuple[float, bool]:
    """(tokens per second of requests given at once, whether all ended within `seconds`). Raises `RuntimeError` with a
    request's error, or if the peer's own thread ended."""
    began = last = time.perf_counter()
    asked = {manager.add_request(list(prompt), max_new_tokens=output, streaming=True) for prompt in prompts}
    counts: dict[str, int] = {}
    waiting = set(asked)
    while waiting and time.perf_counter() < began + seconds:
        result = manager.get_result(timeout=0.2)
        if result is None:
            if not manager.is_running():
                raise RuntimeError("its thread ended")
            continue
        if result.request_id not in asked:  # of a load before, which was cut
            continue
        if result.error is not None:
            raise RuntimeError(result.error)
        last = time.perf_counter()
        counts[result.request_id] = len(result.generated_tokens)
        if result.is_finished():
            waiting.discard(result.request_id)
    for request in waiting:
        manager.cancel_request(request)
    return sum(counts.values()) / max(last - began, 1e-9), not waiting


def run(shape: Shape, device: torch.device, seed: int, seconds: float, loads: Sequence[tuple[int, int, int]]) -> None:
    """Print a line for each load as it ends; whatever fails is said, it is the peer's. `seconds` for all."""
    until = time.perf_counter() + seconds
    model = make_model(shape.config, device)

    def prompts(streams: int, prompt: int) -> list[list[int]]:
        return random_prompts([(prompt, 1)] * streams, shape.vocab, seed)

    def say(name: str, rate: float, note: str = "") -> None:
        print(f"transformers, {name}: {rate:,.0f} tokens/s{note}", flush=True)

    _, prompt, output = loads[0]
    say(f"generate, 1 x {prompt}/{output}", generated(model, *prompts(1, prompt), output, device))
    streams = max(streams for streams, _, _ in loads)
    manager = _manager(model, 4 * streams, 16 * streams)
    try:
        batched(manager, prompts(1, 8), 4, seconds / 4)  # what is done once
        for streams, prompt, output in loads:
            left = until - time.perf_counter()
            if left < 1:
                print(f"transformers, {streams} x {prompt}/{output}: not begun, time was up", flush=True)
                continue
            rate, whole = batched(manager, prompts(streams, prompt), output, left)
            note = "" if whole else f", cut after {left:.0f} s"
            say(f"continuous batching, {streams} x {prompt}/{output}", rate, note)
    finally:
        manager.stop(block=True, timeout=2, hard_stop=True)


def _manager(model: Any, blocks: int, tokens: int) -> Any:
    """Continuous batching, of so many blocks of 256 tokens and so many tokens in a step."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.CRITICAL)
    wanted = GenerationConfig(max_new_tokens=8, do_sample=False, eos_token_id=-1, pad_token_id=0)
    memory = ContinuousBatchingConfig(num_blocks=blocks, max_batch_tokens=tokens)
    manager = model.init_continuous_batching(generation_config=wanted, continuous_batching_config=memory)
    manager.start()
    return manager


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--tiny", action="store_true", help="a tiny shape and short loads, to try it out")
    arguments = parser.parse_args()
    shape, loads = (TINY[SMALL.name], ((1, 16, 4), (3, 16, 4))) if arguments.tiny else (SMALL, LOADS)
    assert isinstance(shape, Shape)
    try:
        run(shape, torch.device(arguments.device), arguments.seed, arguments.seconds, loads)
    except Exception as error:
        print(f"transformers: {type(error).__name__}: {error}".splitlines()[0][:300], flush=True)
    sys.stdout.flush()
    os._exit(0)  # its thread may be in the middle of something long


if __name__ == "__main__":
    main()
