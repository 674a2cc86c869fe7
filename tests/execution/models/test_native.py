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

DUMMY = EngineConfig(load_format="dummy", dtype="float32", show_progress=False)


ZOO = {make().model_type for make in FAMILIES.values()}
"""Families that tests/execution/runner/test_families.py runs as what they are."""


@pytest.mark.parametrize("model_type", sorted(NATIVE.keys() - ZOO))
def test_written_down_families_do_not_fall_back(
    model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(
        loading, "_load_module", lambda *_, **__: pytest.fail(f"{model_type} fell back to transformers")
    )
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
