"""Faults of one row stay in that row."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.checkpoints import MakeRunner
from support.drive import GREEDY, Driver, prompts
from support.plug_points import Letters
from support.tiny_models import VOCAB

from asyncengine.execution.models.decoder import Decoder
from asyncengine.execution.runner.model_runner import ModelRunner
from asyncengine.execution.runner.pending import OUT_OF_MEMORY
from asyncengine.execution.sampling.sampler import NON_FINITE, NOTHING_ALLOWED
from asyncengine.sampling_params import SamplingParams
from asyncengine.step import Batch

BAD = 7


class Broken(Letters):
    def fill_mask(self, mask: Any) -> None:
        raise RuntimeError("matcher lost its state")


class Poison:
    """A change of a model: the embedding of one token is NaN while it is `on`, whichever way the model runs."""

    def __init__(self, on: bool = True) -> None:
        self.on = on

    def __call__(self, model: Any) -> Any:
        if isinstance(model, Decoder):
            embedding = model.embedding
            model.embedding = lambda ids, adapters: self.spoil(ids, embedding(ids, adapters))  # type: ignore[assignment]
        else:
            table = model.module.get_input_embeddings()
            table.register_forward_hook(lambda _, given, embedded: self.spoil(given[0], embedded))
        return model

    def spoil(self, ids: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        return embedded.masked_fill((ids == BAD)[..., None], float("nan")) if self.on else embedded


@pytest.fixture(params=["llama", "qwen3"])
def poisoned(request: pytest.FixtureRequest, make_runner: MakeRunner) -> ModelRunner:
    """A runner for which one token's embedding is NaN; the second model's output layer is its embedding as well."""
    return make_runner(request.param, Poison())


def test_non_finite_row_ends_alone(poisoned: ModelRunner) -> None:
    driver = Driver(poisoned)
    inputs = [[t for t in prompt if t != BAD] for prompt in prompts([9, 20, 5], VOCAB)]
    expected = [driver.run([driver.job(prompt, 8)])[0] for prompt in inputs]
    jobs = [driver.job(prompt, 8) for prompt in inputs]
    bad = driver.job([5, BAD, 6, 9, 11], 8)
    driver.run([jobs[0], bad, *jobs[1:]])
    assert bad.error == NON_FINITE
    assert bad.output == []
    assert [job.output for job in jobs] == expected


@pytest.mark.parametrize("name", ["llama", "mistral", "gpt-oss"])
def test_pages_of_a_failed_row_do_not_poison_their_next_owner(name: str, make_runner: MakeRunner) -> None:
    poison = Poison(on=False)
    runner = make_runner(name, poison, kv_cache_memory="1MiB")
    driver = Driver(runner)
    good = [t for t in prompts([11], VOCAB)[0] if t != BAD]
    expected = driver.run([driver.job(good, 9)])[0]
    assert BAD not in expected
    poison.on = True
    driver.free = driver.free[:8]
    for _ in range(4):
        driver.run([bad := driver.job([BAD] * 30, 3)])
        assert bad.error == NON_FINITE
        assert driver.run([driver.job(good, 9)])[0] == expected


def test_prompt_scores_of_a_non_finite_row(poisoned: ModelRunner) -> None:
    driver = Driver(poisoned)
    params = SamplingParams(temperature=0.0, prompt_logprobs=True)
    bad, good = driver.job([5, BAD, 6], 2, params), driver.job([5, 9, 6], 2, params)
    driver.run([bad, good])
    assert bad.error == NON_FINITE
    assert len(good.prompt_logprobs) == 2


def test_a_grammar_that_raises(make_runner: MakeRunner) -> None:
    driver = Driver(make_runner("llama"))
    prompt = prompts([6], VOCAB)[0]
    expected = driver.run([driver.job(prompt, 5)])[0]
    broken, fine = driver.job(prompt, 5, grammar=Broken((), 5)), driver.job(prompt, 5)
    driver.run([broken, fine])
    assert "matcher lost its state" in str(broken.error)
    assert broken.output == []
    assert fine.output == expected


def test_a_grammar_masks(make_runner: MakeRunner) -> None:
    driver = Driver(make_runner("llama"))
    prompt = prompts([6], VOCAB)[0]
    allowed = {31, 32, 63, 64, 95, VOCAB - 1}
    free, greedy = driver.job(prompt, 12), driver.job(prompt, 12, grammar=Letters(allowed, 12))
    drawn = driver.job(prompt, 12, SamplingParams(temperature=1.5, top_k=0, top_p=1.0), grammar=Letters(allowed, 12))
    driver.run([free, greedy, drawn])
    assert set(greedy.output) <= allowed
    assert set(drawn.output) <= allowed
    assert len(set(drawn.output)) > 1
    assert not set(free.output) <= allowed


def test_nothing_allowed(make_runner: MakeRunner) -> None:
    driver = Driver(make_runner("llama"))
    prompt = prompts([6], VOCAB)[0]
    sampled = SamplingParams(temperature=1.0, top_k=5, top_p=0.5)
    jobs = [driver.job(prompt, 3, params, grammar=Letters((), 3)) for params in (GREEDY, sampled)]
    fine = driver.job(prompt, 3)
    driver.run([*jobs, fine])
    assert [job.error for job in jobs] == [NOTHING_ALLOWED] * 2
    assert len(fine.output) == 3


def test_a_row_without_its_tokens_is_refused(make_runner: MakeRunner) -> None:
    driver = Driver(make_runner("llama"))
    job = driver.job([5, 6, 7], 1)
    driver.admit(job)
    row = driver.row(job)
    with pytest.raises(ValueError, match="tokens do not cover"):
        driver.runner.launch(Batch(1, (row._replace(num_scheduled=9, pages=[1, 2, 3]),)))
    with pytest.raises(ValueError, match="pages do not cover"):
        driver.runner.launch(Batch(1, (row._replace(pages=[]),)))


class Hungry:
    """A model of which a forward of more than `most` tokens does not fit, as torch says it on each device."""

    def __init__(self, error: Exception) -> None:
        self.most, self.error, self.refused = 10_000, error, 0

    def __call__(self, model: Any) -> Hungry:
        self.model = model
        return self

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def forward(self, ids: Any, *arguments: Any) -> Any:
        if len(ids) > self.most:
            self.refused += 1
            raise self.error
        return self.model.forward(ids, *arguments)


SAYINGS = [
    torch.OutOfMemoryError("CUDA out of memory."),
    RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory: you tried 9 bytes"),
]


@pytest.mark.parametrize("error", SAYINGS)
def test_a_step_that_does_not_fit_is_launched_in_parts(error: Exception, make_runner: MakeRunner) -> None:
    params = SamplingParams(temperature=0.9, top_k=9, logprobs=True, top_logprobs=2, prompt_logprobs=True)
    inputs = prompts([4, 6, 2, 5, 3], VOCAB, seed=4)
    outputs, hungry = [], Hungry(error)
    driver = Driver(make_runner("llama", hungry))
    for hungry.most in (10_000, 7):
        jobs = [driver.job(prompt, 8, params, seed) for seed, prompt in enumerate(inputs)]
        driver.run(jobs)
        assert (hungry.refused > 0) == (hungry.most == 7)
        outputs.append([(job.tokens, [e.token_id for e in job.logprobs], len(job.prompt_logprobs)) for job in jobs])
    assert outputs[0] == outputs[1]


def test_a_request_that_does_not_fit_alone_ends_alone(make_runner: MakeRunner) -> None:
    driver = Driver(make_runner("llama", hungry := Hungry(SAYINGS[0])))
    hungry.most = 7
    jobs = [driver.job(prompt, 2) for prompt in prompts([4, 9, 3], VOCAB, seed=4)]
    for job in jobs:
        driver.admit(job)
    result = driver.execute([driver.row(job) for job in jobs])
    assert result.errors == {1: OUT_OF_MEMORY}
    assert result.tokens[1] == -1
    assert min(result.tokens[0], result.tokens[2]) >= 0


class Guesses:
    """A stand-in for a draft model that guesses nothing, and counts how often it is asked."""

    def __init__(self) -> None:
        self.asked = 0

    def guess(self, batch: Batch) -> Batch:
        self.asked += 1
        return batch

    def close(self) -> None:
        pass


def test_a_step_that_is_launched_in_parts_is_guessed_for_once(make_runner: MakeRunner) -> None:
    """A draft model that is asked again takes what it has just computed for overwritten."""
    driver = Driver(make_runner("llama", hungry := Hungry(SAYINGS[0])))
    hungry.most = 7
    driver.runner.draft_model = guesses = Guesses()  # type: ignore[assignment]
    jobs = [driver.job(prompt, 2) for prompt in prompts([4, 6, 3], VOCAB, seed=4)]
    for job in jobs:
        driver.admit(job)
    assert not driver.execute([driver.row(job) for job in jobs]).errors
    assert (guesses.asked, hungry.refused) == (1, 2)


def test_another_error_is_not_taken_for_want_of_memory(make_runner: MakeRunner) -> None:
    error = RuntimeError("CUDA error: an illegal memory access")
    driver = Driver(make_runner("llama", hungry := Hungry(error)))
    hungry.most = 0
    with pytest.raises(RuntimeError, match="illegal"):
        driver.run([driver.job([3, 4], 2)])
