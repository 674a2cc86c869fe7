"""Whole small models whose matrices stay as they are stored on a GPU, by Triton's interpreter on the CPU: which takes a
second for a layer, so that they have one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.forwards import logits_of, relative_error

pytest.importorskip("triton")

from asyncengine.config import EngineConfig
from asyncengine.execution.layers import experts, options, stored_weight
from asyncengine.execution.layers.stored_weight import ChunkedWeight
from asyncengine.execution.models import description
from asyncengine.execution.models.loading import load_model
from asyncengine.execution.models.memory import needs

Pair = Callable[..., tuple[Path, Path]]
QUIET = EngineConfig(show_progress=False, dtype="float32", attention_backend="torch")
IDS = [3, 17, 40, 9, 3, 3, 88]
GPU = torch.device("cuda")


@pytest.fixture
def packed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Matrices that a CPU's kernels would multiply are kept as a GPU keeps them."""

    for module in (stored_weight, options):
        monkeypatch.setattr(module, "on_gpu", lambda device: True)
    for module in (stored_weight, needs, description):
        monkeypatch.setattr(module, "stored_missing", lambda dtype, device: None)


def load(folder: Path) -> Any:
    return load_model(str(folder), QUIET)


@pytest.mark.parametrize("kind", ["awq", "gptq act-order", "w8a8", "fp8 blocks"])
def test_logits_are_those_of_the_dequantized_model(kind: str, pair: Pair, packed: None) -> None:
    """No matrix is dequantized while loading."""
    folder, dense = pair("llama", kind, layers=1)
    loaded, plain = load(folder), load(dense)
    assert relative_error(logits_of(plain.model, IDS), logits_of(loaded.model, IDS)) < 1e-5
    weights = [linear.weight for layer in loaded.model.layers for linear in layer.linears()]
    forms = [form for weight in weights for form in getattr(weight, "forms", [weight])]
    assert all(isinstance(form, ChunkedWeight) for form in forms)
    assert loaded.weights_bytes < plain.weights_bytes


@pytest.mark.parametrize("kind", ["gptq asymmetric", "w8a8"])
def test_experts_stay_as_they_are_stored(kind: str, pair: Pair, packed: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """All experts' matrices of one kind are one weight, which the grouped kernel reads."""
    folder, dense = pair("qwen3moe", kind, layers=1)
    plain = load(dense)
    monkeypatch.setattr(experts, "triton_missing", lambda device: None)
    monkeypatch.setattr(experts.Experts, "by_torch", None)
    loaded = load(folder)
    assert relative_error(logits_of(plain.model, IDS), logits_of(loaded.model, IDS)) < 1e-5
    mixtures = [mixture.experts for layer in loaded.model.layers for mixture in layer.mixtures()]
    assert mixtures
    for mixture in mixtures:
        for matrices in (mixture.up, mixture.down):
            assert [type(form) for form in matrices.forms] == [ChunkedWeight]
    assert loaded.weights_bytes < plain.weights_bytes
