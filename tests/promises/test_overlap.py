"""A real model with steps launched ahead: whatever else happens, the tokens are those of one step at a time.

Requests of all kinds share the batch (greedy, sampled, several samples, penalties, constrained, with adapters), some
leave at random, and all are preempted again and again. Float32, so that batch neighbours cannot change a token.
"""

from __future__ import annotations

import asyncio
import random
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from support.fake_engine import idle
from support.peft_checkpoints import make_peft
from support.threads import no_new_engine_thread
from support.worded_model import VOCAB, make_worded_model

from asyncengine import AsyncEngine, SamplingParams
from asyncengine.execution.device.transfer import Readback
from asyncengine.execution.runner import model_runner
from asyncengine.execution.sampling.masks import StepMasks
from asyncengine.grammar import Grammar
from asyncengine.seams import StepHandle
from asyncengine.step import Batch, Row
from asyncengine.testing.leaks import assert_nothing_held

CONSTRAINTS = [
    None,
    None,
    Grammar.regex(r"[a-z]+( [a-z]+){2,}\."),
    Grammar.json_schema({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}),
]
SETTINGS: list[dict[str, Any]] = [
    {"max_steps_in_flight": 1},
    {"max_steps_in_flight": 2, "preempt_every": 5, "max_num_batched_tokens": 24},
    {"max_steps_in_flight": 3, "preempt_every": 5, "max_loras": 1, "prefix_caching": False},
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_worded_model(tmp_path_factory.mktemp("overlap") / "model")
    for seed, name in enumerate(("one", "two")):
        base = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        make_peft(base, seed, target_modules="all-linear").save_pretrained(folder.parent / name)
    return folder


Request = tuple[list[int], SamplingParams, str | None, int | None]


def make_requests(rng: random.Random, count: int) -> list[Request]:
    """(prompt, parameters, adapter, after how many chunks the caller leaves)."""
    made = []
    shared = [rng.randrange(3, VOCAB) for _ in range(33)]
    for index in range(count):
        grammar = rng.choice(CONSTRAINTS)
        params = SamplingParams(
            max_tokens=40 if grammar is not None else rng.randrange(1, 24),
            temperature=rng.choice([0.0, 0.9]),
            repetition_penalty=rng.choice([1.0, 1.0, 1.2]),
            seed=index,
            n=1 if grammar is not None else rng.choice([1, 1, 2]),
            logprobs=rng.random() < 0.2,
            grammar=grammar,
        )
        own = [rng.randrange(3, VOCAB) for _ in range(rng.randrange(1, 20))]
        prompt = [*shared[: rng.choice([0, 0, 17, 33])], *own]
        leaves = rng.randrange(0, 8) if rng.random() < 0.2 else None
        made.append((prompt, params, rng.choice([None, None, "one", "two"]), leaves))
    return made


async def answer(engine: AsyncEngine, request: Request) -> list[tuple[list[int], str]] | None:
    prompt, params, adapter, leaves = request
    async with engine.stream(prompt, params, adapter=adapter) as stream:
        if leaves is None:
            made = await stream.result()
            return [(sample.token_ids, sample.finish_reason) for sample in made.samples]
        for _ in range(leaves):
            await anext(stream, None)
    return None


class LateReadback(Readback):
    """Results that arrive when the steps after theirs have been launched, as on a device."""

    ready = False
    waits = 0

    def wait(self) -> None:
        type(self).waits += 1
        threading.Event().wait(0.002)


@pytest.mark.parametrize(("seed", "late"), [(1, False), (2, True)])
async def test_depth_chunks_and_preemption_are_invisible(
    seed: int, late: bool, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = make_requests(random.Random(seed), 40)
    outputs = []
    discarded = count_discarded_rows(monkeypatch)
    threads = note_launching_threads(monkeypatch)
    for settings in SETTINGS:
        if late and settings["max_steps_in_flight"] > 1:
            monkeypatch.setattr(model_runner, "Readback", LateReadback)
            monkeypatch.setattr(model_runner.ModelRunner, "asynchronous", True)
            # kernels that other processes still compile would keep launches off the loop's thread
            monkeypatch.setattr(model_runner, "elsewhere", [])
        with no_new_engine_thread():
            async with await AsyncEngine.from_pretrained(
                model, dtype="float32", num_threads=1, kv_cache_memory="6MB", max_num_seqs=12, max_lora_rank=8,
                adapters={"one": model.parent / "one", "two": model.parent / "two"}, **settings,
            ) as engine:  # fmt: skip
                outputs.append(await asyncio.gather(*(answer(engine, request) for request in requests)))
                await idle(engine)
                assert_nothing_held(engine.core)
                stats = engine.stats()
                assert (stats.preemptions > 10) == ("preempt_every" in settings)
                assert stats.finished["abort"] > 2
    for index, (plain, *others) in enumerate(zip(*outputs, strict=True)):
        for settings, other in zip(SETTINGS[1:], others, strict=True):
            assert other == plain, f"request {index} under {settings}"
    assert len(discarded) > 5, "grammars force and replace tokens for which the next step is launched already"
    assert LateReadback.waits or not late
    assert sorted(threads) == (["MainThread", "asyncengine-device"] if late else ["asyncengine-device"])


def note_launching_threads(monkeypatch: pytest.MonkeyPatch) -> dict[str, None]:
    """Gets the name of each thread that launches a step."""
    names: dict[str, None] = {}
    launch = model_runner.ModelRunner.launch

    def noted(self: model_runner.ModelRunner, batch: Batch) -> StepHandle:
        names[threading.current_thread().name] = None
        return launch(self, batch)

    monkeypatch.setattr(model_runner.ModelRunner, "launch", noted)
    return names


def count_discarded_rows(monkeypatch: pytest.MonkeyPatch) -> list[Row]:
    """Gets each row in flight whose matcher was left alone."""
    discarded: list[Row] = []
    fill = StepMasks._fill_row

    def noted(self: StepMasks, mask: Any, index: int, row: Row, begin: int) -> None:
        fill(self, mask, index, row, begin)
        if index in self._void:
            discarded.append(row)

    monkeypatch.setattr(StepMasks, "_fill_row", noted)
    return discarded
