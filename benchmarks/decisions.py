"""Decisions beside transformers' pipeline and llama.cpp, of one GGUF file: how many a second, and how many repeat.

    python -m benchmarks.decisions FILE.gguf [--states 4 --words 300 --questions 8 --rounds 3 --threads 2 --json]

All answer the same typed questions about the same states, by prompts of the same token ids. The pipeline gets the
file's numbers in float32, and so does one of this engine's two loads; the other one and llama.cpp (the package
`xllamacpp`, in this process, its prefix cache on, with one slot and with several) compute on the file as it is. What
cannot be imported is left out, by name.

A rate is of new states, all of them and all of their questions asked at once; systems take turns, medians. Processor
time is the process's. Then each system repeats itself: every question alone with a cold cache, and again in each of the
ways of `REPEATS`. Counted is the answer with the very same numbers; beside it stands the largest difference of a
log-probability.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import statistics
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import torch

from asyncengine import AsyncEngine, Decision, SamplingParams
from benchmarks.divergence import write_float32

TEAMS = {"bills": "money and refunds", "technicians": None, "lawyers": None}
KINDS: tuple[dict[str, Any], ...] = (
    {"type": "noul", "instructions": "Is a refund asked for in case {}?"},
    {"type": "choice", "instructions": "Which team takes case {}?", "criteria": TEAMS},
    {"type": "score", "instructions": "How urgent is case {}?", "criteria": ["Can wait", "This week", "Today"]},
    {"type": "noul", "instructions": "Is the writer of case {} angry?"},
)  # fmt: skip
REPEATS = ("alone", "warm cache", "one set", "reversed", "in company")
"""Ways to ask again: as before; by itself, when the same was just asked; all questions of a state at once; these in
reverse; and those of all states at once, beside four texts that are written."""
TOKENS = 64
"""Length of each of these texts."""
Questions = dict[str, dict[str, Any]]
Answers = list[dict[str, list[float]]]
"""Answers about each state: name of a question -> probabilities of its options."""


class System(Protocol):
    name: str

    async def ask(self, states: Sequence[str], questions: Questions, *, cold: bool = False) -> Answers:
        """The answers about all states, asked at once. `cold`: nothing that is cached may be used."""
        ...

    async def company(self) -> None:
        """Write some texts."""

    async def aclose(self) -> None: ...


class Ours:
    def __init__(self, name: str, engine: AsyncEngine) -> None:
        self.name, self.engine = name, engine
        self.aclose = engine.aclose
        self._salts = 0

    async def ask(self, states: Sequence[str], questions: Questions, *, cold: bool = False) -> Answers:
        options: list[Any] = [{} for _ in states]
        for each in options if cold else ():
            self._salts += 1
            each["cache_salt"] = str(self._salts)
        asked = zip(states, options, strict=True)
        made = await asyncio.gather(*(self.engine.decide(state, questions, **each) for state, each in asked))
        return [_numbers(decision) for decision in made]

    async def company(self) -> None:
        params = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
        await asyncio.gather(*(self.engine.generate(f"Story {number}:", params) for number in range(4)))


class Pipeline:
    """transformers' own. It computes one prompt after the other, without a cache."""

    def __init__(self, folder: Path) -> None:
        from transformers import pipeline

        self.name = "transformers, float32"
        self._pipeline = pipeline("decision", model=str(folder), dtype="float32")

    async def ask(self, states: Sequence[str], questions: Questions, *, cold: bool = False) -> Answers:
        made = [self._pipeline({"state": state, "questions": questions}) for state in states]
        return [{name: _of_pipeline(each) for name, each in answers.items()} for answers in made]

    async def company(self) -> None:
        """It has no way to answer two callers in one batch."""

    async def aclose(self) -> None:
        del self._pipeline


class LlamaCpp:
    """llama.cpp's server loop in this process, a request for each question, all others' labels far below its own."""

    def __init__(self, file: Path, engine: AsyncEngine, slots: int, threads: int) -> None:
        import xllamacpp

        params = xllamacpp.CommonParams()
        params.model.path, params.verbosity, params.n_parallel, params.n_ctx = str(file), 0, slots, 4096 * slots
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
        self.name = f"llama.cpp, slots: {slots}"
        self._server = xllamacpp.Server(params)
        self._prompts = engine.core.decision_prompts()
        self._pool = ThreadPoolExecutor(slots + 4)
        self._cold = False

    async def ask(self, states: Sequence[str], questions: Questions, *, cold: bool = False) -> Answers:
        self._cold = cold
        prompts, loop = self._prompts, asyncio.get_running_loop()
        work = []
        for state in states:
            parted = prompts.parted(state)
            for each in prompts.questions(questions):
                labels = prompts.params(each).allowed_token_ids or ()
                work.append(loop.run_in_executor(self._pool, self._one, prompts.prompt(parted, each), labels))
        found = iter(await asyncio.gather(*work))
        return [{name: next(found) for name in questions} for _ in states]

    def _one(self, prompt: list[int], labels: Sequence[int]) -> list[float]:
        answer = self._server.handle_completions({
            "prompt": prompt, "n_predict": 1, "temperature": 1.0, "samplers": ["temperature"], "seed": 1,
            "logit_bias": [[label, 60.0] for label in labels], "n_probs": len(labels), "post_sampling_probs": True,
            "cache_prompt": not self._cold,
        })  # fmt: skip
        listed = answer["choices"][0]["logprobs"]["content"][0]["top_probs"]
        known = {each["id"]: each["prob"] for each in listed}
        return [known.get(label, 0.0) for label in labels]

    async def company(self) -> None:
        loop, request = asyncio.get_running_loop(), self._server.handle_completions
        texts = [{"prompt": f"Story {number}:", "n_predict": TOKENS, "ignore_eos": True} for number in range(4)]
        await asyncio.gather(*(loop.run_in_executor(self._pool, request, each) for each in texts))

    async def aclose(self) -> None:
        self._pool.shutdown()


