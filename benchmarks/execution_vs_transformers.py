"""The engine against transformers' `generate` on the same random checkpoint, prompts and threads.

Makes a Qwen3-0.6B-shaped bfloat16 checkpoint in a temporary folder, decodes it both ways, turn by turn, and prints
medians of output tokens per second, the share of transformers' tokens that agree (a random model has many near ties,
which bfloat16 rounds either way), and peak memory against what weights and KV cache take. Ours goes through the public
API: one `generate` call for each prompt, all at once. Greedy, end-of-sequence ignored, token ids in and out. Read
ratios, not absolutes, on a machine with company. `--memory` measures nothing but memory.

    python -m benchmarks.execution_vs_transformers [--batch 16 --input 128 --output 64 --rounds 3 --threads 2 --json]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from asyncengine import AsyncEngine, SamplingParams

SHAPES = {
    "qwen3-0.6b": {
        "vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": True,
        "max_position_embeddings": 40960,
    },
    "small": {
        "vocab_size": 32000, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64, "tie_word_embeddings": True,
        "max_position_embeddings": 4096,
    },
}  # fmt: skip
NEXT_TO_NOTHING = {
    "vocab_size": 1024, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 1,
    "num_key_value_heads": 1, "head_dim": 64,
}  # fmt: skip
"""Sizes of a model so small that the rest of a process shows: interpreter, libraries, compiled kernels."""
GREEDY = SamplingParams(temperature=0.0, top_p=1.0, top_k=0, repetition_penalty=1.0, ignore_eos=True)


def main() -> None:
    options = parse()
    if options.memory_of:
        print(json.dumps(asyncio.run(measure_memory(options))))
        return
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        make_checkpoint(SHAPES[options.shape], options.dtype, folder)
        report = {} if options.memory else asyncio.run(compare(options, folder))
        report["memory"] = memory_in_own_process(options, folder)
    with tempfile.TemporaryDirectory() as folder:
        make_checkpoint(SHAPES[options.shape] | NEXT_TO_NOTHING, options.dtype, folder)
        report["memory"]["without_model_mib"] = memory_in_own_process(options, folder)["peak_mib"]
    lines = [] if options.memory else [table(report)]
    print(json.dumps(report) if options.json else "\n".join([*lines, memory_table(report["memory"])]))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-0.6b")
    parser.add_argument("--batch", type=int, default=16, help="requests at once (a single stream is always measured)")
    parser.add_argument("--input", type=int, default=128, help="prompt tokens")
    parser.add_argument("--output", type=int, default=64, help="generated tokens")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--memory", action="store_true", help="memory only")
    parser.add_argument("--memory-of", help=argparse.SUPPRESS)
    return parser.parse_args()


def forwarded(options: argparse.Namespace) -> list[str]:
    names = ("shape", "batch", "input", "output", "threads", "dtype")
    return [part for name in names for part in (f"--{name}", str(getattr(options, name)))]


def make_checkpoint(shape: dict[str, Any], dtype: str, folder: str) -> None:
    from transformers import AutoModelForCausalLM, Qwen3Config

    torch.manual_seed(0)
    config = Qwen3Config(**shape)
    AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).save_pretrained(folder)


def memory_in_own_process(options: argparse.Namespace, folder: str) -> dict[str, float]:
    """`measure_memory` of a process that has done nothing else."""
    command = [sys.executable, "-m", "benchmarks.execution_vs_transformers", "--memory-of", folder, *forwarded(options)]
    found: dict[str, float] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return found


def make_prompts(options: argparse.Namespace) -> list[list[int]]:
    generator = random.Random(0)
    vocab = NEXT_TO_NOTHING["vocab_size"]
    return [[generator.randrange(vocab) for _ in range(options.input)] for _ in range(options.batch)]


async def make_engine(options: argparse.Namespace, folder: str) -> AsyncEngine:
    return await AsyncEngine.from_pretrained(
        folder, dtype=options.dtype, device="cpu", num_threads=options.threads, max_num_seqs=max(options.batch, 1),
        max_model_len=options.input + options.output, prefix_caching=False, show_progress=False,
    )  # fmt: skip


async def run_ours(engine: AsyncEngine, prompts: list[list[int]], output: int) -> tuple[list[list[int]], float]:
    """Tokens and seconds."""
    params = GREEDY.replace(max_tokens=output)
    began = time.perf_counter()
    done = await asyncio.gather(*(engine.generate(prompt, params) for prompt in prompts))
    return [list(completion.token_ids) for completion in done], time.perf_counter() - began


def run_transformers(model: Any, prompts: list[list[int]], output: int) -> tuple[list[list[int]], float]:
    inputs = torch.tensor(prompts)
    began = time.perf_counter()
    with torch.inference_mode():
        out = model.generate(
            inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=output, do_sample=False,
            eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
    return out[:, inputs.shape[1] :].tolist(), time.perf_counter() - began


async def compare(options: argparse.Namespace, folder: str) -> dict[str, Any]:
    """Both ways in turn, `rounds` times, after one short warm-up each."""
    from transformers import AutoModelForCausalLM

    engine = await make_engine(options, folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, options.dtype))
    prompts = make_prompts(options)
    await run_ours(engine, prompts[:1], 2)
    run_transformers(model, prompts[:1], 2)
    report: dict[str, Any] = {"options": vars(options), "fused": list(engine.info.fused), "tokens_per_second": {}}
    for name, chosen in (("single stream", prompts[:1]), (f"batch of {options.batch}", prompts)):
        speeds: dict[str, list[float]] = {"asyncengine": [], "transformers": []}
        for _ in range(options.rounds):
            ours, seconds = await run_ours(engine, chosen, options.output)
            speeds["asyncengine"].append(len(chosen) * options.output / seconds)
            theirs, seconds = run_transformers(model, chosen, options.output)
            speeds["transformers"].append(len(chosen) * options.output / seconds)
        pairs = [pair for left, right in zip(ours, theirs, strict=True) for pair in zip(left, right, strict=True)]
        report["tokens_per_second"][name] = {
            **{engine: statistics.median(values) for engine, values in speeds.items()},
            "all": speeds,
            "same_tokens": sum(left == right for left, right in pairs) / len(pairs),
        }
    await engine.aclose()
    return report


async def measure_memory(options: argparse.Namespace) -> dict[str, float]:
    """Peak resident memory of loading and one short batch, in a process of its own (the one called)."""
    torch.set_num_threads(options.threads)
    before = peak_mib()
    engine = await make_engine(options, options.memory_of)
    loaded = peak_mib()
    await run_ours(engine, make_prompts(options), options.output)
    info, peak = engine.info, peak_mib()
    await engine.aclose()
    return {
        "weights_mib": info.weight_bytes / 2**20,
        "kv_mib": info.kv_cache_bytes / 2**20,
        "interpreter_mib": before,
        "peak_after_loading_mib": loaded,
        "peak_mib": peak,
    }


def peak_mib() -> float:
    """Peak resident memory of this process (of `ru_maxrss` a child inherits its parent's)."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


def table(report: dict[str, Any]) -> str:
    lines = [f"{'output tokens/s':<16} {'asyncengine':>12} {'transformers':>13} {'ratio':>6} {'same tokens':>12}"]
    for name, row in report["tokens_per_second"].items():
        ours, theirs = row["asyncengine"], row["transformers"]
        lines.append(f"{name:<16} {ours:>12.1f} {theirs:>13.1f} {ours / theirs:>6.2f} {row['same_tokens']:>12.0%}")
    lines.append("fused: " + ", ".join(report["fused"]))
    return "\n".join(lines)


def memory_table(memory: dict[str, float]) -> str:
    held = memory["weights_mib"] + memory["kv_mib"]
    added = memory["peak_mib"] - memory["without_model_mib"]
    return (
        f"memory MiB: weights {memory['weights_mib']:.0f} + KV {memory['kv_mib']:.0f} = {held:.0f}; "
        f"peak {memory['peak_mib']:.0f} ({memory['peak_mib'] / held:.2f} times that), "
        f"after loading {memory['peak_after_loading_mib']:.0f}; a process with a model of next to nothing peaks at "
        f"{memory['without_model_mib']:.0f}, so this one adds {added:.0f} ({added / held:.2f} times)"
    )


if __name__ == "__main__":
    main()
