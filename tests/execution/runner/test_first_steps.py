"""First steps: kernels that are in the cache are read, and then one step of one token is enough."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from support import forked

from asyncengine import DEMO_MODEL, Engine
from asyncengine.config import EngineConfig
from asyncengine.execution.layers.recorded import GREEDY
from asyncengine.execution.models.decoder import Decoder
from asyncengine.execution.models.first_kernels import kernels_of
from asyncengine.execution.models.loading import load_model
from asyncengine.execution.runner import building
from asyncengine.execution.runner.building import build_runner
from asyncengine.execution.runner.model_runner import ModelRunner
from asyncengine.kernels.api import read_kept
from asyncengine.kernels.cpu import compiler_missing
from asyncengine.request_spec import RequestSpec
from asyncengine.step import MEASURED_SIZES, OPEN, Batch, Row, StepResult

if compiler_missing(torch.float32, torch.device("cpu")) is not None:
    pytest.skip("no compiler", allow_module_level=True)

CONFIG = EngineConfig(kv_cache_memory="8MiB", speculation="off", show_progress=False)
UNKNOWN = "asyncengine.kernels.cpu.gather:nothing_of_the_kind:(int64)"
_AFTER_LOADING = """
import json, sys
from numba.core.dispatcher import Dispatcher
from asyncengine import Engine, SamplingParams
from asyncengine.kernels.elsewhere import elsewhere
from asyncengine.execution.runner import building
added, kept, compile, read = [], [], Dispatcher.compile, building.read_kept
def noted(self, signature):
    known = len(self.overloads)
    found = compile(self, signature)
    added.extend([self.py_func.__name__] * (len(self.overloads) - known))
    return found
def read_noted(names):
    kept.extend(name for name in names if ":void(" not in name)  # called by kernels, which is not noted here
    return read(names)
Dispatcher.compile, building.read_kept = noted, read_noted
with Engine.from_pretrained(sys.argv[1], kv_cache_memory="32MiB", num_threads=2, show_progress=False) as engine:
    while_loading = len(added)
    for count in (3, 100, 600):
        engine.generate(list(range(1, 1 + count)), SamplingParams(max_tokens=3, temperature=0.7, top_k=20))
    engine.generate_many(["Hello"] * 9, SamplingParams(max_tokens=4, temperature=1.0, seed=1, top_p=0.9))
    for others in list(elsewhere):  # a first load leaves kernels to them
        others.wait()
print(json.dumps([len(kept), while_loading, added[while_loading:]]))
"""


def lengths_of_first_steps(monkeypatch: pytest.MonkeyPatch, kept: Sequence[str] | None) -> list[int]:
    """Tokens of the steps that building a runner runs. `kept` None: what the model calls."""
    found, run = list[int](), ModelRunner.profile_run

    def noted(self: ModelRunner, batch: Batch) -> StepResult:
        found.append(sum(row.num_scheduled for row in batch.rows))
        return run(self, batch)

    monkeypatch.setattr(ModelRunner, "profile_run", noted)
    loaded = load_model(str(DEMO_MODEL), CONFIG)
    assert isinstance(loaded.model, Decoder)
    needed, later = kernels_of(loaded.model, CONFIG.page_size, loaded.dtype, loaded.generation_defaults)
    if not needed:
        pytest.skip("nothing is compiled for it here")
    names = [*needed, *later]
    build_runner(loaded, CONFIG, cached=names if kept is None else kept).runner.close()
    return found


@pytest.mark.parametrize("kept", [(), (UNKNOWN,)], ids=["nothing", "one that cannot be had"])
def test_every_kind_of_step_is_run_where_kernels_are_not_kept(
    kept: Sequence[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = lengths_of_first_steps(monkeypatch, kept)
    assert lengths[:2] == [1, 2]
    assert lengths[2] > 64


def test_one_step_is_run_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    assert lengths_of_first_steps(monkeypatch, None) == [1]


def test_a_model_loaded_again_runs_one_step_and_is_not_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths, run = list[list[int]](), ModelRunner.profile_run

    def noted(self: ModelRunner, batch: Batch) -> StepResult:
        lengths[-1].append(sum(row.num_scheduled for row in batch.rows))
        return run(self, batch)

    monkeypatch.setattr(ModelRunner, "profile_run", noted)
    monkeypatch.setattr(building, "_kept", {})  # by other tests' engines
    monkeypatch.setattr(building, "is_sound", lambda times: True)  # on a busy machine, too
    for settings in (dict[str, Any](), {}, {"num_threads": 2}):
        lengths.append([])
        Engine.from_pretrained("demo", kv_cache_memory="8MiB", show_progress=False, **settings).close()
    assert lengths[1] == [1]
    assert max(lengths[2]) == max(MEASURED_SIZES)  # other threads, other costs


def test_what_is_read_is_there_when_it_is_called() -> None:
    from asyncengine.kernels.cpu import gather

    name = f"asyncengine.kernels.cpu.gather:copy_few_rows:({', '.join(['int64'] * 5)})"
    assert not read_kept(())
    assert read_kept([name])
    assert len(gather.copy_few_rows.overloads) == 1


def test_no_request_waits_for_a_kernel_after_a_load_that_read_them() -> None:
    """The second process counts: the first one has kept its kernels if none were kept before."""
    for _ in range(2):
        output = forked.run(_AFTER_LOADING, str(DEMO_MODEL))
        kept, while_loading, afterwards = json.loads(output.splitlines()[-1])
    assert while_loading >= kept > 8
    assert afterwards == []


def test_no_event_loop_waits_for_a_kernel_that_others_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that the loop's thread would compute is another thread's for as long."""
    loaded = load_model(str(DEMO_MODEL), CONFIG)
    runner = build_runner(loaded, CONFIG).runner
    row = Row(RequestSpec(0, (1, 2), GREEDY, 3), 0, 0, 2, [1, 2], False, [1], True)
    assert runner.is_brief(Batch(0, (row,)))
    monkeypatch.setattr("asyncengine.execution.runner.model_runner.elsewhere", [object()])
    assert not runner.is_brief(Batch(0, (row,)))
    runner.close()


def test_a_step_that_asks_a_draft_model_is_not_brief() -> None:
    """Steps that do not ask it stay brief."""
    loaded = load_model(str(DEMO_MODEL), CONFIG)
    runner = build_runner(loaded, CONFIG).runner
    there: Any = object()
    runner.draft_model = there
    row = Row(RequestSpec(0, (1, 2), GREEDY, 9), 0, 2, 1, [1, 2, 3], True, [1], False)
    guessed = row._replace(num_scheduled=3, drafts=(4, 5))
    asked = row._replace(num_scheduled=3, drafts=(OPEN, OPEN))
    assert [runner.is_brief(Batch(0, (row, other))) for other in (row, guessed, asked)] == [True, True, False]
    runner.draft_model = None
    runner.close()
