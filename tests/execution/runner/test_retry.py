"""A step that runs out of memory somewhere is launched again as if it had never been: nothing of it may have stayed.

Every third operation behind the forward is made to fail once, in turn, while the step before is still on its way; the
long form takes every one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.checkpoints import MakeRunner
from support.device_modes import FailOnce
from support.drive import prompts
from support.long import LONG
from support.plug_points import Letters
from support.tiny_models import VOCAB
from support.wide_models import make_wide
from torch.utils._python_dispatch import _disable_current_modes

from asyncengine.execution.runner.graphs import ProcessedRows
from asyncengine.execution.runner.model_runner import ModelRunner
from asyncengine.execution.runner.pending import PendingStep
from asyncengine.request_spec import RequestSpec
from asyncengine.sampling_params import SamplingParams
from asyncengine.step import Batch, Row, StepResult

from .graphs import Recall, on_fakes
from .step_sampler import sample_in_graphs

STEPS = 3
FAILING = 1
"""The step that fails: its rows' last tokens are on the device only."""
ASKED = {
    "plain": SamplingParams(temperature=0.0),
    "scored": SamplingParams(temperature=0.0, logprobs=True, top_logprobs=2),
    "drawn": SamplingParams(temperature=0.9, top_p=0.9, top_k=20),
    "penalized": SamplingParams(temperature=0.0, repetition_penalty=1.4, frequency_penalty=0.6),
    "constrained": SamplingParams(temperature=0.0, logprobs=True),
}


class Counting(Letters):
    """A grammar that allows other tokens after each one it is told."""

    def fill_mask(self, mask: Any) -> None:
        self.allowed = tuple(10 + (len(self.advanced) * 7 + turn) % 40 for turn in range(3))
        super().fill_mask(mask)


@dataclass
class Request:
    spec: RequestSpec
    slot: int
    tokens: list[int]
    pages: list[int]
    grammar: Any


def requests() -> list[Request]:
    made = []
    for slot, (prompt, (kind, params)) in enumerate(zip(prompts([4, 6, 3, 5, 4], VOCAB), ASKED.items(), strict=True)):
        spec = RequestSpec(slot + 1, tuple(prompt), params, 32, seed=slot)
        pages = list(range(1 + 8 * slot, 9 + 8 * slot))
        made.append(Request(spec, slot, list(prompt), pages, Counting((), 99) if kind == "constrained" else None))
    return made


def row(request: Request, step: int) -> Row:
    """The whole prompt, then token by token, each launched before the last one is known."""
    length = request.spec.prompt_len
    start, count = (0, length) if step == 0 else (length + step - 1, 1)
    return Row(
        request.spec, request.slot, start, count, request.tokens, step > 0, request.pages, True, 0,
        request.grammar,
    )  # fmt: skip


@contextmanager
def failing(runner: ModelRunner, mode: FailOnce | None) -> Iterator[None]:
    """`mode` is on from the end of the next forward or replay to the end of its launch."""
    owner, name = (runner, "forward") if runner.graphs is None else (runner.graphs, "run")
    forward, launch = getattr(owner, name), runner.launch_once

    def one_launch(batch: Batch) -> Any:
        runner.launch_once = launch  # type: ignore[method-assign]
        try:
            return launch(batch)
        finally:
            if mode is not None and getattr(owner, name) is then_fail:  # else it is a part of the step, launched again
                mode.__exit__(None, None, None)
            setattr(owner, name, forward)

    def then_fail(*arguments: Any) -> Any:
        made = forward(*arguments)
        if mode is not None:
            mode.__enter__()
        return made

    runner.launch_once = one_launch  # type: ignore[method-assign]
    setattr(owner, name, then_fail)
    yield


def outputs(runner: ModelRunner, mode: FailOnce | None) -> tuple[list[list[int]], list[float]]:
    """Tokens of all requests, and log-probabilities in order."""
    made = requests()
    results: list[StepResult] = []
    handle = runner.launch(Batch(0, tuple(row(request, 0) for request in made)))
    for step in range(1, STEPS):
        batch = Batch(step, tuple(row(request, step) for request in made))
        if step == FAILING:
            with failing(runner, mode):
                following = runner.launch(batch)
        else:
            following = runner.launch(batch)
        results.append(handle.wait())
        handle = following
        for request, token in zip(made, results[-1].tokens, strict=True):
            request.tokens.append(token)
    results.append(handle.wait())
    assert not any(result.errors for result in results)
    scores = [entries[0].logprob for result in results for _, entries in sorted(result.logprobs.items())]
    return [list(column) for column in zip(*(result.tokens for result in results), strict=True)], scores


def undisturbed(method: Callable[..., Any]) -> Callable[..., Any]:
    """The method, in which no operation fails or counts."""

    def run(*arguments: Any) -> Any:
        with _disable_current_modes():
            return method(*arguments)

    return run


KINDS = ["without graphs", "sampled behind the graph", "sampled in the graph"]


@pytest.fixture(params=KINDS)
def runner(request: pytest.FixtureRequest, make_runner: MakeRunner, folder: Path) -> Iterator[ModelRunner]:
    if request.param == KINDS[0]:
        yield make_runner("llama", max_num_seqs=8, attention_backend="torch", fuse=False)
        return
    with pytest.MonkeyPatch.context() as patch:
        if request.param == KINDS[2]:
            sample_in_graphs(patch)
        made = on_fakes(folder)
    made.use_graphs([1, 2, 4, 8], Recall())
    with pytest.MonkeyPatch.context() as patch:
        for owner, name in ((PendingStep, "wait"), (ProcessedRows, "run")):  # neither takes memory of a device
            patch.setattr(owner, name, undisturbed(getattr(owner, name)))
        yield made
    made.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_wide("qwen2", tmp_path_factory.mktemp("retry") / "qwen2")


def test_wherever_memory_runs_out(runner: ModelRunner) -> None:
    expected, scores = outputs(runner, None)
    counting = FailOnce(0)
    assert outputs(runner, counting)[0] == expected
    assert counting.seen > 20
    for at in range(1 if LONG else 1 + (runner.graphs is None), counting.seen + 1, 1 if LONG else 5):
        mode = FailOnce(at)
        found, scored = outputs(runner, mode)
        assert found == expected, f"after a failure of operation {at} of {counting.seen}"
        assert scored == pytest.approx(scores, abs=1e-4)
        assert at <= mode.seen <= at + 1, "nothing else is done but to put back what slots held"
    assert len({token for column in expected for token in column}) > 6
