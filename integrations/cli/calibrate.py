"""`asyncengine calibrate`: fit the temperatures of a model's decisions to labelled cases.

The figures it prints are honest: every case is judged by a temperature that was fitted to other cases.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from asyncengine.config import EngineConfig
from asyncengine.demo import resolve_model
from asyncengine.errors import InvalidParameter, UnsupportedModel
from asyncengine.integrations.cli.exits import CliError
from asyncengine.integrations.cli.loading import on_thread, open_async_engine
from asyncengine.integrations.cli.options import engine_config
from asyncengine.integrations.cli.text import read_text, write, write_json
from asyncengine.outputs import DecisionAnswer

FOLDS = 5
"""Folds of cross-validation: the cases of each are judged by the temperature that was fitted to the others."""
LEAST = 4 * FOLDS
"""Fewest cases of a type of question: fewer do not determine a temperature."""
COLDEST, HOTTEST = 0.05, 20.0
"""Bounds of a temperature: a model that is right in every case would get 0, one that knows nothing infinity."""
BINS = 10
"""Bins of equal width of the expected calibration error (ECE)."""
FIELDS = {"answer", "question", "state"}
_NO_OPTION = -1e9  # score that pads the rows of questions with fewer options


def run(args: argparse.Namespace) -> int:
    folder = Path(args.model if args.out is None else args.out)
    if args.out is None and not folder.is_dir():
        raise CliError("out: must name a folder for decision.json, for MODEL is no folder")
    config = engine_config(args, show_progress=not args.json)
    settings, cases = on_thread(lambda: _read(args.model, args.cases)).result()
    answers = asyncio.run(_decided(args.model, config, cases))
    both, figures_of = list(zip(answers, cases, strict=True)), dict[str, Any]()
    for question_type in dict.fromkeys(answer.type for answer in answers):
        probabilities = [(each.probabilities, case["right"]) for each, case in both if each.type == question_type]
        figures_of[question_type] = calibrated(probabilities, float(settings.temperature.get(question_type, 1.0)))
        settings.temperature[question_type] = figures_of[question_type]["after"]["temperature"]
    if args.json:
        write_json({"model": args.model, "folder": str(folder), "types": figures_of})
    else:
        for name, each in figures_of.items():
            changes = [f"{key} {number:.3f} -> {each['after'][key]:.3f}" for key, number in each["before"].items()]
            write(f"{name} ({each['cases']} cases): {', '.join(changes)}\n")
    settings.save_pretrained(folder)
    return 0


def _read(model: str, name: str) -> tuple[Any, list[dict[str, Any]]]:
    """The model's `DecisionConfig`, and the cases. Raises `CliError` for the first line that is wrong."""
    try:
        from transformers.decision.configuration_utils import DecisionConfig

        folder = Path(resolve_model(model))
        settings = DecisionConfig.from_pretrained(folder if folder.is_dir() else "")
    except Exception as error:  # too old a transformers; a file that is no JSON, or has other types in it
        raise UnsupportedModel(f"transformers cannot read the decision.json of {model}: {error}") from error
    lines = enumerate(read_text("cases", name).split("\n"), 1)
    cases = [_case(number, line, settings) for number, line in lines if line.strip()]
    counts = Counter(case["question"]["type"] for case in cases)
    if not cases or min(counts.values()) < LEAST:
        raise CliError(f"cases: must be {LEAST} or more of each type of question, got {dict(counts)}")
    return settings, cases


def _case(number: int, line: str, settings: Any) -> dict[str, Any]:
    """A line's fields, its number as "line", and the option that is its answer as "right"."""
    from transformers.decision.template_utils import parse_questions

    try:
        case = json.loads(line)
        if not isinstance(case, dict) or case.keys() != FIELDS:
            raise ValueError(f"must be an object with the fields {', '.join(sorted(FIELDS))}, and no others")
        (question,) = parse_questions({"question": case["question"]}, settings)
        right = case["answer"] if question.type == "choice" else json.dumps(case["answer"])
        if right not in question.options:
            raise ValueError(f"answer: must be one of {', '.join(question.options)}, got {json.dumps(case['answer'])}")
    except ValueError as error:
        raise CliError(f"cases: line {number}: {error}") from error
    return {**case, "line": number, "right": right}


async def _decided(model: str, config: EngineConfig, cases: list[dict[str, Any]]) -> list[DecisionAnswer]:
    free = asyncio.Semaphore(config.max_num_seqs)
    async with open_async_engine(model, config) as engine:

        async def ask(case: dict[str, Any]) -> DecisionAnswer:
            async with free:
                try:
                    return (await engine.decide(case["state"], {"question": case["question"]}))["question"]
                except InvalidParameter as error:
                    raise CliError(f"cases: line {case['line']}: {error}") from error

        with Console(stderr=True).status(f"asking {len(cases)} questions"):
            return await asyncio.gather(*map(ask, cases))


def calibrated(answers: list[tuple[dict[str, float], str]], before: float) -> dict[str, Any]:
    """Figures of the temperature `before`, which gave `answers` (probabilities by option, and the right option), and of
    the one to use "after": the fitted one if fitting helps for held-out cases, else `before`."""
    right = np.array([list(by_option).index(option) for by_option, option in answers])
    scores = np.full((len(answers), max(len(by_option) for by_option, _ in answers)), _NO_OPTION)
    for row, (by_option, _) in zip(scores, answers, strict=True):
        # the inverse of softmax(score / before), up to a constant; a probability of 0 has no logarithm
        row[: len(by_option)] = before * np.log(np.maximum(list(by_option.values()), 1e-300))
    fold = np.arange(len(right)) % FOLDS
    of_fold = np.array([fitted(scores[fold != number], right[fold != number]) for number in range(FOLDS)])
    present = {"temperature": before, **figures(log_softmax(scores / before), right)}
    after = {"temperature": fitted(scores, right), **figures(log_softmax(scores / of_fold[fold, None]), right)}
    helps = after["log_loss"] < present["log_loss"]
    return {"cases": len(right), "before": present, "after": after if helps else present}


def fitted(scores: NDArray[np.float64], right: NDArray[np.int_]) -> float:
    """The temperature at which the right answers are likeliest. The log loss is convex in its inverse, so the sign of
    the slope says in which half of the interval it lies."""
    low, high, of_right = math.log(COLDEST), math.log(HOTTEST), scores[np.arange(len(right)), right].sum()
    for _ in range(40):
        middle = (low + high) / 2
        slope = (np.exp(log_softmax(scores / math.exp(middle))) * scores).sum() - of_right
        low, high = (middle, high) if slope > 0 else (low, middle)
    return math.exp(low)


def log_softmax(scores: NDArray[np.float64]) -> NDArray[np.float64]:
    shifted = scores - scores.max(1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(1, keepdims=True)))


def figures(logprobs: NDArray[np.float64], right: NDArray[np.int_]) -> dict[str, float]:
    """Share of right answers, expected calibration error, Brier score (over all options) and log loss."""
    numbers, of_right = np.exp(logprobs), logprobs[np.arange(len(right)), right]
    confidence, is_right = numbers.max(1), numbers.argmax(1) == right
    gaps = np.bincount(np.minimum(confidence * BINS, BINS - 1).astype(int), is_right - confidence)
    return {
        "accuracy": float(is_right.mean()),
        "ece": float(np.abs(gaps).sum() / len(right)),
        "brier": float(((numbers**2).sum(1) - 2 * np.exp(of_right) + 1).mean()),
        "log_loss": float(-of_right.mean()),
    }
