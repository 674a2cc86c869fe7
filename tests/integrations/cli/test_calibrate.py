"""`asyncengine calibrate`: temperatures that are known come back, transformers reads them, wrong lines are named."""

from __future__ import annotations

import asyncio
import json
import random
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.data import cases_of
from support.demo_gguf import write_demo
from transformers import pipeline

from asyncengine import DEMO_MODEL, AsyncEngine
from asyncengine.integrations.cli.calibrate import COLDEST, FOLDS, HOTTEST, calibrated
from asyncengine.integrations.cli.main import main
from makers.demo_model.decisions import cases

ROWS: dict[str, Any] = cases_of(__file__)

SMALL = ("--num-threads", "1", "--kv-cache-memory", "8MiB", "--dtype", "float32")
QUESTIONS: dict[str, dict[str, Any]] = ROWS["questions"]
STATES = [f"What is {number} plus {other}?" for number in range(10, 20) for other in range(30, 50)]


async def asked(folder: Path, count: int = 200) -> list[dict[str, dict[str, float]]]:
    async with await AsyncEngine.from_pretrained(folder, dtype="float32", kv_cache_memory="16MB") as engine:
        made = await asyncio.gather(*(engine.decide(state, QUESTIONS) for state in STATES[:count]))
    return [{name: answer.probabilities for name, answer in each.answers.items()} for each in made]


@pytest.mark.parametrize("planted", [0.4, 1.0, 3.0])
def test_a_planted_temperature_comes_back(planted: float) -> None:
    """Answers are drawn from the softened distribution: the fit finds it, and the figures of cases held out improve."""
    rng = np.random.default_rng(3)
    answers = []
    for _ in range(4000):
        scores = rng.normal(0, 2, rng.integers(2, 6))
        asked, true = (np.exp(scores / each) / np.exp(scores / each).sum() for each in (2.0, planted))
        options = [f"o{at}" for at in range(len(scores))]
        answers.append((dict(zip(options, asked.tolist(), strict=True)), str(rng.choice(options, p=true))))
    found = calibrated(answers, 2.0)
    assert found["before"]["temperature"] == 2.0
    assert found["after"]["temperature"] == pytest.approx(planted, rel=0.06)
    assert found["after"]["accuracy"] == found["before"]["accuracy"]
    assert found["after"]["ece"] < 0.03 < found["before"]["ece"]
    assert found["after"]["brier"] < found["before"]["brier"]
    assert found["after"]["log_loss"] < found["before"]["log_loss"]


def test_figures_by_hand() -> None:
    """Ten cases that are answered with 0.8 and of which six are right; a temperature that nothing improves stays."""
    sure = {"a": 0.8, "b": 0.2}
    found = calibrated([(sure, "a" if at % 5 < 3 else "b") for at in range(10)], 1.0)["before"]
    assert found == pytest.approx(
        {
            "temperature": 1.0,
            "accuracy": 0.6,
            "ece": 0.2,
            "brier": 0.6 * 0.08 + 0.4 * 1.28,
            "log_loss": -0.6 * np.log(0.8) - 0.4 * np.log(0.2),
        }
    )
    always, never = calibrated([(sure, "a")] * 20, 1.0), calibrated([(sure, "b")] * 20, 1.0)
    assert always["after"]["temperature"] == pytest.approx(COLDEST)
    assert never["after"]["temperature"] == pytest.approx(HOTTEST)
    stays = calibrated([({"a": 0.5, "b": 0.5}, "ab"[at % 2]) for at in range(20)], 1.5)
    assert stays["after"] == stays["before"]


def test_a_case_is_judged_by_a_temperature_of_other_cases() -> None:
    """All wrong cases lie in one fold: a temperature of the others is far too sure of these, so that none helps."""
    too_sure = [({"a": 0.95, "b": 0.05}, "b" if at % FOLDS == 2 else "a") for at in range(25)]
    found = calibrated(too_sure, 1.0)
    assert found["after"] == found["before"]
    mixed = [({"a": 0.95, "b": 0.05}, "b" if at % (FOLDS + 1) == 2 else "a") for at in range(60)]
    assert calibrated(mixed, 1.0)["after"]["temperature"] == pytest.approx(np.log(19) / np.log(5), rel=1e-3)


