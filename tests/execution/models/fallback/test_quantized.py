"""Linears of transformers' modules in 8 and 4 bits: which are replaced, what is near, what stays."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.checkpoints import Checkpoint
from support.forwards import logits_of, relative_error
from torch import nn

from asyncengine import EngineConfig, UnsupportedModel
from asyncengine.execution.models.fallback.model import QuantizedLinear
from asyncengine.execution.models.loading import load_model

pytest.importorskip("numba")

IDS = [3, 17, 40, 9, 3, 3, 88]


def load(path: Any, **fields: Any) -> Any:
    return load_model(str(path), EngineConfig(fuse=False, show_progress=False, **fields))


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_linear(bits: int, dtype: torch.dtype) -> None:
    linear = nn.Linear(100, 33, dtype=dtype).requires_grad_(False)
    made, head = QuantizedLinear(linear, bits), QuantizedLinear(linear, bits, head=True)
    assert (made.in_features, made.out_features) == (100, 33)
    for shape in ((1, 1, 100), (1, 40, 100), (3, 100), (0, 100)):
        x = torch.randn(shape).to(dtype)
        expected = linear(x)
        for layer, result in ((made, dtype), (head, torch.float32)):
            found = layer(x)
            assert (found.shape, found.dtype) == (expected.shape, result)
            assert not x.numel() or relative_error(expected, found) < (0.02 if bits == 8 else 0.15)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("name", ["llama", "qwen3", "opt", "hunyuanmoe"])
def test_every_linear_of_a_module_is_replaced(name: str, quantization: str, checkpoint: Checkpoint) -> None:
    """An output layer that is the embedding as well is kept, and a router whose weight is read by its family's code."""
    model, plain = load(checkpoint(name), quantization=quantization), load(checkpoint(name))
    module = model.model.module
    tied = model.hf_config.tie_word_embeddings
    kept = [path for path, part in module.named_modules() if type(part) is nn.Linear]
    assert all((tied and path == "lm_head") or "gate.wg" in path for path in kept)
    head = module.get_output_embeddings()
    assert tied or head.form.bits == 8
    expected, found = (logits_of(each.model, IDS) for each in (plain, model))
    assert relative_error(expected, found) < (0.1 if quantization == "int8" else 0.6)
    assert model.weights_bytes < plain.weights_bytes
    assert [target.modules for target in model.model.lora_targets()] == [
        target.modules for target in plain.model.lora_targets()
    ]


def test_a_family_without_linears(checkpoint: Checkpoint) -> None:
    """GPT-2's are transposed, and its output layer is its embedding."""
    with pytest.raises(UnsupportedModel, match="no linear layers"):
        load(checkpoint("gpt2"), quantization="int8")
