"""What steps of some sizes take: measured until it is certain, kept, and believed only while it still holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from support.checkpoints import Checkpoint

from asyncengine import DEMO_MODEL
from asyncengine.config import EngineConfig
from asyncengine.models.loading import load_model
from asyncengine.runner import building, step_times
from asyncengine.runner.building import build_runner
from asyncengine.runner.step_times import KeptTimes, is_sound, measure_steps, shortest
from asyncengine.speculation.costs import SIZES

TIMES = (0.04, 0.042, 0.045, 0.07, 0.12)


class Kept:
    """`KeptTimes` in memory."""

    def __init__(self, times: Sequence[float] | None = None) -> None:
        self.times = times

    def read(self) -> Sequence[float] | None:
        return self.times

    def keep(self, times: Sequence[float]) -> None:
        self.times = times


class Steps:
    """Steps that take what they are said to, and are counted."""

    def __init__(self, times: Mapping[int, float]) -> None:
        self.times, self.runs = dict(times), list[int]()

    def __call__(self, count: int) -> float:
        self.runs.append(count)
        return self.times[count]


def steps(factor: float = 1.0, **changes: float) -> Steps:
    times = {size: factor * time for size, time in zip(SIZES, TIMES, strict=True)}
    return Steps({**times, **{int(name[1:]): time for name, time in changes.items()}})


@pytest.mark.parametrize(
    ("taken", "runs", "least"),
    [
        ([0.1, 0.102], 2, 0.1),
        ([0.19, 0.1, 0.101], 3, 0.1),
        ([0.1, 0.12, 0.3], 3, 0.1),
        ([0.1, 0.098], 2, 0.098),
    ],
)
def test_a_step_is_measured_until_two_runs_agree(taken: list[float], runs: int, least: float) -> None:
    """And three times at most: the first one may find its memory for the first time, or another process in its way."""
    left = iter(taken)
    assert shortest(lambda count: next(left), 1) == least
    assert len(taken) - len(list(left)) == runs


def test_steps_of_a_large_model_are_run_once_each_but_for_the_smallest() -> None:
    run = steps()
    assert measure_steps(run, None) == TIMES
    assert run.runs == [*SIZES, 1]


def test_brief_steps_are_run_until_they_agree() -> None:
    run = steps(0.1)
    assert measure_steps(run, None) == tuple(0.1 * time for time in TIMES)
    assert run.runs == [1, *(size for size in SIZES for _ in range(2))]


@pytest.mark.parametrize(("count", "taken"), [(1, 0.2), (4, 0.06), (8, 0.09), (16, 0.1), (32, 0.3)])
def test_a_step_that_took_longer_than_its_neighbours_allow_is_run_again(count: int, taken: float) -> None:
    run = steps()

    def one(size: int) -> float:
        once = run(size)
        return taken if size == count and run.runs.count(size) == 1 else once

    assert measure_steps(one, None) == TIMES
    assert run.runs == ([*SIZES, 1] if count == 1 else [*SIZES, 1, count])


def test_times_that_do_bend_down_are_believed_the_second_time() -> None:
    """As where a wider kernel serves the longer steps."""
    run = steps(_8=0.1, _16=0.11)
    assert measure_steps(run, None) == (0.04, 0.042, 0.1, 0.11, 0.12)
    assert run.runs.count(8) == 2


def test_what_was_kept_is_not_measured_again() -> None:
    """The largest step is looked at once, the smallest as often as it takes; on a slower day all are as much slower."""
    kept: Any = Kept()
    assert measure_steps(steps(), kept) == TIMES == kept.times
    slower = steps(1.5, _8=9.0)
    assert measure_steps(slower, kept) == pytest.approx([1.5 * time for time in TIMES])
    assert set(slower.runs) == {SIZES[0], SIZES[-1]}
    assert slower.runs.count(SIZES[-1]) == 1
    assert kept.times == TIMES


def test_a_step_that_takes_twice_as_long_says_whether_what_was_kept_holds() -> None:
    """Larger ones may take ten times as long, and rise with it."""
    times = (0.04, 0.05, 0.09, 0.2, 0.4)
    run = Steps({size: 2 * time for size, time in zip(SIZES, times, strict=True)})
    kept: Any = Kept(times)
    assert measure_steps(run, kept) == pytest.approx([2 * time for time in times])
    assert set(run.runs) == {1, 8}
    run.times[8] = 0.3
    found = measure_steps(run, kept)
    assert found == kept.times == tuple(run.times.values())


@pytest.mark.parametrize("factor", [0.7, 1.4])
def test_where_memory_is_faster_or_slower_tokens_add_more_or_less(factor: float) -> None:
    """The smallest step is memory's, what is beyond is arithmetic's; nothing else is measured for that. Next time it is
    known."""
    kept: Any = Kept((0.04, 0.05, 0.09, 0.2, 0.4))
    run = Steps({1: 0.06, 4: 9.0, 8: 0.06 * (1 + factor * 1.25), 16: 9.0, 32: 9.0})
    found = measure_steps(run, kept)
    assert found == pytest.approx([0.06 * (1 + factor * added) for added in (0, 0.25, 1.25, 4, 9)])
    assert kept.times == found
    run.times.update(zip(SIZES, found, strict=True))
    run.runs.clear()
    assert measure_steps(run, kept) == pytest.approx(found)
    assert len(run.runs) == 2


@pytest.mark.parametrize(("count", "disturbed"), [(8, [0.5]), (1, [0.09, 0.09])])
def test_disturbed_steps_change_nothing(count: int, disturbed: list[float]) -> None:
    kept: Any = Kept((0.04, 0.05, 0.09, 0.2, 0.4))
    run, left = Steps(dict(zip(SIZES, kept.times, strict=True))), list(disturbed)

    def one(size: int) -> float:
        taken = run(size)
        return left.pop() if size == count and left else taken

    assert measure_steps(one, kept) == pytest.approx(kept.times)
    assert set(run.runs) == {1, 8}


def test_what_no_longer_holds_is_measured_and_kept_anew() -> None:
    """As when memory is faster and arithmetic is not, or when somebody else was in the way of what was kept."""
    kept: Any = Kept(TIMES)
    found = measure_steps(steps(_32=0.29, _8=0.08), kept)
    assert found == (0.04, 0.042, 0.08, 0.07, 0.29) == kept.times


# as it was kept while compilers ran beside the first step: two are shorter than that of one token
DISTURBED = (0.0234, 0.006, 0.012, 0.05, 0.06)


def test_a_table_that_falls_is_not_scaled_below_zero() -> None:
    kept: Any = Kept(DISTURBED)
    run = Steps(dict(zip(SIZES, (0.0234, 0.024, 0.026, 0.0734, 0.1), strict=True)))
    assert measure_steps(run, kept) == tuple(run.times.values()) == kept.times


NONSENSE = [
    (-0.01, 0.01, 0.02, 0.03, 0.04),
    (0.02, 0.02, -0.01, 0.03, 0.04),
    (0.0, 0.0, 0.0, 0.0, 0.0),
    (0.02, float("nan"), 0.02, 0.02, 0.02),
    (0.02, 0.02, 0.02, 0.02, float("inf")),
    (0.2, 0.02, 0.02, 0.02, 0.02),
    (0.02, 0.02, 0.1, 0.01, 0.04),
]


@pytest.mark.parametrize("nonsense", NONSENSE)
def test_nonsense_is_measured_anew(nonsense: tuple[float, ...]) -> None:
    kept: Any = Kept()
    wrong, run = dict(zip(SIZES, nonsense, strict=True)), steps()

    def one(count: int) -> float:
        once = run(count)
        return wrong[count] if run.runs.count(SIZES[-1]) < 3 and len(run.runs) < 8 else once

    assert measure_steps(one, kept) == pytest.approx(TIMES, rel=1.0)
    assert is_sound(kept.times)


@pytest.mark.parametrize("nonsense", NONSENSE)
@pytest.mark.parametrize("known", [None, TIMES, DISTURBED])
def test_where_nothing_can_be_measured_usual_times_are_taken(nonsense: tuple[float, ...], known: Any) -> None:
    """They are a setting's value, which is looked at as if somebody had given it; and they are not kept."""
    kept: Any = Kept(known)
    found = measure_steps(Steps(dict(zip(SIZES, nonsense, strict=True))), kept)
    assert EngineConfig(speculation_costs=found).speculation_costs == found
    assert list(found) == sorted(found)
    assert kept.times == known or is_sound(kept.times)  # two steps may tell what was known