async def test_the_file_is_read_by_transformers_and_by_the_engine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    known = {"labels": {"choice": ["1", "2", "3"]}, "temperature": {"noul": 2.0}}
    folder = tmp_path / "model"
    shutil.copytree(DEMO_MODEL, folder)
    (folder / "decision.json").write_text(json.dumps(known))
    before = await asked(folder)
    rng, lines = random.Random(5), []
    for state, each in zip(STATES, before, strict=True):
        for name, question in QUESTIONS.items():
            weights = [number ** (1 / 2.5) for number in each[name].values()]
            option = rng.choices(list(each[name]), weights)[0]
            answer = option if name == "choice" else json.loads(option)
            lines.append(json.dumps({"state": state, "question": question, "answer": answer}))
    (file := tmp_path / "cases.jsonl").write_text("\n".join([*lines, ""]))
    command = ["calibrate", str(folder), "--cases", str(file), "--json", *SMALL]
    assert await asyncio.to_thread(main, command) == 0
    found = json.loads(capsys.readouterr().out)["types"]
    written = json.loads((folder / "decision.json").read_text())
    assert written["labels"] == known["labels"]
    for name in QUESTIONS:
        figures, first = found[name], 2.0 if name == "noul" else 1.0
        assert (figures["cases"], figures["before"]["temperature"]) == (len(STATES), first)
        assert written["temperature"][name] == figures["after"]["temperature"]
        assert figures["after"]["log_loss"] < figures["before"]["log_loss"]
        low, high = (0.6, 1.7) if name == "choice" else (0.35, 3.0)  # of the little that these cases say
        assert low < written["temperature"][name] / (2.5 * first) < high
    oracle = pipeline("decision", model=str(folder), dtype="float32")
    after = await asked(folder, 5)
    for number in range(5):
        wanted = oracle({"state": STATES[number], "questions": QUESTIONS})
        assert after[number] != before[number]
        assert after[number]["noul"]["true"] == pytest.approx(wanted["noul"]["noul"], abs=1e-4)
        for name in ("choice", "score"):
            assert after[number][name] == pytest.approx(wanted[name]["probabilities"], abs=1e-4)


def test_the_demo_model_decides_what_it_has_learned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The example of the documentation is better than chance by far, about names that no training had. The file is
    made anew."""
    lines = [json.dumps(case) for case in cases(200, 6)]
    (file := tmp_path / "cases.jsonl").write_text("\n".join(lines))
    assert main(["calibrate", "demo", "--cases", str(file), "--out", str(tmp_path / "new"), *SMALL]) == 0
    printed = re.match(
        r"noul \(200 cases\): temperature 1.000 -> ([\d.]+), accuracy ([\d.]+) -> ", capsys.readouterr().out
    )
    assert printed is not None
    assert float(printed[2]) > 0.88
    written = json.loads((tmp_path / "new" / "decision.json").read_text())
    assert (written["labels"], f"{written['temperature']['noul']:.3f}") == ({}, printed[1])
    assert 80 < sum('"answer": true' in line for line in lines) < 120


async def test_a_gguf_model_reads_the_file_of_its_folder_alone(tmp_path: Path) -> None:
    """Beside a file that is named may lie other models, whose file it may be."""
    write_demo(tmp_path / "demo.gguf", "F16")
    usual = await asked(tmp_path, 3)
    (tmp_path / "decision.json").write_text('{"temperature": {"noul": 3.0, "choice": 3.0, "score": 3.0}}')
    assert await asked(tmp_path / "demo.gguf", 3) == usual
    for each, before in zip(await asked(tmp_path, 3), usual, strict=True):
        for name, by_option in each.items():
            softer = np.array(list(before[name].values())) ** (1 / 3)
            assert list(by_option.values()) == pytest.approx(softer / softer.sum(), abs=1e-5)


GOOD = {"state": "x", "question": QUESTIONS["choice"], "answer": "sums"}


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("{", "line 21: Expecting"),
        ("[1]", "line 21: must be an object with the fields answer, question, state"),
        (json.dumps({**GOOD, "weight": 1}), "line 21: must be an object with the fields"),
        (json.dumps({**GOOD, "question": {"type": "box"}}), "line 21: Question 'question': `type` must be one of"),
        (json.dumps({**GOOD, "question": {"type": "choice"}}), "line 21: Question 'question': .*criteria"),
        (json.dumps({**GOOD, "answer": "sum"}), 'line 21: answer: must be one of weather, sums, town, got "sum"'),
        (json.dumps({**GOOD, "question": QUESTIONS["score"], "answer": 2}), "line 21: answer: must be one of 0, 1"),
        (json.dumps({**GOOD, "question": QUESTIONS["noul"], "answer": "true"}), "answer: must be one of true, false"),
        (json.dumps({**GOOD, "question": QUESTIONS["noul"], "answer": True}), "20 or more of each type .*'noul': 1"),
        (json.dumps({**GOOD, "state": "x " * 20_000}), "line 21: (state|prompt)"),
        ('{"state": NaN, ' + json.dumps(GOOD)[1:].replace('"state": "x", ', ""), "line 21: state"),
    ],
)  # fmt: skip
def test_a_wrong_line_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str, named: str) -> None:
    (file := tmp_path / "cases.jsonl").write_text("\n".join([json.dumps(GOOD)] * 20 + [line]))
    assert main(["calibrate", "demo", "--cases", str(file), "--out", str(tmp_path), *SMALL]) == 2
    assert re.search(named, capsys.readouterr().err)
    assert not (tmp_path / "decision.json").exists()


def test_what_else_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    missing = str(tmp_path / "none.jsonl")
    assert main(["calibrate", "demo", "--cases", missing]) == 2
    assert "out: must name a folder" in capsys.readouterr().err
    assert main(["calibrate", "demo", "--cases", missing, "--out", str(tmp_path)]) == 2
    assert "--cases: cannot read" in capsys.readouterr().err
    (tmp_path / "decision.json").write_text('{"temperature": 3}')
    shutil.copytree(DEMO_MODEL, tmp_path, dirs_exist_ok=True)
    assert main(["calibrate", str(tmp_path), "--cases", missing]) == 2
    assert "decision.json" in capsys.readouterr().err
