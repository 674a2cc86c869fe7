"""Decode steps as graphs of models that keep states, attend to chunks or have experts: as without graphs.

The stand-in for a graph does the captured work again, with what lies in fixed memory then; on the CPU the layers are
torch's here, as on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support import tiny_models
from support.drive import Driver, prompts
from support.fake_flashinfer import FakeFlashInfer, FakeMemory
from support.tiny_models import VOCAB, make_checkpoint
from support.wide_models import WIDE

from asyncengine import SamplingParams
from asyncengine.attention.flashinfer import FlashInferBackend
from asyncengine.config import EngineConfig
from asyncengine.kvcache import KVCache
from asyncengine.layers.states import StateSegments
from asyncengine.models.loading import load_model
from asyncengine.request_spec import RequestSpec
from asyncengine.runner.model_runner import ModelRunner
from asyncengine.scheduler import Scheduler

SIZES = [1, 2, 4, 8]
HYBRIDS = ["qwen3next", "qwen3.5", "lfm2", "granite4", "falcon-h1", "nemotron-h", "mamba2"]
CHUNKED = ["llama4"]
GREEDY = SamplingParams(temperature=0.0)


def widened(make: Callable[[], Any]) -> Any:
    """The tiny model with heads of 64 dimensions, as FlashInfer needs them."""
    config = make()
    if hasattr(config, "num_attention_heads"):
        config.head_dim = 64
    return config


class Again:
    """A `Graph`: its replay does the work anew, and leaves the result where it was."""

    replayed = 0

    def __init__(self, work: Callable[[], torch.Tensor]) -> None:
        self.work, self.output = work, work().clone()

    def replay(self) -> None:
        Again.replayed += 1
        self.output.copy_(self.work())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in made:
            with pytest.MonkeyPatch.context() as patch:
                patch.setitem(
                    tiny_models.FAMILIES,
                    name,
                    WIDE[name] if name in CHUNKED else partial(widened, tiny_models.FAMILIES[name]),
                )
                made[name] = make_checkpoint(name, tmp_path_factory.mktemp("graphs") / name)
        return made[name]

    return get


def make_runner(path: Path, monkeypatch: pytest.MonkeyPatch, *, graphs: bool, num_states: int = 70) -> ModelRunner:
    monkeypatch.setattr("asyncengine.layers.options.compiler_missing", lambda *_: "as on a GPU")
    monkeypatch.setattr("asyncengine.layers.kernels.compiler_missing", lambda *_: "as on a GPU")
    config = EngineConfig(page_size=4, max_num_seqs=64, num_threads=1)
    model = load_model(str(path), config)
    fake = FakeFlashInfer(FakeMemory())
    backend = FlashInferBackend(
        model.layers, 600, 4, model.dtype, model.device, max_rows=64, max_pages_per_row=64, flashinfer=fake,
        memory=fake.memory,
    )  # fmt: skip
    runner = ModelRunner(model, backend, 4, 64, num_states=num_states if model.states else 0)
    if graphs:
        runner.use_graphs(SIZES, Again)
    return runner


def padding_states(runner: ModelRunner) -> list[torch.Tensor]:
    """The state before any token, of all layers."""
    assert runner._states is not None
    return [pool[0] for pool in (*runner._states.recurrent, *runner._states.windows) if pool is not None]


@pytest.mark.parametrize("name", HYBRIDS + CHUNKED)
def test_outputs_are_those_without_graphs(
    name: str, folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows come and go, so that steps of 1 to 7 rows are padded; prompts run without, over the ends of chunks."""
    outputs = []
    for graphs in (False, True):
        runner = make_runner(folder(name), monkeypatch, graphs=graphs)
        Again.replayed = 0
        for chunk, preempt_every in ((None, None), (5, 4)):
            driver = Driver(runner)
            jobs = [
                driver.job(prompt, 16 - 2 * place, GREEDY, place)
                for place, prompt in enumerate(prompts([3, 9, 22, 1, 6], VOCAB))
            ]
            outputs.append(driver.run(jobs, chunk, preempt_every))
        assert (Again.replayed > 15) == graphs
        if name in HYBRIDS:
            assert not any(state.any() for state in padding_states(runner))
        runner.close()
    assert outputs[:2] == outputs[2:]
    assert outputs[0] == outputs[1]
    assert len({token for output in outputs[0] for token in output}) > 5


@pytest.mark.parametrize("name", ["qwen3next", "granite4", "lfm2"])
def test_snapshots_are_taken_and_started_from(
    name: str, folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through the scheduler: answers fill pages, so that states go on elsewhere; shared prefixes start from them."""
    answers = []
    for graphs in (False, True):
        runner = make_runner(folder(name), monkeypatch, graphs=graphs)
        Again.replayed = 0
        config = EngineConfig(page_size=4, max_num_seqs=64)
        scheduler = Scheduler(config, KVCache(600, 4, prefix_caching=True, num_states=70))
        found: dict[int, list[int]] = {}
        shared = prompts([13], VOCAB)[0]
        for ticket, tail in enumerate(prompts([1, 5, 2, 9, 3, 1], VOCAB, seed=3), 1):
            asked = [*shared, *tail] if ticket != 6 else [*shared, *prompts([1], VOCAB, seed=3)[0], *found[1]]
            scheduler.apply(RequestSpec(ticket, tuple(asked), GREEDY, len(asked) + 11))
            found[ticket] = []
            while ticket in (1, 5, 6) and scheduler.requests:
                batch = scheduler.schedule(0.0)
                assert batch is not None
                scheduler.commit(runner.launch(batch).wait(), 0.0)
                for output in scheduler.take_outputs():
                    found[output.ticket] += [output.token] * (output.token >= 0)
        assert scheduler.kv.state_counts([]).hits >= 2
        assert (Again.replayed > 10) == graphs
        answers.append(found)
        runner.close()
    assert answers[0] == answers[1]
    assert all(len(answer) == 11 for answer in answers[0].values())


def test_a_step_that_takes_a_snapshot_runs_without(
    folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its row has a segment more than a graph's rows have."""
    runner = make_runner(folder("lfm2"), monkeypatch, graphs=True)
    driver = Driver(runner)
    job = driver.job(prompts([3], VOCAB)[0], 6, GREEDY)
    driver.run([job])
    seen: list[Any] = []
    compute = runner._compute

    def told(*arguments: Any) -> torch.Tensor:
        seen.append(arguments[4])
        return compute(*arguments)

    runner._compute = told  # type: ignore[method-assign]
    from asyncengine.step import Batch, Row, StateUse

    saves = StateUse(1, 0, ((2, 5),))
    row = Row(job.spec, 0, 0, 2, [7, 8], False, [1], True, 0, None, saves)
    runner.launch(Batch(0, (row,))).wait()
    row = Row(job.spec, 0, 2, 1, [7, 8, 9], False, [1], True, 0, None, StateUse(1, 1, ((3, 6),)))
    Again.replayed = 0
    runner.launch(Batch(1, (row,))).wait()
    assert Again.replayed == 0
    assert isinstance(seen[-1], StateSegments)
    assert runner._states is not None
    for pool in runner._states.windows:
        assert pool is not None
        assert torch.equal(pool[1], pool[6])
        assert not torch.equal(pool[1], pool[5])
    runner.launch(Batch(2, (row._replace(start=3, tokens=[7, 8, 9, 10], state=StateUse(1, 1, ())),))).wait()
    assert Again.replayed == 1
    runner.close()
