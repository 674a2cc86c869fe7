"""Adapters in short steps: all layers in one call, the bits of layer by layer, and no neighbour's answer changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.checkpoints import Checkpoint
from support.drive import prompts
from support.lora_driver import AdapterDriver, make_driver
from support.lora_reference import Weights, random_weights
from support.tiny_models import VOCAB

from asyncengine.execution.layers.recorded import MOST_TOKENS, RecordedLayers
from asyncengine.sampling_params import SamplingParams

pytest.importorskip("numba")
HEADS = ("q_proj", "k_proj", "v_proj")
MANY = ("q_proj", "o_proj", "up_proj", "down_proj", "lm_head", "embed_tokens")
PARAMS = SamplingParams(temperature=0.0, logprobs=True, top_logprobs=3)


@pytest.fixture(autouse=True)
def in_panels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let weights lie in panels, whatever the CPU that runs the tests is best at."""
    from asyncengine.kernels.cpu import packed

    monkeypatch.setattr(packed, "packing_pays", lambda dtype: True)


def make(checkpoint: Checkpoint, name: str = "qwen3", **fields: Any) -> AdapterDriver:
    driver = make_driver(checkpoint, name, max_rank=16, **fields)
    driver.lora.write(1, random_weights(driver.lora, 5, MANY))
    driver.lora.write(2, random_weights(driver.lora, 12, "layers.1.self_attn.v_proj"))
    driver.lora.write(4, random_weights(driver.lora, 3, "_proj"))
    return driver


def run(driver: AdapterDriver, slots: list[int]) -> list[Any]:
    """Each row's tokens and logprobs."""
    inputs = prompts([5, 13, 1, 9], VOCAB)
    jobs = [driver.with_adapter(inputs[index % 4], slot, 8, PARAMS) for index, slot in enumerate(slots)]
    outputs = driver.run(jobs, 16)
    return [(output, job.logprobs) for output, job in zip(outputs, jobs, strict=True)]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens of every step with adapters that went through all layers in one call."""
    taken: list[int] = []
    own = RecordedLayers.__call__

    def counted(self: RecordedLayers, h: torch.Tensor, step: Any, *more: Any) -> torch.Tensor | None:
        found = own(self, h, step, *more)
        if step.adapters is not None and found is not None:
            taken.append(len(h))
        return found

    monkeypatch.setattr(RecordedLayers, "__call__", counted)
    return taken


@pytest.mark.parametrize(
    ("name", "fields"),
    [("qwen3", {}), ("qwen3", {"dtype": "bfloat16"}), ("qwen3", {"quantization": "int8"}), ("dots1", {}),
     ("falcon-h1", {"dtype": "bfloat16"})],
)  # fmt: skip
def test_the_bits_of_layer_by_layer(
    name: str, fields: dict[str, Any], checkpoint: Checkpoint, calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Adapters are also on experts that all rows share, and on a state beside attention."""
    driver = make(checkpoint, name, **fields)
    slots = [4, 0, 1, 2, 0, 1]
    recorded = run(driver, slots)
    assert len(calls) >= 7
    assert max(calls) <= MOST_TOKENS
    assert run(driver, [0] * 6) != recorded, "adapters change something"
    monkeypatch.setattr(RecordedLayers, "__call__", lambda *_: None)
    calls.clear()
    assert run(driver, slots) == recorded
    assert not calls


def test_rows_without_an_adapter_keep_their_bits(checkpoint: Checkpoint, calls: list[int]) -> None:
    driver = make(checkpoint)
    base = run(driver, [0] * 4)
    assert not calls
    mixed = run(driver, [4, 0, 1, 0])
    assert calls
    assert [mixed[1], mixed[3]] == [base[1], base[3]]
    assert mixed[0] != base[0]
    assert mixed[2] != base[2]


def test_memory_that_moves_is_found(checkpoint: Checkpoint, calls: list[int]) -> None:
    """A stack grows, another one comes later, and a step has more rows than ever before."""
    driver = make(checkpoint)
    before = run(driver, [4, 2])
    driver.lora.write(3, random_weights(driver.lora, 16, HEADS))
    assert run(driver, [4, 2]) == before
    found = run(driver, [3])
    assert run(driver, [4, 2, 3, 3, 3, 3])[:2] == before
    fresh = make_driver(checkpoint, "qwen3", max_rank=16)
    fresh.lora.write(1, random_weights(fresh.lora, 16, HEADS))
    assert run(fresh, [1]) == found
    assert calls


def test_an_emptied_slot_is_not_read(checkpoint: Checkpoint, calls: list[int]) -> None:
    driver = make(checkpoint)
    base = run(driver, [0])
    driver.lora.write(4, Weights({}))
    assert run(driver, [4]) == base
    assert calls
