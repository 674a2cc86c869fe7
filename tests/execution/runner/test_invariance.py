"""A request's tokens do not depend on its company, on chunking, on where its pages lie or on a cached prefix."""

from __future__ import annotations

import random

import pytest
from support.checkpoints import MakeRunner
from support.drive import GREEDY, Driver, Job, prompts
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


def test_seeds_differ(runner: ModelRunner) -> None:
    driver = Driver(runner)
    prompt = prompts([9], VOCAB)[0]
    outputs = driver.run([driver.job(prompt, 12, PLAIN, seed) for seed in (1, 2, 1 << 32, 2**64 - 1)])
    assert len({tuple(output) for output in outputs}) == 4


@pytest.mark.parametrize("kind", KINDS)
def test_prefix_filled_by_another_request(runner: ModelRunner, kind: str) -> None:
    """The second request starts at a page boundary, on pages that only the first one ever computed."""
    prompt = prompts([30], VOCAB, seed=5)[0]
    driver = Driver(runner)
    first, alone = driver.job(prompt, 8, KINDS[kind], 4), driver.job(prompt, 8, KINDS[kind], 4)
    driver.run([alone])
    for cached in (4, 28):
        driver.admit(first)
        while not first.done:
            driver.advance([first])
        second = driver.job(prompt, 8, KINDS[kind], 4)
        shared = first.pages[: cached // runner.page_size]
        second.pages, second.computed = list(shared), cached
        driver.admit(second)
        while not second.done:
            driver.advance([second], chunk=5)
        assert second.output == alone.output
        second.pages = second.pages[len(shared) :]
        driver.release(second)
        driver.release(first)
        del first.tokens[len(prompt) :]


def run_overlapped(driver: Driver, jobs: list[Job]) -> None:
    """Two steps in flight: each step is launched before the tokens of the one before it are known to the rows."""
    for job in jobs:
        driver.admit(job)
    driver.advance(jobs)
    withheld = [job.tokens.pop() for job in jobs]
    while any(len(job.output) + 1 < job.want for job in jobs):
        rows = []
        for job in jobs:
            job.tokens.append(-1)  # for the count only; the row below must not carry it
            row = driver.row(job)
            job.tokens.pop()
            rows.append(row._replace(in_flight=True, tokens=job.tokens))
        result = driver.execute(rows)
        assert not result.errors
        for index, job in enumerate(jobs):
            job.tokens.append(withheld[index])
            withheld[index] = result.tokens[index]
            job.computed += 1
    for job, token in zip(jobs, withheld, strict=True):
        job.tokens.append(token)


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_in_flight(runner: ModelRunner, kind: str) -> None:
    driver = Driver(runner)
    inputs = prompts([3, 17, 8], VOCAB, seed=8)
    expected = driver.run([driver.job(prompt, 15, KINDS[kind], 6) for prompt in inputs])
    jobs = [driver.job(prompt, 15, KINDS[kind], 6) for prompt in inputs]
    run_overlapped(driver, jobs)
    assert [job.output for job in jobs] == expected


def test_page_list_replaced(runner: ModelRunner) -> None:
    """The scheduler may swap a request's page list for another with the same contents elsewhere."""
    prompt = prompts([13], VOCAB, seed=9)[0]
    driver = Driver(runner)
    expected = driver.run([driver.job(prompt, 10)])[0]
    twin, job = driver.job(prompt, 10), driver.job(prompt, 10)
    for each in (twin, job):
        driver.admit(each)
    while not job.done:
        driver.advance([twin, job])
        full = job.computed // runner.page_size
        job.pages = twin.pages[:full] + job.pages[full:]
    assert job.output == expected
