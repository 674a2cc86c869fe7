"""Weights in 8 and 4 bits: what is replaced, what it costs in accuracy and memory, adapters on top, and refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints import Checkpoint
from support.forwards import logits_of, relative_error
from support.long import LONG
from support.lora_driver import make_driver
from support.lora_reference import Reference

from asyncengine import EngineConfig, InvalidParameter
from asyncengine.execution.models.loading import load_model
from asyncengine.execution.models.memory.needs import read_needs

pytest.importorskip("numba")

IDS = [3, 17, 40, 9, 3, 3, 88]
BOTH = ("int8", "int4")


def load(folder: Path, **fields: Any) -> Any:
    return load_model(str(folder), EngineConfig(show_progress=False, **fields))


ROUNDED = [
    *((name, "int8") for name in ("llama", "qwen3", "gemma", "gemma4", "phi3", "opt-350m", "falcon-h1", "lfm2")),
    *((name, "int4") for name in ("llama", "gemma3", "gpt2", "opt", "nemotron-h")),
]
"""Tied and untied output layers, embeddings that are scaled, projections whose outputs fill no panel."""


@pytest.mark.parametrize(("name", "quantization"), ROUNDED)
def test_every_linear_of_a_model_is_quantized(name: str, quantization: str, checkpoint: Checkpoint) -> None:
    """The output layer in 8 bits, and so with "int4" values and down projections; adapters find the places that they
    find without."""
    model, plain = load(checkpoint(name), quantization=quantization), load(checkpoint(name))
    forms = {form: int(count) for form, count in (entry.split(" x ") for entry in model.fused)}
    assert sum(count for form, count in forms.items() if quantization in form) >= 7
    assert not {"packed", "dense"} & forms.keys()
    assert model.model.head.weight.name == "int8"
    for linear in (linear for layer in model.model.layers for linear in layer.linears()):
        ends = () if linear.transposed else (".v_proj", ".down_proj", ".fc2")
        wide = [part.path.endswith(ends) for part in linear.matrices]
        assert linear.weight.name == " + ".join(dict.fromkeys("int8" if each else quantization for each in wide))
    places = [{path for target in each.model.lora_targets() for path, _ in target.modules} for each in (model, plain)]
    assert places[0] == places[1]
    expected, found = (logits_of(each.model, IDS) for each in (plain, model))
    assert 0 < relative_error(expected, found) < (0.1 if quantization == "int8" else 0.6)


@pytest.mark.parametrize("quantization", BOTH if LONG else BOTH[-1:])
def test_adapters_add_to_the_quantized_product(quantization: str, checkpoint: Checkpoint) -> None:
    """Scores of a prompt with each adapter are near those without quantization, far from another adapter's."""
    pytest.importorskip("peft")
    adapters = Reference("qwen3").adapters[:2]
    scores = []
    for fields in ({}, {"quantization": quantization}):
        driver = make_driver(checkpoint, "qwen3", **fields)
        for slot, adapter in enumerate(adapters, 1):
            driver.lora.write(slot, adapter)
        scores.append(torch.tensor([driver.scores(slot) for slot in range(3)]))
    plain, found = scores
    apart = torch.cdist(plain, found)
    assert apart.argmin(1).tolist() == [0, 1, 2]
    if quantization == "int8":
        assert float(apart.diagonal().max()) < 0.3 * float(apart[0, 1:].min())


@pytest.mark.parametrize(
    ("dtype", "device", "reason"),
    [("float16", "cpu", "not float16"), ("float32", "cuda", "bfloat16 and float16, not float32")],
)
def test_where_it_cannot_be_used(dtype: str, device: str, reason: str, checkpoint: Checkpoint) -> None:
    config = EngineConfig(quantization="int8", dtype=dtype, show_progress=False)
    with pytest.raises(InvalidParameter, match=f"quantization: cannot be used here: .*{reason}"):
        read_needs(str(checkpoint("qwen3")), config, device=torch.device(device))
