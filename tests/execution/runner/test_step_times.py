"""Costs of steps are measured until they are certain, in few runs."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from asyncengine import DEMO_MODEL
from asyncengine.config import EngineConfig
from asyncengine.execution.models.loading import load_model
from asyncengine.execution.runner import building
from asyncengine.execution.runner.building import build_runner, measure_steps, prompt_step, shortest
from asyncengine.step import MEASURED_SIZES

TIMES = (0.04, 0.041, 0.045, 0.12)


class Steps:
    """Steps that take what they are said to, and are counted."""

    def __init__(self, times: Mapping[int, float]) -> None:
        self.times, self.runs = dict(times), list[int]()

    def __call__(self, count: int) -> float:
        self.runs.append(count)
        return self.times[count]


def steps(factor: float = 1.0, **changes: float) -> Steps:
    times = {size: factor * time for size, time in zip(MEASURED_SIZES, TIMES, strict=True)}
    return Steps({**times, **{int(name[1:]): time for name, time in changes.items()}})


@pytest.mark.parametrize(
    ("taken", "runs", "least"),
    [([0.1, 0.102], 2, 0.1), ([0.19, 0.1, 0.101], 3, 0.1), ([0.1, 0.12, 0.3], 3, 0.1), ([0.1, 0.098], 2, 0.098)],
)
def test_a_step_is_measured_until_two_runs_agree(taken: list[float], runs: int, least: float) -> None:
    """A step runs three times at most: the first one may have to find its memory, or meet another process."""
    left = iter(taken)
    assert shortest(lambda count: next(left), 1) == least
    assert len(taken) - len(list(left)) == runs


def test_steps_of_a_large_model_are_run_once_each_but_for_the_smallest() -> None:
    run = steps(20)
    assert measure_steps(run) == tuple(20 * time for time in TIMES)
    assert run.runs == [*MEASURED_SIZES, 1]


def test_layers_are_recorded_in_the_first_step_of_a_size() -> None:
    run = steps()
    assert measure_steps(lambda size: run(size) + 0.2 * (run.runs.count(size) == 1)) == TIMES
    assert run.runs == [*MEASURED_SIZES, *MEASURED_SIZES]


@pytest.mark.parametrize(("count", "taken"), [(1, 4), (2, 1.8), (8, 1.8), (32, 6)])
def test_a_step_that_took_longer_than_its_neighbours_allow_is_run_again(count: int, taken: float) -> None:
    run = steps(20)

    def one(size: int) -> float:
        once = run(size)
        return taken if size == count and run.runs.count(size) == 1 else once

    assert measure_steps(one) == tuple(20 * time for time in TIMES)
    assert run.runs == ([*MEASURED_SIZES, 1] if count == 1 else [*MEASURED_SIZES, 1, count])


NONSENSE = [
    (0.0,) * 4, (0.04, -0.01, 0.1, 0.12), (0.04, float("nan"), 0.1, 0.2), (float("inf"),) * 4, (0.5, 0.04, 0.04, 0.03),
]  # fmt: skip


@pytest.mark.parametrize("nonsense", NONSENSE)
def test_nonsense_is_measured_anew(nonsense: tuple[float, ...]) -> None:
    disturbed, undisturbed = Steps(dict(zip(MEASURED_SIZES, nonsense, strict=True))), steps()
    measure_steps(disturbed)
    left = len(disturbed.runs) // 2  # it was measured twice, in vain

    def first_disturbed(count: int) -> float:
        nonlocal left
        left -= 1
        return disturbed(count) if left >= 0 else undisturbed(count)

    assert measure_steps(first_disturbed) == TIMES


def test_sound_times_of_the_same_steps_are_measured_once() -> None:
    """Times are not kept for ever: those of 64 kinds of steps are."""
    one, *others = (object() for _ in range(100))
    disturbed = Steps(dict(zip(MEASURED_SIZES, NONSENSE[0], strict=True)))
    assert measure_steps(disturbed, one) != TIMES
    assert measure_steps(steps(), one) == TIMES
    assert measure_steps(steps(2.0), one) == TIMES
    assert measure_steps(steps(2.0), object()) == tuple(2 * time for time in TIMES)
    for key in others:
        measure_steps(steps(), key)
    kept = [measure_steps(steps(3.0), key) == TIMES for key in reversed([one, *others])]
    assert kept == [True] * 64 + [False] * 36


def test_given_costs_are_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineConfig(max_num_seqs=4, kv_cache_memory="8MiB", show_progress=False)
    monkeypatch.setattr(building, "measure_steps", lambda run, key: pytest.fail("they are given"))
    given = config.replace(speculation_costs=TIMES)
    built = build_runner(load_model(str(DEMO_MODEL), given), given)
    if built.no_speculation is None:
        assert built.step_costs == TIMES
    # a step that is only measured may be longer than the whole pool: it names no page beyond it
    assert max(prompt_step(built.runner, 4096).rows[0].pages) < built.runner.num_pages < 4096 // given.page_size
    built.runner.close()
