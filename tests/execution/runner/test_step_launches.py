"""Launches of a decode step on a device besides its model and its sampler: a handful of kernels and copies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.device_modes import Launches
from support.drive import GREEDY
from support.fake_flashinfer import FakeMemory
from support.tiny_models import VOCAB
from support.wide_models import make_wide

from asyncengine.execution.runner.model_runner import ModelRunner
from asyncengine.request_spec import RequestSpec
from asyncengine.step import Batch, Row

from .graphs import Recall, Recalled, on_fakes


class Silent:
    """A `DeviceSampler` whose kernels are its own affair."""

    def refresh(self) -> None:
        pass

    def sample(self, logits: Any, slots: Any, positions: Any, tokens: torch.Tensor, best: torch.Tensor) -> None:
        best.copy_(logits.amax(dim=-1))
        tokens.copy_(logits.argmax(dim=-1))


@pytest.fixture
def runner(tmp_path: Path) -> ModelRunner:
    made = on_fakes(make_wide("qwen2", tmp_path / "model"))
    made.sampler.on_device = Silent()
    return made


def batches(steps: int, rows: int) -> list[Batch]:
    """A prompt each, then decodes whose tokens are in flight."""
    prompts = [[(3 * row + place) % VOCAB for place in range(5 + row)] for row in range(rows)]
    specs = [RequestSpec(row + 1, tuple(prompt), GREEDY, 60) for row, prompt in enumerate(prompts)]
    pages = [list(range(1 + 20 * row, 21 + 20 * row)) for row in range(rows)]
    made = []
    for step in range(steps):
        spans = [(len(prompt) + step - 1, 1) if step else (0, len(prompt)) for prompt in prompts]
        rows_of = [
            Row(specs[row], row, start, count, prompts[row], step > 0, pages[row], True)
            for row, (start, count) in enumerate(spans)
        ]
        made.append(Batch(step + 1, tuple(rows_of)))
    return made


def test_a_decode_step_is_one_replay_between_two_copies(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, inside, backend = Launches(), Launches(), runner.backend
    sampler: Any = runner.sampler.on_device
    memory: FakeMemory = backend.memory  # type: ignore[attr-defined]
    for owner, name in ((runner, "_compute"), (sampler, "sample")):
        monkeypatch.setattr(owner, name, inside.without(getattr(owner, name)))
    # what these queue is known to `memory`
    for owner, name in ((backend, "plan_graph"), (memory, "upload"), (memory, "finish")):
        monkeypatch.setattr(owner, name, whole.without(getattr(owner, name)))
    runner.use_graphs([4], Recall())

    def replay(self: Recalled) -> None:
        with inside:
            self.output = self.work()

    monkeypatch.setattr(Recalled, "replay", whole.without(replay))
    prompt, *decodes = batches(12, 3)
    runner.launch(prompt).wait()
    queued = memory.queued
    for batch in decodes:
        with whole:
            handle = runner.launch(batch)
        handle.wait()
    steps = len(decodes)
    assert inside.calls == dict.fromkeys(("index_select", "copy_", "index_copy_"), steps), "tokens, logits, tokens"
    assert whole.calls == {"clone": steps}, "what is read back"
    assert memory.queued - queued < 2 * steps + 3, "one copy of what the step needs, and a plan where a page is opened"
