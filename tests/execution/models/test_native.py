"""Families that are written down run as that, each by name, and all others say that they do not."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import transformers as hf
from support import tiny_models
from support.checkpoints import Checkpoint
from support.tiny_models import FAMILIES

from asyncengine.config import EngineConfig
from asyncengine.execution.models import loading
from asyncengine.execution.models.decoder import Decoder
from asyncengine.execution.models.fallback.model import TransformersModel
from asyncengine.execution.models.families import NATIVE
from asyncengine.execution.models.loading import load_model

PROMISED = (
    "llama", "mistral", "ministral", "ministral3", "qwen2", "qwen3", "smollm3", "phi3", "granite", "granitemoehybrid",
    "olmo", "olmo2", "olmo3", "gemma", "gemma2", "gemma3_text", "gemma4_text", "cohere", "cohere2", "stablelm", "glm",
    "glm4", "exaone4", "starcoder2", "hunyuan_v1_dense", "seed_oss", "apertus", "nemotron", "gpt2", "opt",
    "mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "granitemoe", "granitemoeshared", "phimoe", "glm4_moe", "dots1",
    "ernie4_5_moe", "minimax_m2", "gpt_oss", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "mamba2", "bamba",
    "falcon_h1", "nemotron_h", "lfm2", "lfm2_moe", "kimi_linear",
)  # fmt: skip
"""Types that docs and release notes call native. A family is taken from here only when they say so."""
DUMMY = EngineConfig(load_format="dummy", dtype="float32", show_progress=False)


ZOO = {make().model_type for make in FAMILIES.values()}
"""Families that tests/execution/runner/test_families.py runs as what they are."""


def test_what_is_promised_is_written_down() -> None:
    assert set(PROMISED) <= set(NATIVE)


@pytest.mark.parametrize("model_type", sorted(NATIVE.keys() - ZOO))
def test_written_down_families_do_not_fall_back(
    model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(loading, "_load_module", lambda *_: pytest.fail(f"{model_type} fell back to transformers"))
    hf.CONFIG_MAPPING[model_type](**tiny_models.common()).save_pretrained(tmp_path)
    model = load_model(str(tmp_path), DUMMY)
    assert isinstance(model.model, Decoder)
    assert model.fused[0] == "decoder x 1"
    assert not [record for record in caplog.records if record.name == "asyncengine"]


OTHERS = [name for name, make in FAMILIES.items() if make().model_type not in NATIVE]


@pytest.mark.parametrize("name", OTHERS)
def test_others_say_so(name: str, checkpoint: Checkpoint, caplog: pytest.LogCaptureFixture) -> None:
    """One visible line says so, and so does `info`."""
    with caplog.at_level(logging.WARNING, "asyncengine"):
        model = load_model(str(checkpoint(name)), EngineConfig(show_progress=False))
    assert isinstance(model.model, TransformersModel)
    assert model.fused[0] == "transformers x 1"
    (line,) = [record.message for record in caplog.records if "not written down" in record.message]
    assert repr(FAMILIES[name]().model_type) in line


def test_unfused_is_transformers(checkpoint: Checkpoint, caplog: pytest.LogCaptureFixture) -> None:
    """`fuse=False` is the oracle: whoever asks for it is not warned."""
    model = load_model(str(checkpoint("llama")), EngineConfig(fuse=False, show_progress=False))
    assert isinstance(model.model, TransformersModel)
    assert type(model.model.module).__name__ == "LlamaForCausalLM"
    assert not caplog.records
