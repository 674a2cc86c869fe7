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
from support import tiny_models
from support.drive import Driver, prompts
from support.long import LONG
from support.tiny_models import VOCAB, make_checkpoint
from support.wide_models import WIDE

from asyncengine import SamplingParams
from asyncengine.config import EngineConfig
from asyncengine.execution.layers.states import FIRST, StatePools
from asyncengine.execution.runner import model_runner
from asyncengine.execution.runner.model_runner import ModelRunner
from asyncengine.kvcache import KVCache
from asyncengine.request_spec import RequestSpec
from asyncengine.scheduler import Scheduler

from .graphs import Recall, on_fakes

SIZES = [1, 2, 4, 8]
HYBRIDS = ["qwen3next", "lfm2", "falcon-h1", "mamba2", *LONG * ["qwen3.5", "granite4", "nemotron-h"]]
"""Families with each kind of state, beside attention, in its place and alone."""
CHUNKED = ["llama4"]
GREEDY = SamplingParams(temperature=0.0)


def widened(make: Callable[[], Any]) -> Any:
    """The tiny model with heads of 64 dimensions, as FlashInfer needs them."""
    config = make()
    if hasattr(config, "num_attention_heads"):
        config.head_dim = 64
    return config


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


@pytest.fixture
def states(monkeypatch: pytest.MonkeyPatch) -> list[StatePools]:
    """Memory of the states of each runner that is made."""
    pools: list[StatePools] = []

    def make(*arguments: Any, **options: Any) -> StatePools:
        pools.append(StatePools(*arguments, **options))
        return pools[-1]

    monkeypatch.setattr(model_runner, "StatePools", make)
    return pools


@pytest.fixture
def make_runner(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[ModelRunner, Recall]]:
    """A runner and what its graphs recall."""
    for module in ("options", "kernels"):
        monkeypatch.setattr(f"asyncengine.execution.layers.{module}.compiler_missing", lambda *_: "as on a GPU")

    def make(path: Path, graphs: bool) -> tuple[ModelRunner, Recall]:
        runner, capture = on_fakes(path, num_states=70), Recall()
        if graphs:
            runner.use_graphs(SIZES, capture)
        return runner, capture

    return make


@pytest.mark.parametrize("name", HYBRIDS + CHUNKED)
def test_outputs_are_those_without_graphs(
    name: str, folder: Callable[[str], Path], make_runner: Any, states: list[StatePools]
) -> None:
    """Rows come and go, so that steps of 1 to 7 rows are padded; prompts run without, over the ends of chunks. What a
    padding row left in the state before any token, the requests behind it would begin with: it stays zero."""
    outputs = []
    for graphs in (False, True):
        runner, capture = make_runner(folder(name), graphs)
        for chunk, preempt_every in ((None, None), (5, 4)) if graphs else ((None, None),):
            driver = Driver(runner)
            jobs = [
                driver.job(prompt, 16 - 2 * place, GREEDY, place)
                for place, prompt in enumerate(prompts([3, 9, 22, 1, 6], VOCAB))
            ]
            outputs.append(driver.run(jobs, chunk, preempt_every))
        assert (len(capture.replays) > 15) == graphs
        runner.close()
    assert outputs[0] == outputs[1] == outputs[2]
    assert len(states) == 2 * (name in HYBRIDS)
    for pool in (each for made in states for each in (*made.recurrent, *made.windows) if each is not None):
        assert not pool[FIRST].any()
        assert pool[1:-1].any()
    assert len({token for output in outputs[0] for token in output}) > 5


@pytest.mark.parametrize("name", ["qwen3next", "lfm2"])
def test_snapshots_are_taken_and_started_from(name: str, folder: Callable[[str], Path], make_runner: Any) -> None:
    """The scheduler drives: answers fill pages, so that states go on elsewhere; shared prefixes start from them."""
    answers = []
    for graphs in (False, True):
        runner, capture = make_runner(folder(name), graphs)
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
        assert (len(capture.replays) > 10) == graphs
        answers.append(found)
        runner.close()
    assert answers[0] == answers[1]
    assert all(len(answer) == 11 for answer in answers[0].values())
