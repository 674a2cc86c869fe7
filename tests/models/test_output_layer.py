"""The compiled output layer equals the linear it replaces, shares its weight, and hands out memory that stays valid."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.checkpoints import Checkpoint, MakeRunner
from support.drive import Driver, greedy_reference, prompts
from support.tiny_models import VOCAB, make_model
from torch import nn

from asyncengine.config import EngineConfig
from asyncengine.models import output_layer
from asyncengine.models.loading import load_model
from asyncengine.models.output_layer import OutputLayer, ReusedMemory, faster_output_layer

pytest.importorskip("numba")


def linear(outputs: int, inputs: int, dtype: torch.dtype = torch.float32, bias: bool = False) -> nn.Linear:
    made = nn.Linear(inputs, outputs, bias=bias, dtype=dtype)
    return made.requires_grad_(False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
def test_equals_the_linear(dtype: torch.dtype, bias: bool) -> None:
    head = linear(101, 64, dtype, bias)
    faster = faster_output_layer(head, dtype)
    assert faster is not None
    assert faster.weight is head.weight
    for rows in (1, 3, 9, 33):
        x = torch.randn(1, rows, 64).to(dtype)
        found = faster(x)
        expected = nn.functional.linear(x.double(), head.weight.double(), head.bias.double() if bias else None)
        assert found.dtype == torch.float32
        assert found.shape == expected.shape
        assert torch.allclose(found.double(), expected, rtol=1e-4, atol=1e-4)


def test_more_rows_than_pay_go_through_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    head = linear(20, 64, torch.bfloat16)
    faster = OutputLayer(head.weight, None)
    monkeypatch.setattr(faster._products, "product_pays", lambda dtype, rows: False)
    x = torch.randn(3, 64).bfloat16()
    assert torch.equal(faster(x), head(x).float())


@pytest.mark.parametrize(
    "head", [linear(8, 40, torch.float16), linear(8, 41), linear(3, 64), nn.Identity(), linear(8, 64).to("meta")]
)
def test_left_alone(head: Any) -> None:
    assert faster_output_layer(head, getattr(getattr(head, "weight", None), "dtype", torch.float32)) is None


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_layer, "compiler_missing", lambda dtype, device: "none here")
    assert faster_output_layer(linear(8, 64), torch.float32) is None


def test_a_compiler_that_fails_is_no_reason_to_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("unknown CPU")

    from asyncengine.cpu import products

    monkeypatch.setattr(products, "product", fail)
    assert faster_output_layer(linear(8, 64), torch.float32) is None


def test_memory_is_reused_only_when_nobody_holds_it() -> None:
    memory = ReusedMemory()
    first = memory.take((2, 8))
    address = first.data_ptr()
    part = first[None][0][1:]
    del first
    second = memory.take((2, 8))
    assert second.data_ptr() != address
    del part
    address = second.data_ptr()
    del second
    assert memory.take((1, 2, 7)).data_ptr() == address


def test_memory_without_torchs_counter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_layer, "_use_count", None)
    memory = ReusedMemory()
    first = memory.take((2, 8)).fill_(1)
    memory.take((2, 8)).fill_(2)
    assert (first == 1).all()


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "gpt2"])
def test_in_a_model(name: str, checkpoint: Checkpoint, make_runner: MakeRunner) -> None:
    """Tied or not, with and without soft-capping; the embedding is still the same memory where it was."""
    model = load_model(str(checkpoint(name)), EngineConfig())
    assert "output_layer x 1" in model.fused
    head, table = model.module.get_output_embeddings(), model.module.get_input_embeddings()
    assert (head.weight.data_ptr() == table.weight.data_ptr()) == model.hf_config.tie_word_embeddings
    prompt = prompts([9], VOCAB)[0]
    driver = Driver(make_runner(name))
    assert driver.run([driver.job(prompt, 12)])[0] == greedy_reference(make_model(name), prompt, 12)
