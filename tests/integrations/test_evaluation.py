"""The providers of evaluation harnesses, where these are installed: scores to the last digit whatever the batch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from asyncengine import Engine, SamplingParams
from asyncengine.demo import MODEL_PATH

TOWNS = ("Oslo", "Paris", "Rome", "Bern")
SETTINGS: dict[str, Any] = {"show_progress": False, "num_threads": 1}


@pytest.fixture
def items(tmp_path: Path) -> Path:
    path = tmp_path / "items.jsonl"
    with path.open("w", encoding="utf-8") as file:
        for number in range(12):
            town = TOWNS[number % 4]
            question = f"Ada {number} lives in {town}. Where does Ada {number} live?"
            answer = {"choices": [f" {each}" for each in TOWNS], "gold": number % 4, "text": f"{question} In {town}."}
            file.write(json.dumps({"question": question, "answer": town, **answer}) + "\n")
    return path


def tasks(items: Path) -> list[dict[str, Any]]:
    """A task of each type of request."""
    own = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(items)}}, "test_split": "test"}
    choice = {"doc_to_text": "question", "doc_to_choice": "choices", "doc_to_target": "gold"}
    until = {"until": ["\n"], "max_gen_toks": 6}
    generate = {
        **own, "output_type": "generate_until", "doc_to_text": "question", "doc_to_target": "answer",
        "metric_list": [{"metric": "exact_match"}],
    }  # fmt: skip
    return [
        {**own, **choice, "task": "choice", "output_type": "multiple_choice", "metric_list": [{"metric": "acc"}]},
        {
            **own, "task": "rolling", "output_type": "loglikelihood_rolling", "doc_to_text": "",
            "doc_to_target": "text", "metric_list": [{"metric": "bits_per_byte"}],
        },
        {**generate, "task": "greedy", "generation_kwargs": until},
        {**generate, "task": "sampled", "generation_kwargs": {**until, "do_sample": True, "temperature": 1.0}},
    ]  # fmt: skip


def test_the_harness_gets_the_same_numbers_at_any_batch_size(items: Path) -> None:
    lm_eval = pytest.importorskip("lm_eval")
    import asyncengine.integrations.evaluation.lm_eval  # noqa: F401

    def run(size: int) -> dict[str, Any]:
        outcome = lm_eval.simple_evaluate(
            model="asyncengine", model_args={"pretrained": "demo", **SETTINGS}, batch_size=size, tasks=tasks(items),
            bootstrap_iters=0, verbosity="ERROR",
        )  # fmt: skip
        responses = {name: [each["resps"] for each in samples] for name, samples in outcome["samples"].items()}
        return {"results": outcome["results"], "responses": responses}

    alone = run(1)
    assert run(64) == alone
    scores = [score for response in alone["responses"]["choice"] for ((score, _),) in response]
    assert len(set(scores)) > 12
    assert all(score < 0 for score in scores)
    assert alone["responses"]["greedy"] != alone["responses"]["sampled"]
    question = json.loads(items.read_text(encoding="utf-8").splitlines()[0])["question"]
    with Engine.from_pretrained("demo", **SETTINGS) as engine:
        expected = engine.generate(question, SamplingParams(temperature=0, max_tokens=6, stop=["\n"])).text
    assert alone["responses"]["greedy"][0] == [[expected]]


def test_scores_are_those_of_transformers() -> None:
    pytest.importorskip("lm_eval")
    import torch
    from lm_eval.api.instance import Instance
    from transformers import AutoModelForCausalLM

    from asyncengine.integrations.evaluation.lm_eval import AsyncEngineLM

    model = AsyncEngineLM(dtype="float32", **SETTINGS)
    reference: Any = AutoModelForCausalLM.from_pretrained(MODEL_PATH, dtype=torch.float32)
    texts = [("The capital of Norway is", " Oslo."), ("", "Count from 3 to 9."), ("A ", "text")]
    requests = [Instance("loglikelihood", {}, pair, 0) for pair in texts]
    for (context, more), (score, greedy) in zip(texts, model.loglikelihood(requests), strict=True):
        before = model.tok_encode(context) or [model.prefix_token_id]
        ids = model.tok_encode(context + more) if context else [*before, *model.tok_encode(more)]
        start = len(model.tok_encode(context.rstrip())) if context else len(before)
        with torch.inference_mode():
            logprobs = reference(torch.tensor([ids])).logits[0].log_softmax(-1)
        expected = [logprobs[at - 1, ids[at]].item() for at in range(start, len(ids))]
        assert score == pytest.approx(sum(expected), abs=1e-3)
        assert greedy == all(logprobs[at - 1].argmax().item() == ids[at] for at in range(start, len(ids)))


def test_inspect_gets_the_same_answers_at_any_number_of_connections(items: Path, tmp_path: Path) -> None:
    inspect_ai = pytest.importorskip("inspect_ai")
    from inspect_ai.dataset import Sample, json_dataset
    from inspect_ai.model import GenerateConfig, get_model
    from inspect_ai.scorer import includes
    from inspect_ai.solver import generate

    import asyncengine.integrations.evaluation.inspect_ai  # noqa: F401

    def run(size: int) -> tuple[Any, ...]:
        task = inspect_ai.Task(
            dataset=json_dataset(str(items), lambda item: Sample(input=item["question"], target=item["answer"])),
            solver=generate(), scorer=includes(), config=GenerateConfig(max_tokens=8, temperature=0),
        )  # fmt: skip
        model = get_model("asyncengine/demo", max_num_seqs=size, memoize=False, **SETTINGS)
        (log,) = inspect_ai.eval(task, model=model, max_connections=size, display="none", log_dir=str(tmp_path))
        assert log.status == "success", log.error
        assert log.results is not None
        return log.results.scores[0].metrics, [sample.output.completion for sample in log.samples or ()]

    alone = run(1)
    assert run(64) == alone
    assert len(set(alone[1])) > 1
