"""Adapters in slots answer like peft over transformers, whoever shares the batch; without them nothing changes."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from support.checkpoints import Checkpoint
from support.lora_driver import AdapterDriver, make_driver
from support.lora_reference import Reference, Weights
from torch.utils._python_dispatch import TorchDispatchMode

from asyncengine.errors import InvariantViolation

pytest.importorskip("peft")

FAMILIES = ["gpt2", "gemma4", "opt-350m", "falcon-40b"]
"""Families with transposed matrices, with scales and towers, and with projections; plain ones and those with experts
are compared through whole engines (tests/lora/test_engine_equals_peft.py)."""


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def reference(family: str) -> Reference:
    return Reference(family)


@pytest.fixture(scope="module")
def driver(family: str, reference: Reference, checkpoint: Checkpoint) -> AdapterDriver:
    """All eight adapters, in slots 1 to 8."""
    made = make_driver(checkpoint, family)
    for slot, adapter in enumerate(reference.adapters, 1):
        made.lora.write(slot, adapter)
    return made


def test_every_linear_and_the_embedding_can_be_changed(
    family: str, reference: Reference, driver: AdapterDriver
) -> None:
    modules = driver.lora.modules
    assert sorted(modules) == sorted(reference.targets)
    for path, weights in reference.adapters[0].modules.items():
        assert modules[path][:2] == (weights.a.shape[1], weights.b.shape[0])
        assert (modules[path].kind == "embedding") == weights.embedding
        assert (modules[path].kind == "conv1d") == (family == "gpt2" and "h." in path)
        assert (modules[path].scale != 1) == (family.startswith("gemma") and weights.embedding)


def test_eight_adapters_and_the_base_in_one_batch(
    reference: Reference, driver: AdapterDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    slots = [3, 0, 1, 2, 8, 4, 7, 5, 6]
    expected = [reference.base if slot == 0 else reference.outputs[slot - 1] for slot in slots]
    assert len({str(outputs) for outputs in expected}) == 9, "equality means something"
    for chunk in (None, 1, 7):
        assert driver.answers(slots, chunk) == expected, f"chunk {chunk}"
    for slot in (0, 1, 8):
        assert driver.answers([slot]) == [expected[slots.index(slot)]], "alone"
    assert driver.answers(slots, 7, preempt_every=5) == expected
    for length in (1, 2, 100):
        monkeypatch.setattr("asyncengine.lora.layers.stack.LONG_ADAPTER_RUN", length)
        driver.lora._known.clear()
        assert driver.answers(slots, 16) == expected, f"products for segments from {length} rows on"


def test_a_cleared_slot_leaves_nothing(family: str, reference: Reference, checkpoint: Checkpoint) -> None:
    driver = make_driver(checkpoint, family)
    before = driver.scores(0)
    for slot in (2, 3):
        driver.lora.write(slot, reference.adapters[slot])
    changed = driver.scores(2)
    assert changed != before
    driver.lora.clear(2)
    with pytest.raises(InvariantViolation, match="slot 2"):
        driver.lora.begin([2], np.array([1]), torch.tensor([0]))
    assert driver.scores(0) == before
    driver.lora.write(2, Weights({}))
    assert driver.scores(2) == before, "an adapter that changes nothing, in a slot that had one"
    taken = driver.lora.nbytes
    driver.lora.write(2, reference.adapters[2])
    assert driver.scores(2) == changed
    driver.lora.write(2, reference.adapters[4])  # replaced by a smaller rank without clearing first
    driver.lora.write(5, reference.adapters[4])
    assert driver.scores(2) == pytest.approx(driver.scores(5), abs=1e-6)
    assert driver.lora.nbytes == taken


class Operators(TorchDispatchMode):
    """Counts every operator that runs."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


def test_a_step_without_adapters_runs_no_other_operator(
    family: str, reference: Reference, checkpoint: Checkpoint
) -> None:
    def operators(driver: AdapterDriver, slot: int) -> Counter[str]:
        with Operators() as seen:
            driver.run([driver.with_adapter([3, 4, 5], slot, 2)])
        return seen.counts

    driver = make_driver(checkpoint, family)
    operators(driver, 0)  # the first step of all makes the sampler's buffers
    plain = operators(driver, 0)
    driver.lora.write(1, reference.adapters[0])
    assert operators(driver, 0) == plain
    assert operators(driver, 1).total() > plain.total()
    assert operators(driver, 0) == plain, "after a step with one"
