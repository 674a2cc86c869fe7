"""Decode steps as graphs, with a stand-in for CUDA's: padding, fixed memory, what runs without, adapters.

The stand-in calls the captured work again at each replay and copies the result to where it was, so whatever the work
reads from fixed memory is current and whatever it closed over is what it was at capture.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.drive import Driver, prompts
from support.lora_driver import AdapterDriver
from support.lora_reference import random_weights
from support.tiny_models import VOCAB
from support.wide_models import make_wide

from asyncengine import SamplingParams
from asyncengine.execution.runner.graphs import graph_sizes
from asyncengine.execution.runner.model_runner import ModelRunner
from asyncengine.execution.sampling.sampler import NON_FINITE
from asyncengine.lora.layers.slots import LoraLayers

from .graphs import Recall, on_fakes
from .step_sampler import sample_in_graphs

SIZES = [1, 2, 4, 8]
ENDS = ("q_proj", "down_proj")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_wide("qwen2", tmp_path_factory.mktemp("graphs") / "qwen2")


def test_sizes() -> None:
    assert graph_sizes(1) == [1]
    assert graph_sizes(6) == [1, 2, 4, 6]
    assert graph_sizes(20) == [1, 2, 4, 8, 16, 20]
    assert graph_sizes(1000)[-3:] == [240, 248, 256]


def test_steps_that_no_graph_holds_run_without(folder: Path) -> None:
    runner = on_fakes(folder)
    capture = Recall()
    runner.use_graphs([1, 2, 4], capture)
    driver = Driver(runner)
    scored = SamplingParams(temperature=0.0, logprobs=True, top_logprobs=2, prompt_logprobs=True)
    driver.run([driver.job(prompt, 3) for prompt in prompts([2, 3, 4, 5, 6], VOCAB)])
    assert capture.replays == []  # five rows
    (job,) = (driver.job(prompt, 4, scored) for prompt in prompts([7], VOCAB))
    driver.run([job], 1)
    assert len(job.prompt_logprobs) == 6
    assert len(job.logprobs) == 4
    assert capture.replays == [1] * 4  # steps that score a prompt position run without


def test_padding_rows_leave_the_token_of_slot_0_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Padding rows choose a token, too, where graphs sample."""
    sample_in_graphs(monkeypatch)
    runner, capture = on_fakes(folder), Recall()
    runner.use_graphs([4], capture)
    assert runner.graphs is not None
    driver = Driver(runner)
    driver.slots = [3, 2, 1]
    for job in (jobs := [driver.job(prompt, 4) for prompt in prompts([5, 8, 6], VOCAB)]):
        driver.admit(job)
    driver.advance(jobs)
    runner.graphs.last_token[0] = VOCAB
    driver.advance(jobs)
    assert capture.replays == [4]
    assert runner.graphs.last_token[0].item() == VOCAB


@pytest.mark.parametrize("penalized", [(), (0, 2)])
def test_the_row_without_finite_logits_ends_alone(
    penalized: tuple[int, ...], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its largest logit comes with the tokens from the device, be it the graph's or that of processed logits."""
    sample_in_graphs(monkeypatch)
    runner, capture, bad = on_fakes(folder), Recall(), 7
    forward = runner.model.forward

    def spoiled(ids: torch.Tensor, *arguments: Any) -> torch.Tensor:
        logits = forward(ids, *arguments)
        return logits.masked_fill((ids == bad)[:, None], float("nan")) if len(ids) == len(logits) else logits

    monkeypatch.setattr(runner.model, "forward", spoiled)
    runner.use_graphs(SIZES, capture)
    driver = Driver(runner)
    for place in range(3):
        inputs = [[token for token in prompt if token != bad] for prompt in prompts([5, 8, 6], VOCAB)]
        params = [SamplingParams(temperature=0.0, repetition_penalty=1.0 + (row in penalized)) for row in range(3)]
        jobs = [driver.job(*each) for each in zip(inputs, [3] * 3, params, strict=True)]
        for job in jobs:
            driver.admit(job)
        driver.advance(jobs)
        jobs[place].tokens[-1] = bad
        driver.advance(jobs)
        assert [job.error for job in jobs] == [NON_FINITE if row == place else None for row in range(3)]
        for job in jobs:
            driver.release(job)
    assert capture.replays.count(4) == 3


def adapted(runner: ModelRunner, lora: LoraLayers) -> list[list[int]]:
    """Outputs of five rows under slots 0, 1, 2, 1, 0, in turns with steps of base rows only; then with another rank."""
    lora.write(1, random_weights(lora, 4, ENDS, seed=1))
    lora.write(2, random_weights(lora, 8, ENDS, seed=2))
    outputs = []
    for turn in range(3):
        driver = AdapterDriver(runner, lora)
        slots = [0, 1, 2, 1, 0] if turn != 1 else [0] * 5
        inputs = prompts([3, 9, 6, 1, 4], VOCAB)
        outputs += driver.run([driver.with_adapter(*each, 8) for each in zip(inputs, slots, strict=True)])
        if turn == 1:
            lora.write(2, random_weights(lora, 20, ENDS, seed=3))  # takes new memory: what was captured reads the old
    return outputs


def with_and_without(folder: Path, capture: Recall) -> tuple[list[list[int]], list[list[int]]]:
    """`adapted` on a runner that uses graphs, and on one that does not."""
    outputs = []
    for graphs in (True, False):
        kept: list[LoraLayers] = []

        def install(module: Any, kept: list[LoraLayers] = kept) -> LoraLayers:
            kept.append(LoraLayers(module, 3, 32, masked=True))
            return kept[0]

        runner = on_fakes(folder, install)
        if graphs:
            runner.use_graphs(SIZES, capture)
        outputs.append(adapted(runner, kept[0]))
    return outputs[0], outputs[1]


def test_adapters_in_graphs(folder: Path) -> None:
    capture = Recall()
    found, wanted = with_and_without(folder, capture)
    assert found == wanted
    assert capture.captured[len(SIZES) :] == [8, 8], "when first needed, and again after the memory moved"
    assert len(capture.replays) > 15
    first, base, second = (found[place : place + 5] for place in (0, 5, 10))
    assert [a == b for a, b in zip(first, base, strict=True)] == [True, False, False, False, True]
    assert [a == b for a, b in zip(first, second, strict=True)] == [True, True, False, True, True]
