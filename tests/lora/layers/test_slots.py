"""Slots of adapters in one family of models: what fits, what memory is taken, what a step may use."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.checkpoints import Checkpoint
from support.device_modes import FailOnce
from support.drive import prompts
from support.lora_driver import make_driver
from support.lora_reference import LENGTHS, WANT, Reference, Weights
from support.tiny_models import VOCAB

from asyncengine.errors import AdapterError, InvariantViolation
from asyncengine.lora.layers.slots import StepAdapters

pytest.importorskip("peft")


@pytest.fixture(scope="module")
def llama() -> Reference:
    return Reference("llama")


@pytest.mark.parametrize("field", ["a", "b"])
def test_what_does_not_fit_is_refused_and_changes_nothing(field: str, llama: Reference, checkpoint: Checkpoint) -> None:
    driver = make_driver(checkpoint, "llama", max_rank=4)
    driver.lora.write(1, llama.adapters[0])
    before, taken = driver.scores(1), driver.lora.nbytes
    path, good = list(llama.adapters[0].modules.items())[-1]
    value = getattr(good, field)
    for bad, message in (
        ({path: replace(good, **{field: value[:, :-1]})}, "maps"),
        ({path: replace(good, **{field: value.half()})}, "must be in the model's"),
        ({path: replace(good, embedding=True)}, "kind of module"),
        ({"model.layers.9.mlp.up_proj": good}, "no such module"),
        (llama.adapters[1].modules, "max_lora_rank"),
    ):
        with pytest.raises(AdapterError, match=message):
            driver.lora.write(1, Weights({**llama.adapters[0].modules, **bad}))
    with pytest.raises(InvariantViolation):
        driver.lora.write(0, llama.adapters[0])
    assert (driver.scores(1), driver.lora.nbytes) == (before, taken)


def test_a_write_that_runs_out_of_memory_leaves_the_slot_empty(llama: Reference, checkpoint: Checkpoint) -> None:
    """The adapter that gets the slot next may have fewer modules than the one that did not fit."""
    driver = make_driver(checkpoint, "llama", max_rank=8)
    driver.lora.allocate(driver.lora.modules)
    path, factors = next(iter(llama.adapters[0].modules.items()))
    driver.lora.write(1, Weights({path: factors}))
    alone = driver.scores(1)
    counting = FailOnce(0)
    with counting:
        driver.lora.write(2, llama.adapters[0])
    for at in (counting.seen // 2, counting.seen):
        with pytest.raises(torch.OutOfMemoryError), FailOnce(at):
            driver.lora.write(2, llama.adapters[0])
        with pytest.raises(InvariantViolation, match="slot 2, which is empty"):
            driver.scores(2)
        driver.lora.write(2, Weights({path: factors}))
        assert driver.scores(2) == alone


def test_memory_is_taken_for_targets_only(llama: Reference, checkpoint: Checkpoint) -> None:
    driver = make_driver(checkpoint, "llama")
    assert driver.lora.nbytes == 0
    path = "model.layers.1.self_attn.o_proj"
    driver.lora.allocate([path])
    taken = driver.lora.nbytes
    assert taken == 8 * 8 * sum(driver.lora.modules[path][:2]) * 4
    driver.lora.write(6, Weights({path: llama.adapters[0].modules[path]}))
    assert driver.lora.nbytes == taken
    assert driver.scores(6) != driver.scores(0)


def test_adapters_of_a_configuration_take_memory_for_what_they_change(llama: Reference, checkpoint: Checkpoint) -> None:
    """A GPU launches nothing for the other products."""
    driver = make_driver(checkpoint, "llama")
    first, second = "model.layers.0.self_attn.o_proj", "model.layers.1.mlp.down_proj"
    driver.lora.allocate((first, second), 8)
    taken, moved = driver.lora.nbytes, driver.lora.version
    assert taken == 8 * 8 * 4 * sum(sum(driver.lora.modules[path][:2]) for path in (first, second))
    for path in (first, second):
        driver.lora.write(1, Weights({path: llama.adapters[0].modules[path]}))
    assert (driver.lora.nbytes, driver.lora.version) == (taken, moved)


@pytest.mark.parametrize("masked", [False, True])
def test_memory_follows_the_largest_rank_there_is(masked: bool, llama: Reference, checkpoint: Checkpoint) -> None:
    path = "model.layers.1.self_attn.k_proj"
    driver = make_driver(checkpoint, "llama", max_rank=100, masked=masked)
    small = Weights({path: llama.adapters[4].modules[path]})
    weights = llama.adapters[0].modules[path]
    large = Weights({path: replace(weights, a=weights.a.repeat(5, 1), b=weights.b.repeat(1, 5))})
    driver.lora.write(3, small)
    before, taken = driver.scores(3), driver.lora.nbytes
    driver.lora.allocate([path], rank=8)
    assert driver.lora.nbytes == taken
    driver.lora.write(4, large)  # rank 20
    assert driver.lora.nbytes == taken * 3
    assert driver.scores(3) == pytest.approx(before, abs=1e-6), "what was there moved along"
    fresh = make_driver(checkpoint, "llama", max_rank=100, masked=masked)
    fresh.lora.allocate([path])
    assert fresh.lora.nbytes == taken * 13
    fresh.lora.write(1, large)
    assert driver.scores(4) == pytest.approx(fresh.scores(1), abs=1e-6)
    assert driver.scores(4) != before


def test_decoding_from_fixed_memory(llama: Reference, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CUDA graph captures the same work whatever slots stand in the memory it reads; padding has none."""
    driver = make_driver(checkpoint, "llama", masked=True)
    lora, begin = driver.lora, driver.lora.begin
    for slot, adapter in ((1, llama.adapters[0]), (3, llama.adapters[1])):
        moved = lora.version
        lora.write(slot, adapter)
        assert (lora.version > moved) == (slot == 1)
    with pytest.raises(InvariantViolation, match="slot 2"):
        lora.check_slots([0, 1, 2])
    seen = Counter[int]()

    def begin_as_graph(slots: Sequence[int], counts: Any, logit_rows: torch.Tensor) -> StepAdapters:
        if counts.max() > 1 or len(logit_rows) < len(counts):
            return begin(slots, counts, logit_rows)
        seen[len(slots)] += 1
        return lora.begin_fixed(torch.tensor(slots) - 1)

    monkeypatch.setattr(lora, "begin", begin_as_graph)
    assert driver.answers([3, 0, 1]) == [llama.outputs[1], llama.base, llama.outputs[0]]
    assert seen.total() >= WANT - 1


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_close(dtype: str, llama: Reference, checkpoint: Checkpoint) -> None:
    exact, rounded = (make_driver(checkpoint, "llama", dtype=name) for name in ("float32", dtype))
    for driver in (exact, rounded):
        driver.lora.write(2, llama.adapters[1].to(driver.lora.dtype))
    differences = [abs(left - right) for left, right in zip(exact.scores(2), rounded.scores(2), strict=True)]
    assert 0 < max(differences) < 0.3


def test_one_adapter_that_overflows_harms_nobody_else(llama: Reference, checkpoint: Checkpoint) -> None:
    driver = make_driver(checkpoint, "llama")
    linears = {path: each for path, each in llama.adapters[1].modules.items() if not each.embedding}
    huge = {path: replace(each, a=each.a.sign() * 3e38) for path, each in linears.items()}
    driver.lora.write(1, llama.adapters[0])
    driver.lora.write(2, Weights(huge))
    prompt = prompts(LENGTHS, VOCAB)[1]
    jobs = [driver.with_adapter(prompt, slot) for slot in (1, 2, 0)]
    driver.run(jobs)
    assert jobs[1].error is not None
    assert (jobs[0].output, jobs[2].output) == (llama.outputs[0][1], llama.base[1])