def test_nothing_is_kept_where_it_cannot_be() -> None:
    assert measure_steps(steps(), None) == TIMES


# ---------------------------------------------------------------- on disk


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    cache = pytest.importorskip("asyncengine.kernels.cpu.cache")
    monkeypatch.setattr(cache, "folder_here", lambda: cache.KernelFolder(tmp_path / "kernels"))
    return tmp_path / "kernels"


def test_the_file_is_of_all_that_a_step_depends_on(folder: Path, checkpoint: Checkpoint) -> None:
    config = EngineConfig(page_size=4, show_progress=False)
    model = load_model(str(checkpoint("llama")), config)
    known = KeptTimes(model, config, 2)
    assert known.read() is None
    known.keep(TIMES)
    assert KeptTimes(load_model(str(checkpoint("llama")), config), config, 2).read() == TIMES
    assert KeptTimes(model, config, 1).read() is None
    assert KeptTimes(model, config.replace(page_size=8), 2).read() is None
    other = config.replace(dtype="bfloat16")
    assert KeptTimes(load_model(str(checkpoint("llama")), other), config, 2).read() is None
    assert KeptTimes(load_model(str(checkpoint("qwen3")), config), config, 2).read() is None


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"null",
        b"[0.1]",
        b"[1, 2, 3, 4, 5]",
        b"[0.1, 0.1, 0.1, 0.1, -1.0]",
        b"[1.0, NaN, 1.0, 1.0, 1.0]",
        b"[0.2, 0.1, 0.1, 0.1, 0.1]",
        b"[" * 100_000,
        b"\xff\xfe",
    ],
)
def test_what_is_no_table_is_not_read(content: bytes, folder: Path, checkpoint: Checkpoint) -> None:
    config = EngineConfig(page_size=4, show_progress=False)
    known: Any = KeptTimes(load_model(str(checkpoint("llama")), config), config, 2)
    known._folder.keep(known._name, content)
    assert known.read() is None


