"""Frequencies that would change with the longest neighbour are fixed at load."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers as hf
from support.drive import Driver, greedy_reference, prompts

from asyncengine.config import EngineConfig
from asyncengine.execution.models.fallback.model import TransformersModel
from asyncengine.execution.models.loading import load_model
from asyncengine.execution.runner.building import build_runner

ORIGINAL = 32


def make(kind: str, folder: Path) -> tuple[hf.PreTrainedModel, str]:
    rope = {"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": ORIGINAL}
    if kind == "longrope":
        rope |= {"short_factor": [1.0] * 4, "long_factor": [2.0, 3.0, 4.0, 6.0]}
    config = hf.LlamaConfig(
        vocab_size=90, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=ORIGINAL if kind == "dynamic" else 4 * ORIGINAL,
        rope_parameters=rope,
    )  # fmt: skip
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.3)
    model.save_pretrained(folder)
    return model, str(folder)


@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_a_long_neighbour_changes_nothing(kind: str, fuse: bool, tmp_path: Path) -> None:
    model, folder = make(kind, tmp_path / "m")
    config = EngineConfig(page_size=4, kv_cache_memory="8MiB", max_num_seqs=64, fuse=fuse)
    loaded = load_model(folder, config)
    driver = Driver(build_runner(loaded, config).runner)
    limit = loaded.max_model_len
    short, long = prompts([6, limit - 20], 90)
    alone = driver.run([driver.job(short, 12)])
    together = driver.run([driver.job(short, 12), driver.job(long, 12)])
    assert together[:1] == alone
    assert driver.run([driver.job(long, 12)], chunk=9) == together[1:]
    assert together[1] == greedy_reference(model, long, 12), "at the length the frequencies are fixed for"
    if isinstance(loaded.model, TransformersModel):
        rotary = loaded.model.module.model.rotary_emb
        frequencies = rotary.inv_freq.clone()
        driver.run([driver.job(short, 2)])
        assert torch.equal(rotary.inv_freq, frequencies)


@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_a_context_within_the_original_has_the_original_frequencies(kind: str, fuse: bool, tmp_path: Path) -> None:
    """Such a limit is what docs/contract.md offers those who want transformers' answers to short prompts."""
    model, folder = make(kind, tmp_path / "m")
    config = EngineConfig(page_size=4, kv_cache_memory="8MiB", max_num_seqs=64, max_model_len=ORIGINAL, fuse=fuse)
    driver = Driver(build_runner(load_model(folder, config), config).runner)
    (short,) = prompts([6], 90)
    assert driver.run([driver.job(short, 12)]) == [greedy_reference(model, short, 12)]
