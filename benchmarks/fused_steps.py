"""Short steps with all layers in one call beside the same layer by layer: python -m benchmarks.fused_steps

    [--shape qwen3.5-moe falcon-h1-0.5b nemotron-3 --rows 1 16 --quantization int4 --steps 20 --threads 2]

Models whose layers are not of the commonest shape, by the sizes of published ones, with fewer layers and experts so
that they load in seconds: Qwen3.5-35B-A3B (64 of 256 experts, 8 of 40 layers), Falcon-H1-0.5B (whole), Nemotron-3-Nano
(32 of 128 experts, 12 of 52 layers). Random weights and tokens, a model runner driven by hand; the two ways take turns
step by step, on the same requests: they give the same bits. Medians in milliseconds.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from typing import Any
from unittest.mock import patch

import torch

from asyncengine.config import EngineConfig
from asyncengine.execution.models import loading
from asyncengine.execution.models.decoder import Decoder
from asyncengine.execution.models.loading import load_model
from asyncengine.execution.runner.building import build_runner
from benchmarks.decode_step import Requests
from benchmarks.mixtures import fill_alike

SHAPES: dict[str, dict[str, Any]] = {
    "qwen3.5-moe": {
        "model_type": "qwen3_5_moe_text", "vocab_size": 32768, "hidden_size": 2048, "num_hidden_layers": 8,
        "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256, "linear_num_key_heads": 16,
        "linear_num_value_heads": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128, "num_experts": 64,
        "num_experts_per_tok": 8, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
        "max_position_embeddings": 4096,
    },
    "falcon-h1-0.5b": {
        "model_type": "falcon_h1", "vocab_size": 32768, "hidden_size": 1024, "num_hidden_layers": 36,
        "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "intermediate_size": 2048,
        "mamba_d_ssm": 1536, "mamba_n_heads": 24, "mamba_d_head": 64, "mamba_n_groups": 1, "mamba_d_state": 128,
        "mamba_rms_norm": False, "max_position_embeddings": 4096,
    },
    "nemotron-3": {
        "model_type": "nemotron_h", "vocab_size": 32768, "hidden_size": 2688, "num_attention_heads": 32,
        "num_key_value_heads": 2, "head_dim": 128, "mamba_num_heads": 64, "mamba_head_dim": 64, "ssm_state_size": 128,
        "n_groups": 8, "n_routed_experts": 32, "num_experts_per_tok": 6, "moe_intermediate_size": 1856,
        "moe_shared_expert_intermediate_size": 3712, "n_group": 1, "topk_group": 1,
        "layers_block_type": [
            "linear_attention", "moe", "linear_attention", "moe", "linear_attention", "full_attention", "moe",
            "linear_attention", "moe", "linear_attention", "moe", "linear_attention",
        ],
        "max_position_embeddings": 4096,
    },
}  # fmt: skip
CONTEXT = 32


def measure(name: str, options: argparse.Namespace) -> None:
    from transformers import AutoConfig

    config = EngineConfig(
        dtype="bfloat16", device="cpu", num_threads=options.threads, max_num_seqs=max(options.rows), page_size=16,
        max_model_len=CONTEXT + 2 * options.steps + 40, load_format="dummy", show_progress=False,
        quantization=options.quantization, kv_cache_memory="256MiB",
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder, patch.object(loading, "fill_randomly", fill_alike):
        AutoConfig.for_model(**SHAPES[name]).save_pretrained(folder)
        loaded = load_model(folder, config)
        runner = build_runner(loaded, config)
    model: Any = loaded.model
    assert isinstance(model, Decoder)
    recorded = model.recorded
    print(f"{name}: {', '.join(runner.fused)}; {model.nbytes / 2**20:.0f} MiB", flush=True)
    for rows in options.rows:
        requests = Requests(runner, rows, CONTEXT)
        requests.step()
        found: dict[bool, list[float]] = {True: [], False: []}
        for _ in range(options.steps):
            for whole, times in found.items():
                model.recorded = recorded if whole else None
                began = time.perf_counter()
                requests.step()
                times.append(1e3 * (time.perf_counter() - began))
        one, apart = (statistics.median(found[whole]) for whole in (True, False))
        print(
            f"{name}, {rows} rows: {apart:.2f} ms layer by layer, {one:.2f} in one call: {apart / one:.2f}", flush=True
        )
        model.recorded = recorded
    runner.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, nargs="+", default=list(SHAPES))
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--quantization", choices=("int8", "int4"), default=None)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    for name in options.shape:
        measure(name, options)


if __name__ == "__main__":
    main()
