"""Log-probabilities equal those of transformers' logits, for outputs and prompts, in any chunking."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from support.checkpoints import MakeRunner
from support.drive import Driver, prompts
from support.forwards import transformers_logits
from support.tiny_models import VOCAB, make_model

from asyncengine.execution.sampling import sampler
from asyncengine.execution.sampling.logprobs import token_logprobs
from asyncengine.sampling_params import SamplingParams

from . import reference_sampler


@pytest.mark.parametrize("name", ["llama", "gemma2"])
@pytest.mark.parametrize("chunk", [None, 1, 5])
def test_against_transformers(name: str, chunk: int | None, make_runner: MakeRunner) -> None:
    driver = Driver(make_runner(name))
    params = SamplingParams(
        temperature=0.7, top_k=5, repetition_penalty=1.3, logprobs=True, top_logprobs=4, prompt_logprobs=True
    )
    inputs = prompts([14, 3, 1], VOCAB, seed=2)
    jobs = [driver.job(prompt, 6, params, seed) for seed, prompt in enumerate(inputs)]
    silent = driver.job(inputs[0], 6)
    driver.run([jobs[0], silent, *jobs[1:]], chunk)
    assert silent.logprobs == []
    assert silent.prompt_logprobs == []
    model = make_model(name)
    for job in jobs:
        expected = transformers_logits(model, job.tokens).log_softmax(-1)
        entries = [*job.prompt_logprobs, *job.logprobs]
        assert [entry.token_id for entry in entries] == job.tokens[1:]
        for place, entry in enumerate(entries):
            assert entry.logprob == pytest.approx(float(expected[place, entry.token_id]), abs=1e-4)
            best = expected[place].topk(4)
            assert [token for token, _ in entry.top] == best.indices.tolist()
            assert [value for _, value in entry.top] == pytest.approx(best.values.tolist(), abs=1e-4)


DRAWN: list[dict[str, Any]] = [
    {},
    {"temperature": 0.6},
    {"temperature": 1.4, "top_k": 9},
    {"top_p": 0.7, "top_k": 40},
    {"min_p": 0.2, "temperature": 0.8},
    {"repetition_penalty": 1.6, "presence_penalty": 0.5, "frequency_penalty": 0.4, "temperature": 0.9, "top_p": 0.9},
    {"logit_bias": {7: 6.0, 8: -100.0}, "top_k": 12},
]


@pytest.mark.parametrize("compiled", [True, False])
def test_scores_of_what_was_drawn(compiled: bool, make_runner: MakeRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores are the slow reference's, applied to the log-probabilities that the model itself gives."""
    if not compiled:
        monkeypatch.setattr(sampler, "compiler_missing", lambda *_: "there is none")
    driver = Driver(make_runner("llama"))
    inputs = prompts([6, 9, 3, 5, 8, 7, 4], VOCAB, seed=4)
    own = {"top_p": 1.0, "top_k": 0, "temperature": 1.0, "repetition_penalty": 1.0, "logprobs_of": "sampled"}
    jobs = [
        driver.job(prompt, 6, SamplingParams(**{**own, "top_logprobs": 5, **fields}), seed)
        for seed, (prompt, fields) in enumerate(zip(inputs, DRAWN, strict=True))
    ]
    unchanged = driver.job(inputs[0], 6, SamplingParams(temperature=0.6, top_k=3, logprobs=True), 9)
    driver.run([*jobs, unchanged])
    model = make_model("llama")
    expected = transformers_logits(model, unchanged.tokens)[len(inputs[0]) - 1 :].log_softmax(-1)
    for place, entry in enumerate(unchanged.logprobs):
        assert entry.logprob == pytest.approx(float(expected[place, entry.token_id]), abs=1e-4), "the model's, as ever"
    names = {"repetition_penalty": "repetition", "presence_penalty": "presence", "frequency_penalty": "frequency"}
    for job, prompt, fields in zip(jobs, inputs, DRAWN, strict=True):
        assert len(job.logprobs) == 6
        edits = {names.get(name, "bias"): value for name, value in fields.items() if name in (*names, "logit_bias")}
        cut = {"temperature": 1.0, **{name: fields[name] for name in fields if name in CUTS}}
        for place, entry in enumerate(job.logprobs):
            # penalties divide logits, not log-probabilities: those come from the model
            logits = transformers_logits(model, job.tokens[: len(prompt) + place])[-1].tolist()
            edited = reference_sampler.penalized(logits, prompt, job.output[:place], **edits)
            probabilities = reference_sampler.distribution(edited, **cut)
            assert entry.logprob == pytest.approx(math.log(probabilities[entry.token_id]), abs=1e-3)
            possible = sum(probability > 0 for probability in probabilities)
            assert len(entry.top) == min(5, possible)
            assert all(value == pytest.approx(math.log(probabilities[token]), abs=1e-3) for token, value in entry.top)


CUTS = ("temperature", "top_p", "top_k", "min_p")


def test_a_greedy_choice_was_certain(make_runner: MakeRunner) -> None:
    driver = Driver(make_runner("llama"))
    params = SamplingParams(temperature=0.0, logprobs_of="sampled", top_logprobs=3, repetition_penalty=1.2)
    job = driver.job(prompts([5], VOCAB)[0], 4, params)
    other = driver.job(prompts([5], VOCAB)[0], 4, SamplingParams(temperature=0.0, repetition_penalty=1.2))
    driver.run([job, other])
    assert job.output == other.output
    assert [(entry.logprob, entry.top) for entry in job.logprobs] == [(0.0, ((t, 0.0),)) for t in job.output]


def test_each_row_gets_as_many_as_it_asked_for(make_runner: MakeRunner) -> None:
    driver = Driver(make_runner("llama"))
    prompt = prompts([5], VOCAB)[0]
    jobs = [
        driver.job(prompt, 2, SamplingParams(temperature=0.0, logprobs=True, top_logprobs=top)) for top in (0, 3, 1)
    ]
    driver.run(jobs)
    assert [[len(entry.top) for entry in job.logprobs] for job in jobs] == [[0, 0], [3, 3], [1, 1]]
    assert all(job.logprobs[0].logprob == jobs[0].logprobs[0].logprob for job in jobs)


def test_named_tokens_stand_in_the_place_of_the_likeliest(make_runner: MakeRunner) -> None:
    """Each has the value that it has among all, and the row beside keeps its likeliest."""
    driver = Driver(make_runner("llama"))
    prompt, plain = prompts([5], VOCAB)[0], SamplingParams(temperature=0.0, repetition_penalty=1.2, max_tokens=3)
    every = driver.job(prompt, 3, plain.replace(top_logprobs=VOCAB))
    named = driver.job(prompt, 3, plain.replace(logprob_token_ids=[7, 3, 11], top_logprobs=1))
    beside = driver.job(prompt, 3, plain.replace(top_logprobs=5))
    driver.run([every, named, beside])
    for whole, entry, other in zip(every.logprobs, named.logprobs, beside.logprobs, strict=True):
        known = dict(whole.top)
        assert entry.top == tuple((token, known[token]) for token in (7, 3, 11))
        assert (other.top, entry.logprob) == (whole.top[:5], whole.logprob)


def test_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(11, 40)
    tokens = torch.randint(0, 40, (11,))
    whole = token_logprobs(logits, tokens, 50).entries()
    monkeypatch.setattr("asyncengine.execution.sampling.logprobs._BLOCK_ELEMENTS", 100)
    assert token_logprobs(logits, tokens, 50).entries() == whole
    assert len(whole[0].top) == 40