def _numbers(decision: Decision) -> dict[str, list[float]]:
    return {name: list(answer.probabilities.values()) for name, answer in decision.answers.items()}


def _of_pipeline(answer: dict[str, Any]) -> list[float]:
    if "noul" in answer:
        return [answer["noul"], 1 - answer["noul"]]
    return list(answer["probabilities"].values())


def states_of(count: int, words: int, first: int) -> list[str]:
    """Texts that begin with different numbers, so that they share no prefix."""
    text = "the parcel came late and was charged twice so that I want to know who can help me with my money now"
    known = text.split()
    return [
        f"Case {first + number}: " + " ".join(known[(place * 7 + number) % len(known)] for place in range(words))
        for number in range(count)
    ]


def questions_of(count: int) -> Questions:
    asked = ((number, KINDS[number % len(KINDS)]) for number in range(count))
    return {f"q{number}": {**kind, "instructions": kind["instructions"].format(number)} for number, kind in asked}


async def rates(systems: Sequence[System], options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Answers a second, and milliseconds of processor time of each: medians of the rounds."""
    questions = questions_of(options.questions)
    found: dict[str, list[tuple[float, float]]] = {system.name: [] for system in systems}
    for turn in range(options.rounds + 1):
        states = states_of(options.states, options.words, 1000 * (turn + 1))
        for system in systems:
            cpu, clock = time.process_time(), time.perf_counter()
            await system.ask(states, questions)
            seconds, used = time.perf_counter() - clock, time.process_time() - cpu
            asked = len(states) * len(questions)
            if turn:  # the first is for warming up
                found[system.name].append((asked / seconds, 1000 * used / asked))
    medians = {
        name: [statistics.median(column) for column in zip(*turns, strict=True)] for name, turns in found.items()
    }
    return {name: {"a second": rate, "cpu ms": cpu} for name, (rate, cpu) in medians.items()}


async def repeats(system: System, options: argparse.Namespace) -> tuple[Answers, dict[str, tuple[int, float]]]:
    """The answers alone; and of each way of `REPEATS` how many are the same, and the largest difference in nats."""
    states, questions = states_of(options.states, options.words, 1), questions_of(options.questions)

    async def one_by_one(cold: bool) -> Answers:
        return [
            {name: (await system.ask([state], {name: each}, cold=cold))[0][name] for name, each in questions.items()}
            for state in states
        ]

    alone = await one_by_one(True)
    found = {"alone": await one_by_one(True)}
    await one_by_one(False)
    found["warm cache"] = await one_by_one(False)
    found["one set"] = [(await system.ask([state], questions))[0] for state in states]
    turned = dict(reversed(questions.items()))
    found["reversed"] = [(await system.ask([state], turned))[0] for state in states]
    (found["in company"], _) = await asyncio.gather(system.ask(states, questions), system.company())
    return alone, {way: _compare(alone, found[way]) for way in REPEATS}


def _compare(one: Answers, other: Answers) -> tuple[int, float]:
    pairs = [(each[name], again[name]) for each, again in zip(one, other, strict=True) for name in each]
    differences = [
        abs(math.log(left / right)) for pair in pairs for left, right in zip(*pair, strict=True) if left and right
    ]
    return sum(left == right for left, right in pairs), max(differences)


async def run(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    write_float32(options.file, folder)
    settings: dict[str, Any] = {
        "show_progress": False, "num_threads": options.threads, "kv_cache_memory": "512MiB", "hosted": True,
    }  # fmt: skip
    systems: list[System] = [
        Ours("this engine, float32", await AsyncEngine.from_pretrained(folder, dtype="float32", **settings)),
        engine := Ours("this engine, the file", await AsyncEngine.from_pretrained(options.file, **settings)),
        Pipeline(folder),
    ]
    try:
        systems += [LlamaCpp(options.file, engine.engine, slots, options.threads) for slots in options.slots]
    except ImportError as error:
        print(f"left out: llama.cpp ({error})")
    report: dict[str, Any] = {"rates": await rates(systems, options)}
    answers, report["repeats"] = {}, {}
    for system in systems:
        answers[system.name], report["repeats"][system.name] = await repeats(system, options)
    pairs = {"float32": systems[0:3:2], "the file": systems[1:4:2]}
    report["apart"] = {
        name: _compare(*(answers[each.name] for each in pair))[1] for name, pair in pairs.items() if len(pair) == 2
    }
    for system in systems:
        await system.aclose()
    return report


def show(report: dict[str, Any], asked: int) -> None:
    for name, figures in report["rates"].items():
        print(f"{name:24} {figures['a second']:6.1f} answers/s, {figures['cpu ms']:6.1f} ms of processor time each")
    for name, ways in report["repeats"].items():
        told = "; ".join(f"{way} {same} of {asked} ({apart:.2g})" for way, (same, apart) in ways.items())
        print(f"{name:24} {told}")
    for name, apart in report["apart"].items():
        print(f"{name}: this engine and its peer are at most {apart:.2g} nats apart")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--states", type=int, default=4)
    parser.add_argument("--words", type=int, default=300, help="of each state")
    parser.add_argument("--questions", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--slots", type=int, nargs="+", default=[1, 8], help="of llama.cpp, each kind by itself")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        report = asyncio.run(run(options, Path(folder)))
    if options.json:
        print(json.dumps(report))
    else:
        show(report, options.states * options.questions)


if __name__ == "__main__":
    main()
