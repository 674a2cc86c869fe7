"""A model for tests on a real GPU: a small Qwen3 with heads that FlashInfer has kernels for, and an engine's runner."""

from __future__ import annotations

from pathlib import Path

import transformers

from asyncengine.config import EngineConfig
from asyncengine.models.loading import load_model
from asyncengine.runner.building import build_runner
from asyncengine.runner.model_runner import ModelRunner


def write_small_qwen3(folder: Path) -> Path:
    """The configuration alone: weights are made up (`load_format="dummy"`)."""
    config = transformers.Qwen3Config(
        vocab_size=4096, hidden_size=512, intermediate_size=1024, num_hidden_layers=3, num_attention_heads=16,
        num_key_value_heads=8, head_dim=128, max_position_embeddings=1024, tie_word_embeddings=True,
    )  # fmt: skip
    config.architectures = ["Qwen3ForCausalLM"]
    config.save_pretrained(folder)
    return folder


def runner_without_graphs(folder: Path) -> ModelRunner:
    """On the current GPU, in bfloat16; graphs are the caller's to capture."""
    config = EngineConfig(
        device="cuda", dtype="bfloat16", load_format="dummy", max_num_seqs=16, kv_cache_memory="200MB",
        cuda_graphs=False, max_model_len=512,
    )  # fmt: skip
    return build_runner(load_model(str(folder), config), config)
