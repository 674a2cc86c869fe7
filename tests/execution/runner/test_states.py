"""Recurrent states from the scheduler's books to the memory they name: a step that fails moves none twice."""

from __future__ import annotations

import random
from collections import deque
from typing import Any

import pytest
import torch
from support.device_modes import FailOnce

from asyncengine.config import EngineConfig
from asyncengine.execution.runner.model_runner import ModelRunner
from asyncengine.kvcache import KVCache
from asyncengine.request_spec import RequestSpec
from asyncengine.sampling_params import SamplingParams
from asyncengine.scheduler import Scheduler
from asyncengine.seams import StepHandle

from .leaky_model import VOCAB, leaky_runner

GREEDY = SamplingParams(temperature=0.0)


class Served:
    """Requests through a scheduler and a runner, without an engine."""

    def __init__(self, runner: ModelRunner, **settings: Any) -> None:
        self.runner = runner
        self.config = EngineConfig(page_size=runner.page_size, **settings)
        self.kv = KVCache(
            runner.num_pages, runner.page_size, prefix_caching=self.config.prefix_caching, num_states=runner.num_states
        )
        self.scheduler = Scheduler(self.config, self.kv)
        self.answers: dict[int, list[int]] = {}
        self.reasons: dict[int, str] = {}
        self.last = 0

    def add(self, prompt: list[int]) -> None:
        self.last += 1
        self.scheduler.apply(RequestSpec(self.last, tuple(prompt), GREEDY, len(prompt) + 12))
        self.answers[self.last] = []

    def run(self) -> list[list[int]]:
        flying: deque[StepHandle] = deque()
        while self.scheduler.requests or flying:
            batch = self.scheduler.schedule(0.0) if len(flying) < (self.config.max_steps_in_flight or 1) else None
            if batch is not None:
                flying.append(self.runner.launch(batch))
            elif flying:
                self.scheduler.commit(flying.popleft().wait(), 0.0)
            self.scheduler.check()
            for output in self.scheduler.take_outputs():
                self.answers[output.ticket] += [output.token] * (output.token >= 0)
                if output.reason is not None:
                    self.reasons[output.ticket] = output.reason
        self.scheduler.check_sums()
        assert set(self.reasons.values()) <= {"length"}
        return list(self.answers.values())


def conversations() -> list[list[int]]:
    chance = random.Random(4)
    shared = [chance.randrange(VOCAB) for _ in range(22)]
    return [
        shared[: chance.choice([0, 9, 22])] + [chance.randrange(VOCAB) for _ in range(1 + 3 * i)] for i in range(10)
    ]


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    """Each alone, its prompt in one piece, nothing cached."""
    runner = leaky_runner()
    answers = []
    for prompt in conversations():
        served = Served(runner, prefix_caching=False)
        served.add(prompt)
        answers += served.run()
    runner.close()
    assert len({token for answer in answers for token in answer}) > 20
    return answers


@pytest.mark.parametrize("depth", [1, 2])
def test_a_step_that_runs_out_of_memory_moves_no_state_twice(depth: int, expected: list[list[int]]) -> None:
    """Memory runs out in the middle of its layers, or behind them: some rows have moved their states by then."""
    runner = leaky_runner()
    failures = 0
    for at in range(3, 120, 15):
        served = Served(runner, max_steps_in_flight=depth, max_num_batched_tokens=24)
        launch, step = runner.launch_once, 0

        def failing(batch: Any, launch: Any = launch, at: int = at) -> Any:
            nonlocal step, failures
            step += 1
            if step not in (3, 9):
                return launch(batch)
            with FailOnce(at) as mode:
                try:
                    return launch(batch)
                except torch.OutOfMemoryError:
                    failures += 1
                    raise
                finally:
                    assert mode.seen

        runner.launch_once = failing  # type: ignore[method-assign]
        for prompt in conversations():
            served.add(prompt)
        try:
            assert served.run() == expected, f"after a failure of operation {at}"
        finally:
            runner.launch_once = launch  # type: ignore[method-assign]
        assert served.scheduler.counters.preemptions
    assert failures > 9
    runner.close()
