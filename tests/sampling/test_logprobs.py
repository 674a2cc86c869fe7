"""Log-probabilities equal those of transformers' logits, for outputs and prompts, in any chunking."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.checkpoints import MakeRunner
from support.drive import Driver, prompts
from support.tiny_models import VOCAB, make_model

from asyncengine.sampling.logprobs import token_logprobs
from asyncengine.sampling_params import SamplingParams


def reference(model: Any, tokens: list[int]) -> torch.Tensor:
    """[tokens, vocab] log-probabilities of what follows each position."""
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        return torch.log_softmax(model(torch.tensor([tokens])).logits[0].float(), dim=-1)


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
        expected = reference(model, job.tokens)
        entries = [*job.prompt_logprobs, *job.logprobs]
        assert [entry.token_id for entry in entries] == job.tokens[1:]
        for place, entry in enumerate(entries):
            assert entry.logprob == pytest.approx(float(expected[place, entry.token_id]), abs=1e-4)
            best = expected[place].topk(4)
            assert [token for token, _ in entry.top] == best.indices.tolist()
            assert [value for _, value in entry.top] == pytest.approx(best.values.tolist(), abs=1e-4)


def test_each_row_gets_as_many_as_it_asked_for(make_runner: MakeRunner) -> None:
    driver = Driver(make_runner("llama"))
    prompt = prompts([5], VOCAB)[0]
    jobs = [
        driver.job(prompt, 2, SamplingParams(temperature=0.0, logprobs=True, top_logprobs=top)) for top in (0, 3, 1)
    ]
    driver.run(jobs)
    assert [[len(entry.top) for entry in job.logprobs] for job in jobs] == [[0, 0], [3, 3], [1, 1]]
    assert all(job.logprobs[0].logprob == jobs[0].logprobs[0].logprob for job in jobs)


def test_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(11, 40)
    tokens = torch.randint(0, 40, (11,))
    whole = token_logprobs(logits, tokens, 50).entries()
    monkeypatch.setattr("asyncengine.sampling.logprobs._BLOCK_ELEMENTS", 100)
    assert token_logprobs(logits, tokens, 50).entries() == whole
    assert len(whole[0].top) == 40
