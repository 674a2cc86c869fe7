"""Whole small models in each format give what transformers gives with the weights that the files stand for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from support.forwards import logits_of, relative_error
from support.quantized_checkpoints import KINDS, quantized
from support.tiny_models import FAMILIES

from asyncengine.config import EngineConfig
from asyncengine.models.decoder import Decoder
from asyncengine.models.loading import load_model

IDS = [3, 17, 40, 9, 3, 3, 88, 101, 7, 61, 12, 5]
BOUND = 1e-2
"""Of the norm of the logits: what rounding x to 8 bits costs, where weights stay in small numbers."""
Pair = Callable[[str, str], tuple[Path, Path]]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A float32 checkpoint whose widths all formats take."""
    made: dict[str, Path] = {}

    def make(family: str) -> Path:
        if family not in made:
            config = FAMILIES[family]()
            config.update({"hidden_size": 64, "intermediate_size": 128, "head_dim": 16})
            torch.manual_seed(0)
            model = hf.AutoModelForCausalLM.from_config(config)
            made[family] = tmp_path_factory.mktemp(family) / "plain"
            model.save_pretrained(made[family])
        return made[family]

    return make


@pytest.fixture(scope="module")
def pair(plain: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """(family, format) -> (folder in it, folder with what it stands for)."""
    made: dict[tuple[str, str], tuple[Path, Path]] = {}

    def make(family: str, kind: str) -> tuple[Path, Path]:
        if (family, kind) not in made:
            folder = tmp_path_factory.mktemp("pair")
            quantized(plain(family), folder / "quantized", kind, folder / "dense")
            made[family, kind] = folder / "quantized", folder / "dense"
        return made[family, kind]

    return make


def load(folder: Path, **fields: Any) -> Any:
    return load_model(str(folder), EngineConfig(show_progress=False, **fields))


def oracle(folder: Path) -> torch.Tensor:
    model = hf.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([IDS]), use_cache=False).logits[0]
    return logits


@pytest.mark.parametrize(
    ("family", "kind"),
    [*(("llama", kind) for kind in KINDS), ("qwen3", "awq"), ("gemma3", "awq"), ("qwen3", "w8a8"), ("gemma3", "w8a8")],
)
def test_logits_are_those_of_the_dequantized_model(family: str, kind: str, pair: Pair) -> None:
    folder, dense = pair(family, kind)
    model = load(folder, dtype="float32").model
    assert isinstance(model, Decoder)
    assert relative_error(oracle(dense), logits_of(model, IDS)) < BOUND
