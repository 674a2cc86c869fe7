"""The providers of evaluation harnesses, where these are installed: the same answers in any company."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

TOWNS = ("Oslo", "Paris", "Rome", "Bern")
SETTINGS: dict[str, Any] = {"show_progress": False, "num_threads": 1}


@pytest.fixture
def items(tmp_path: Path) -> Path:
    path = tmp_path / "items.jsonl"
    with path.open("w", encoding="utf-8") as file:
        for number in range(12):
            town = TOWNS[number % 4]
            question = f"Ada {number} lives in {town}. Where does Ada {number} live?"
            file.write(json.dumps({"question": question, "answer": town}) + "\n")
    return path


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
