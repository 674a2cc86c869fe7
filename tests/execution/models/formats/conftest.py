"""Whole small models, plain and in each format."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers as hf
from support.quantized_checkpoints import quantized
from support.tiny_models import FAMILIES

Plain = Callable[..., Path]
Pair = Callable[..., tuple[Path, Path]]


@pytest.fixture(scope="package")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Plain:
    """(family, seed, layers) -> a float32 checkpoint whose widths all formats take. Layers None: as the family has."""
    made: dict[tuple[str, int, int | None], Path] = {}

    def make(family: str, seed: int = 0, layers: int | None = None) -> Path:
        key = family, seed, layers
        if key not in made:
            config = FAMILIES[family]()
            depth = {} if layers is None else {"num_hidden_layers": layers}
            config.update({"hidden_size": 64, "intermediate_size": 128, "head_dim": 16, **depth})
            torch.manual_seed(seed)
            model = hf.AutoModelForCausalLM.from_config(config)
            made[key] = tmp_path_factory.mktemp(family) / "plain"
            model.save_pretrained(made[key])
        return made[key]

    return make


@pytest.fixture(scope="package")
def pair(plain: Plain, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """(family, format, seed, layers) -> (folder in it, folder with what it stands for)."""
    made: dict[tuple[str, str, int, int | None], tuple[Path, Path]] = {}

    def make(family: str, kind: str, seed: int = 0, layers: int | None = None) -> tuple[Path, Path]:
        key = family, kind, seed, layers
        if key not in made:
            folder = tmp_path_factory.mktemp("pair")
            quantized(plain(family, seed, layers), folder / "quantized", kind, folder / "dense")
            made[key] = folder / "quantized", folder / "dense"
        return made[key]

    return make
