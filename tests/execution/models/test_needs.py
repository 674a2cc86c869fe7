"""Memory that a model takes: estimates from its files before it is loaded, against what it takes once it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.panels import use_panels
from support.picture_models import save_picture_model
from support.tiny_models import make_checkpoint
from transformers import AutoConfig

from asyncengine import Engine
from asyncengine.config import EngineConfig
from asyncengine.demo import EMBEDDER_PATH, MODEL_PATH
from asyncengine.errors import ModelNotFound
from asyncengine.execution.attention.base import page_bytes
from asyncengine.execution.models.loading import load_encoder, load_model
from asyncengine.execution.models.memory.needs import read_needs
from asyncengine.execution.runner.building import build_runner


@pytest.fixture(autouse=True)
def no_panels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Panels are off: they add a tenth to the size of a tiny model, and nothing to that of one that anybody uses."""
    use_panels(False, monkeypatch)


QUIET = EngineConfig(device="cpu", num_threads=1, show_progress=False)
EVERY: list[dict[str, Any]] = [{}, {"dtype": "float32"}, {"quantization": "int8"}]
GENERATOR = [*EVERY, {"quantization": "int4"}, {"fuse": False}, {"load_format": "dummy"}]


@pytest.mark.parametrize(
    ("path", "settings"),
    [*((MODEL_PATH, settings) for settings in GENERATOR), *((EMBEDDER_PATH, settings) for settings in EVERY)],
    ids=str,
)
def test_needs_are_those_of_the_loaded_model(path: Path, settings: dict[str, Any]) -> None:
    """An encoder has no KV cache."""
    config = QUIET.replace(**settings)
    needs = read_needs(str(path), config)
    loaded: Any = (load_encoder if path == EMBEDDER_PATH else load_model)(str(path), config)
    assert needs.weight_bytes == pytest.approx(loaded.weights_bytes, rel=0.02)
    per_token = 0 if path == EMBEDDER_PATH else page_bytes(loaded.layers, 1, loaded.dtype)
    assert (needs.kv_bytes_per_token, needs.state_bytes) == (per_token, 0)
    assert needs.dtype == str(loaded.dtype).removeprefix("torch.")
    assert (needs.max_model_len, needs.vocab_size) == (loaded.max_model_len, loaded.vocab_size)
    assert needs.total(10) == needs.weight_bytes + 10 * per_token + needs.step_bytes


LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
"""Sizes of DeepSeek V2, V2-Lite and V3, which have 128, 16 and 128 heads."""


@pytest.mark.parametrize(("heads", "times"), [(16, 8.9), (128, 71.1)])
def test_latent_pages_hold_one_vector_of_a_token(heads: int, times: float, tmp_path: Path) -> None:
    """Whole keys and values are kept where transformers' modules run."""
    shape = {"hidden_size": 512, "num_hidden_layers": 2, "moe_intermediate_size": 64, "intermediate_size": 64}
    sizes = {"num_attention_heads": heads, "num_key_value_heads": heads, "n_routed_experts": 8}
    shape["num_nextn_predict_layers"] = 0  # a head's layer would keep a vector as well
    AutoConfig.for_model("deepseek_v3", **LATENT, **shape, **sizes).save_pretrained(tmp_path)
    config = QUIET.replace(dtype="bfloat16", load_format="dummy")
    found = [read_needs(str(tmp_path), config.replace(fuse=fuse)).kv_bytes_per_token for fuse in (True, False)]
    assert found == [2 * 2 * (512 + 64), 2 * 2 * heads * (128 + 64 + 128)]
    assert found[1] / found[0] == pytest.approx(times, rel=0.01)
    for fuse, expected in zip((True, False), found, strict=True):
        if heads > 16:  # the loaded model's are compared once
            continue
        loaded = load_model(str(tmp_path), config.replace(fuse=fuse))
        assert page_bytes(loaded.layers, 1, loaded.dtype) == expected
    needs = read_needs(str(tmp_path), config)
    with Engine.from_pretrained(tmp_path, config=config.replace(kv_cache_memory=needs.kv_bytes(4096))) as engine:
        assert engine.info.num_pages == pytest.approx(4096 / engine.info.page_size, abs=1)
        assert engine.info.kv_cache_bytes == pytest.approx(needs.kv_bytes(4096), rel=0.01)


def test_needs_of_a_model_that_reads_images(tmp_path: Path) -> None:
    """The needs are its tower beside its text, unless it is left out, and the pictures that are kept."""
    save_picture_model("qwen3_vl", tmp_path)
    config = QUIET.replace(dtype="float32", image_cache_memory=1000)
    with Engine.from_pretrained(tmp_path, config=config.replace(kv_cache_memory="1MiB")) as engine:
        needs = read_needs(str(tmp_path), config)
        assert engine.info.no_images is None
        assert needs.weight_bytes == pytest.approx(engine.info.weight_bytes, rel=0.02)
    text = read_needs(str(tmp_path), config.replace(images="off"))
    assert text.weight_bytes < needs.weight_bytes * 0.9
    assert (text.image_bytes, needs.image_bytes) == (0, 1000)
    assert needs.total(10) - text.total(10) == needs.weight_bytes - text.weight_bytes + 1000


def test_only_headers_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from asyncengine.execution.models.checkpoint import Checkpoint

    def refuse(*args: object) -> None:
        raise AssertionError("a weight was read")

    monkeypatch.setattr(Checkpoint, "read", refuse)
    assert read_needs(str(MODEL_PATH), EngineConfig(device="cpu")).num_heads == 4
    with pytest.raises(ModelNotFound):
        read_needs(str(tmp_path), EngineConfig(device="cpu"))


@pytest.mark.parametrize("settings", [{}, {"state_memory": "300KiB"}], ids=("states", "given"))
@pytest.mark.parametrize(
    "family",
    ["qwen3next", "granite4", "falcon-h1", "mamba2", "nemotron-h", "lfm2", "mistral", "gemma3", "gemma4", "gpt-oss",
     "llama4", "gpt2", "opt-350m"],
)  # fmt: skip
def test_needs_of_a_family_are_what_its_runner_allocates(tmp_path: Path, family: str, settings: dict[str, Any]) -> None:
    """Layers with states, with windows and chunks, that share keys and values, of other widths; without attention;
    transformers' own module."""
    folder = str(make_checkpoint(family, tmp_path / "model"))
    fixed = {"attention_backend": "torch", "speculation": "off", "max_num_seqs": 6, "kv_cache_memory": "1MiB"}
    config = QUIET.replace(**fixed, **settings)
    needs = read_needs(folder, config)
    loaded = load_model(folder, config)
    runner = build_runner(loaded, config, two_pools=True).runner
    try:
        states = 0 if runner.states is None else runner.states.nbytes
        assert needs.weight_bytes == pytest.approx(loaded.weights_bytes, rel=0.05)  # matrices fill whole panels
        assert needs.num_states * needs.state_bytes == states
        both = needs.kv_bytes_per_token * config.page_size
        if runner.num_window_pages:
            assert needs.two_pools is not None
            windowed = needs.two_pools.window_page_bytes
            assert runner.kv_bytes == runner.num_pages * (both - windowed) + runner.num_window_pages * windowed
            tokens = needs.kv_tokens(config.kv_cache_memory)
            assert tokens == runner.num_pages * config.page_size > 2**20 // needs.kv_bytes_per_token
            assert 2**20 - both < needs.kv_bytes(tokens) < 2**20 + both
        else:
            assert both == runner.kv_bytes // max(runner.num_pages, 1)
        assert (needs.num_heads > 0) == bool(loaded.layers)
    finally:
        runner.close()
