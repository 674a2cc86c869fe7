"""Attention over latent pages beside the same model through transformers' modules, which keep whole keys and values.

    python -m benchmarks.latent [--dtype bfloat16 --rows 1 16 --context 512 --rounds 5 --threads 2]

A model of DeepSeek-V3's kind with the sizes of a layer of DeepSeek-V2-Lite (width 2,048, 16 heads, a latent vector of
512 and 64 rotated numbers), but few layers, experts and words; random weights. Both runners are in one process and
take turns, some decoding steps each; milliseconds are medians of all steps, and so is the ratio of neighbouring turns.
Then a prompt, and the bytes of a token in the cache by each one's own estimate.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch

from asyncengine.config import EngineConfig
from asyncengine.execution.models.loading import load_model
from asyncengine.execution.models.memory.needs import read_needs
from asyncengine.execution.runner.building import build_runner
from benchmarks.decode_step import Requests

SHAPE: dict[str, Any] = {
    "model_type": "deepseek_v3", "vocab_size": 8192, "hidden_size": 2048, "intermediate_size": 4096,
    "moe_intermediate_size": 704, "num_attention_heads": 16, "num_key_value_heads": 16, "q_lora_rank": 768,
    "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 8,
    "num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1,
    "max_position_embeddings": 65536,
}  # fmt: skip
FORMS = {"latent pages": True, "transformers": False}
STEPS = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--context", type=int, nargs="+", default=[512], help="tokens before the first step")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    runners = {name: make(options, fused) for name, fused in FORMS.items()}
    print("| | " + " | ".join(FORMS) + " | times |\n|---|---|---|---|")
    for context in options.context:
        for rows in options.rows:
            steps = {name: Requests(runner, rows, context) for name, runner in runners.items()}
            prompts = {name: timed(requests.step) for name, requests in steps.items()}
            show(f"prompts, {rows} of {context}", {name: [spent] for name, spent in prompts.items()})
            found: dict[str, list[float]] = {name: [] for name in FORMS}
            for _ in range(options.rounds):
                for name, requests in steps.items():
                    requests.step()  # the other's weights are in the CPU's cache
                    found[name] += [timed(requests.step) for _ in range(STEPS)]
            show(f"a step of {rows}, context {context}", found)


def make(options: argparse.Namespace, fused: bool) -> Any:
    from transformers import AutoConfig

    longest = max(options.context) + options.rounds * (STEPS + 1) + 2
    config = EngineConfig(
        dtype=options.dtype, device="cpu", num_threads=options.threads, max_num_seqs=max(options.rows), page_size=16,
        max_model_len=longest, load_format="dummy", show_progress=False, fuse=fused,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        AutoConfig.for_model(**{**SHAPE, "num_hidden_layers": options.layers}).save_pretrained(folder)
        needs = read_needs(folder, config)
        model = load_model(folder, config)
    print(f"{needs.kv_bytes_per_token} bytes of cache for a token: {', '.join(model.fused) or 'transformers'}")
    return build_runner(model, config).runner


def timed(step: Callable[[], None]) -> float:
    began = time.perf_counter()
    step()
    return time.perf_counter() - began


def show(what: str, found: dict[str, list[float]]) -> None:
    own, other = found.values()
    turns = [statistics.median(part) for each in (own, other) for part in _parts(each)]
    half = len(turns) // 2
    ratios = [turns[place + half] / turns[place] for place in range(half)]
    times = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
    print(f"| {what} | {1e3 * statistics.median(own):.1f} ms | {1e3 * statistics.median(other):.1f} ms | {times} |")


def _parts(found: list[float]) -> list[list[float]]:
    return [found[first : first + STEPS] for first in range(0, len(found), STEPS)]


if __name__ == "__main__":
    main()
