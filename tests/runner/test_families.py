"""Every family in the zoo answers token for token like transformers' own eager greedy decoding in float32."""

from __future__ import annotations

import pytest
from support.checkpoints import Checkpoint, MakeRunner
from support.drive import Driver, greedy_reference, prompts
from support.tiny_models import FAMILIES, VOCAB, WINDOW, make_model

WANT = 30
LENGTHS = [1, 5, 33, 18]


@pytest.fixture(scope="module")
def references() -> dict[str, list[list[int]]]:
    return {}


def reference(name: str, references: dict[str, list[list[int]]]) -> list[list[int]]:
    if name not in references:
        model = make_model(name)
        references[name] = [greedy_reference(model, prompt, WANT) for prompt in prompts(LENGTHS, VOCAB)]
    return references[name]


@pytest.mark.parametrize("name", list(FAMILIES))
def test_the_reference_can_tell_outputs_apart(name: str, references: dict[str, list[list[int]]]) -> None:
    outputs = reference(name, references)
    assert len({token for output in outputs for token in output}) >= 5
    assert len({tuple(output) for output in outputs}) == len(outputs)
    assert max(LENGTHS) + WANT > 2 * WINDOW


@pytest.mark.parametrize("name", list(FAMILIES))
def test_equals_transformers(name: str, make_runner: MakeRunner, references: dict[str, list[list[int]]]) -> None:
    expected = reference(name, references)
    driver = Driver(make_runner(name))

    def jobs() -> list:
        return [driver.job(prompt, WANT) for prompt in prompts(LENGTHS, VOCAB)]

    for chunk in (None, 1, 7, 16):
        assert driver.run(jobs(), chunk) == expected, f"chunk {chunk}"
    assert driver.run(jobs(), 16, preempt_every=5) == expected
    assert driver.run(jobs()[2:3]) == expected[2:3], "alone"


@pytest.mark.parametrize("name", ["qwen3", "gemma3", "gpt-oss"])
def test_unfused_equals_fused(name: str, make_runner: MakeRunner, references: dict[str, list[list[int]]]) -> None:
    runner = make_runner(name, fuse=False)
    assert runner.fused == ["transformers x 1"]
    driver = Driver(runner)
    assert driver.run([driver.job(prompt, WANT) for prompt in prompts(LENGTHS, VOCAB)]) == reference(name, references)


@pytest.mark.parametrize("name", ["llama3.1-rope", "gemma2"])
def test_page_size_does_not_matter(name: str, make_runner: MakeRunner, references: dict[str, list[list[int]]]) -> None:
    for page_size in (1, 37):
        driver = Driver(make_runner(name, page_size=page_size))
        jobs = [driver.job(prompt, WANT) for prompt in prompts(LENGTHS, VOCAB)]
        assert driver.run(jobs, 7) == reference(name, references), f"page size {page_size}"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_close(dtype: str, checkpoint: Checkpoint, make_runner: MakeRunner) -> None:
    from asyncengine.sampling_params import SamplingParams

    prompt = prompts([40], VOCAB)[0]
    scores = []
    for runner in (make_runner("qwen3"), make_runner("qwen3", dtype=dtype)):
        driver = Driver(runner)
        job = driver.job(prompt, 1, SamplingParams(temperature=0.0, prompt_logprobs=True))
        driver.run([job])
        scores.append([entry.logprob for entry in job.prompt_logprobs])
    differences = [abs(left - right) for left, right in zip(*scores, strict=True)]
    assert 0 < max(differences) < 0.25
