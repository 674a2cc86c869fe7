"""A request's tokens do not depend on its company, on chunking or on preemption."""

from __future__ import annotations

import random

import pytest
from support.checkpoints import MakeRunner
from support.drive import GREEDY, Driver, prompts
from support.tiny_models import VOCAB

from asyncengine.execution.runner.model_runner import ModelRunner
from asyncengine.sampling_params import SamplingParams

SAMPLED = SamplingParams(temperature=0.9, top_p=0.95, top_k=40, min_p=0.01, repetition_penalty=1.1)
PLAIN = SamplingParams(temperature=1.0, top_p=1.0, top_k=0)
KINDS = {"greedy": GREEDY, "sampled": SAMPLED, "plain": PLAIN}


@pytest.fixture(scope="module", params=["llama", "gemma2", "qwen3moe"])
def runner(request: pytest.FixtureRequest, make_runner: MakeRunner) -> ModelRunner:
    return make_runner(request.param)


def test_one_answer_in_twenty_trials(runner: ModelRunner) -> None:
    """Contract: alone, in batches of up to 64, with any chunk size, preempted or not, every answer is the same."""
    want, seed = 10, 2**63 + 12345
    prompt = prompts([19], VOCAB, seed=3)[0]
    chance = random.Random(7)
    driver = Driver(runner)
    answers: dict[str, set[tuple[int, ...]]] = {kind: set() for kind in KINDS}
    for trial in range(20):
        size = [1, 2, 3, 61, 8, 16, 33][trial % 7]
        others = [
            driver.job(other, chance.randrange(1, 5), chance.choice(list(KINDS.values())), trial)
            for other in prompts([chance.randrange(1, 24) for _ in range(size - 1)], VOCAB, seed=trial)
        ]
        tested = {kind: driver.job(prompt, want, params, seed) for kind, params in KINDS.items()}
        batches = [[job] for job in tested.values()] if size == 1 else [[*tested.values(), *others]]
        for jobs in batches:
            chance.shuffle(jobs)
            driver.run(jobs, chunk=[None, 1, 7, 16][trial // 5], preempt_every=6 if trial % 3 == 0 else None)
        for kind, job in tested.items():
            answers[kind].add(tuple(job.output))
    assert {kind: len(outputs) for kind, outputs in answers.items()} == dict.fromkeys(KINDS, 1)