def test_small_models_leave_no_files(folder: Path, checkpoint: Checkpoint) -> None:
    config = EngineConfig(page_size=4, show_progress=False)
    known = KeptTimes(load_model(str(checkpoint("llama")), config), config, 2)
    known.keep([0.001] * len(SIZES))
    assert known.read() is None


def test_a_runner_takes_the_table_that_was_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the runner's own from then on, in any engine's configuration: what is replayed is replayed with it."""
    monkeypatch.setattr(step_times, "_WORTH_KEEPING", 0.0)
    monkeypatch.setattr(step_times, "_HOLDS", float("inf"))
    config = EngineConfig(max_num_seqs=4, kv_cache_memory="8MiB", show_progress=False)
    ratios = []
    model = str(DEMO_MODEL)
    for _ in range(2):
        runner = build_runner(load_model(model, config), config)
        if runner.no_speculation is not None:
            pytest.skip(runner.no_speculation)
        assert runner.step_costs is not None
        ratios.append([value / runner.step_costs[0] for value in runner.step_costs])
        runner.close()
    assert ratios[0] == pytest.approx(ratios[1])
    monkeypatch.setattr(building, "measure_steps", lambda run, kept: pytest.fail("it is given"))
    given = config.replace(speculation_costs=TIMES)
    runner = build_runner(load_model(model, given), given)
    assert runner.step_costs == TIMES
    runner.close()
