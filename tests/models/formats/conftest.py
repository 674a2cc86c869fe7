"""Whole small models, plain and in each format."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers as hf
from support.checkpoints import one_thread
from support.quantized_checkpoints import quantized
from support.tiny_models import FAMILIES

__all__ = ["one_thread"]

Plain = Callable[..., Path]
Pair = Callable[..., tuple[Path, Path]]


@pytest.fixture(scope="package")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Plain:
    """(family, seed) -> a float32 checkpoint whose widths all formats take."""
    made: dict[tuple[str, int], Path] = {}

    def make(family: str, seed: int = 0) -> Path:
        if (family, seed) not in made:
            config = FAMILIES[family]()
            config.update({"hidden_size": 64, "intermediate_size": 128, "head_dim": 16})
            torch.manual_seed(seed)
            model = hf.AutoModelForCausalLM.from_config(config)
            made[family, seed] = tmp_path_factory.mktemp(family) / "plain"
            model.save_pretrained(made[family, seed])
        return made[family, seed]

    return make


@pytest.fixture(scope="package")
def pair(plain: Plain, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """(family, format, seed) -> (folder in it, folder with what it stands for)."""
    made: dict[tuple[str, str, int], tuple[Path, Path]] = {}

    def make(family: str, kind: str, seed: int = 0) -> tuple[Path, Path]:
        if (family, kind, seed) not in made:
            folder = tmp_path_factory.mktemp("pair")
            quantized(plain(family, seed), folder / "quantized", kind, folder / "dense")
            made[family, kind, seed] = folder / "quantized", folder / "dense"
        return made[family, kind, seed]

    return make
