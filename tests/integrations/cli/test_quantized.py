"""The figures that commands show of a quantized checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file
from support.quantized_checkpoints import quantized

from asyncengine.demo import MODEL_PATH
from asyncengine.integrations.cli.main import main


def test_figures_name_what_matrices_are_stored_as(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The bundled model in 8 bits: it answers, and the figures count its matrices."""
    folder = quantized(MODEL_PATH, tmp_path / "model", "w8a8")
    count = sum(name.endswith("_proj.weight_scale") for name in load_file(folder / "model.safetensors"))
    asked = ["generate", str(folder), "What is the capital of Norway?", "--chat", "--stats", "--temperature", "0"]
    assert main([*asked, "--max-tokens", "40", "--kv-cache-memory", "32MiB", "--num-threads", "1"]) == 0
    said = capsys.readouterr()
    assert "Oslo" in said.out
    assert f"with w8a8 x {count}, cpu" in said.err
