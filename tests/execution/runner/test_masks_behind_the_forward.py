"""A constrained row's forward is launched before its last token is known; what needs the token follows by itself."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from support.drive import prompts
from support.plug_points import Letters
from support.tiny_models import VOCAB
from support.wide_models import make_wide

from asyncengine.execution.device.transfer import Readback
from asyncengine.execution.runner import model_runner
from asyncengine.execution.runner.model_runner import ModelRunner
from asyncengine.execution.sampling.sampler import NOTHING_ALLOWED
from asyncengine.request_spec import RequestSpec
from asyncengine.sampling_params import SamplingParams
from asyncengine.step import Batch, Row, StateUse

from .graphs import Recall, on_fakes
from .step_sampler import TorchStepSampler, sample_in_graphs

GREEDY = SamplingParams(temperature=0.0)
ALLOWED = (11, 12, 40)


class Allowing(Letters):
    """A grammar that allows `ALLOWED`, fails to make mask number `broken`, and allows nothing in number `empty`."""

    def __init__(self, broken: int | None = None, empty: int | None = None) -> None:
        super().__init__(ALLOWED, 99)
        self.broken, self.empty = broken, empty

    def fill_mask(self, mask: Any) -> None:
        if len(self.advanced) == self.broken:
            raise RuntimeError("no mask")
        mask[:] = 0
        if len(self.advanced) != self.empty:
            super().fill_mask(mask)


class HeldReadback(Readback):
    """Results that are not here before `here` is set."""

    here = threading.Event()

    def wait(self) -> None:
        assert self.here.is_set(), "a launch waits for the step before"


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[ModelRunner, TorchStepSampler]:
    samplers = sample_in_graphs(monkeypatch)
    runner = on_fakes(make_wide("qwen2", tmp_path / "model"))
    runner.use_graphs([1, 2, 4], Recall())
    HeldReadback.here = threading.Event()
    SPECS.clear()
    monkeypatch.setattr(model_runner, "Readback", HeldReadback)
    return runner, samplers[0]


def row(slot: int, step: int, grammar: Allowing | None, params: SamplingParams = GREEDY) -> Row:
    """The whole prompt, then token by token, each launched before the last one is known."""
    tokens = prompts([4], VOCAB, seed=slot)[0]
    spec = SPECS.setdefault((slot, params.logprobs), RequestSpec(slot + 1, tuple(tokens), params, 64))
    start, count = (0, 4) if step == 0 else (3 + step, 1)
    return Row(
        spec, slot, start, count, list(tokens), step > 0, list(range(1 + 8 * slot, 9 + 8 * slot)), True, 0,
        grammar,  # type: ignore[arg-type]
    )  # fmt: skip


SPECS: dict[Any, RequestSpec] = {}


def test_a_launch_does_not_wait_and_the_reader_finishes_it(made: tuple[ModelRunner, TorchStepSampler]) -> None:
    runner, sampler = made
    matchers = Allowing(), Allowing(broken=1)
    rows = [[row(slot, step, grammar) for slot, grammar in enumerate((*matchers, None))] for step in range(3)]
    first = runner.launch(Batch(0, tuple(rows[0])))
    before = sampler.sampled
    second = runner.launch(Batch(1, tuple(rows[1])))
    assert sampler.sampled == before + 1, "in the graph alone"
    assert not matchers[0].advanced
    HeldReadback.here.set()
    result = first.wait()
    assert sampler.sampled == before + 2, "with masks, by whoever has read the step before"
    assert matchers[0].advanced == [result.tokens[0]]
    found = second.wait()
    assert {result.tokens[0], found.tokens[0]} <= set(ALLOWED)
    assert list(found.errors) == [1]
    assert found.tokens[2] >= 0, "its neighbour's fault"


def test_the_row_for_which_no_token_is_allowed_is_told_so(made: tuple[ModelRunner, TorchStepSampler]) -> None:
    """The row's own processed logits tell it in a graph's step: the forward's are finite, as are its neighbours'."""
    runner, _ = made
    HeldReadback.here.set()
    matchers = None, Allowing(), Allowing(empty=1), Allowing()
    for step in range(2):
        rows = [row(slot, step, grammar) for slot, grammar in enumerate(matchers)]
        result = runner.launch(Batch(step, tuple(rows))).wait()
        assert result.errors == ({2: NOTHING_ALLOWED} if step else {})
        assert {result.tokens[1], result.tokens[3]} <= set(ALLOWED)


def test_the_next_launch_finishes_what_nobody_has(made: tuple[ModelRunner, TorchStepSampler]) -> None:
    """Three steps in flight: the third needs the tokens of the second."""
    runner, _ = made
    HeldReadback.here.set()
    matcher = Allowing()
    handles = [runner.launch(Batch(step, (row(0, step, matcher),))) for step in range(4)]
    assert len(matcher.advanced) >= 2
    tokens = [handle.wait().tokens[0] for handle in handles]
    assert matcher.advanced == tokens
    assert set(tokens) <= set(ALLOWED)


def test_which_constrained_steps_wait_for_nobody(
    made: tuple[ModelRunner, TorchStepSampler], monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, _ = made
    monkeypatch.setattr(model_runner, "is_plain_thread", lambda device: True)
    monkeypatch.setattr(ModelRunner, "asynchronous", True)
    decode = row(0, 1, Allowing())
    scored = row(1, 1, Allowing(), SamplingParams(temperature=0.0, logprobs=True))
    saving = decode._replace(state=StateUse(1, 1, ((8, 2),)))
    assert runner.is_brief(Batch(1, (decode, row(2, 1, None))))
    for rows in ((decode, row(2, 0, None)), (decode, scored), (saving,), (decode,) * 5):
        assert not runner.is_brief(Batch(1, rows))
    matcher = Allowing()
    for step in range(2):
        runner.launch(Batch(step, (row(0, step, matcher),)))
    assert not runner.is_brief(Batch(1, (decode,))), "it waits for a step that nobody has read"
