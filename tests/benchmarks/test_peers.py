"""The benchmark kit without its peers: workloads, percentiles, ratios, the table, who is absent, stopping a worker."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks.peers import memory, results, roofline, run, shapes
from benchmarks.peers.drivers.base import Settings
from benchmarks.peers.pool import PeerFailed, Worker
from benchmarks.peers.workloads import Request, Trace, measure, workloads

ALL = workloads(rate=2.0, seconds=20.0)


def settings(folder: Path) -> Settings:
    return Settings(str(folder), "bfloat16", 1, "none", 64, 64, 64, 4, "", "", str(folder))


@pytest.mark.parametrize("name", ALL)
def test_requests_are_the_same_for_everybody_and_new_in_every_repetition(name: str) -> None:
    made, again, later = (ALL[name].make(1000, repetition) for repetition in (0, 0, 1))
    assert made == again
    assert [request.prompt for request in made] != [request.prompt for request in later]
    assert [(len(request.prompt), request.output, request.at) for request in made] == [
        (len(request.prompt), request.output, request.at) for request in later
    ]
    assert all(0 <= token < 999 for request in made for token in request.prompt)  # 999 ends a sequence


def test_figures_of_a_run() -> None:
    request = Request([1, 2], 3)
    streamed = Trace([5, 6, 7], 2.1, [1.0, 1.5, 2.0])
    whole = Trace([5, 6, 7], 2.0)
    assert measure(ALL["single"], [request], [streamed], 0.0) == {"decode": 2.0}
    assert measure(ALL["single"], [request], [whole], alone=1.0) == {"decode": 2.0}
    assert measure(ALL["conc-4"], [request] * 4, [whole] * 4, 0.0) == {"output": 6.0}
    assert measure(ALL["prefill"], [request], [whole], 0.0) == {"prompt": 1.0}
    found = measure(ALL["arrivals"], [Request([1], 3, at=0.75)], [streamed], 0.0)
    assert found["first-p50"] == found["first-p99"] == 250.0
    assert found["between-p50"] == 500.0


def test_ratios_are_taken_within_repetitions() -> None:
    """The machine was twice as slow in the second: the medians' ratio would say something else."""
    found = results.Results(3)
    for turn, (mine, theirs) in enumerate([(10.0, 5.0), (5.0, 2.5), (12.0, 6.0)]):
        found.add("work", "engine", turn, mine)
        found.add("work", "peer", turn, theirs)
    found.add("work", "once", 1, 5.0)
    assert found.median("work", "peer") == 5.0
    assert found.advantage("work", "peer", "engine", lower_is_better=False) == 2.0
    assert found.advantage("work", "peer", "engine", lower_is_better=True) == 0.5
    assert found.advantage("work", "once", "engine", lower_is_better=False) == 1.0
    assert found.advantage("work", "nobody", "engine", lower_is_better=False) is None


def test_work_of_a_model() -> None:
    shape = shapes.SHAPES["qwen3-0.6b"]
    assert shape.parameters * 2 == pytest.approx(1.192e9, rel=0.001)
    assert shape.kv_bytes("bfloat16") == 114_688
    assert shapes.SHAPES["llama-110m"].parameters == pytest.approx(110e6, rel=0.01)
    alone = roofline.least_prefill(shape, [2048], rate=1e12)
    assert alone == pytest.approx(2 * 440e6 * 2048 / 1e12 + 4 * 28 * 2048 * 2048 * 2049 / 2 / 1e12, rel=0.01)
    step = roofline.least_decode(shape, "bfloat16", 1.2e9, 192, bandwidth=50e9)
    assert step == pytest.approx((1.2e9 + 192 * 114_688) / 50e9)


def test_a_worker_that_ends_is_a_failure_of_its_system(tmp_path: Path) -> None:
    worker = Worker("no_such_driver", sys.executable, settings(tmp_path), tmp_path / "log", limit=30.0)
    with pytest.raises(PeerFailed, match="no_such_driver"):
        worker.load()
    worker.end()


def test_a_worker_is_stopped_between_its_turns(tmp_path: Path) -> None:
    """The worker is gone after its end, with everything that it started."""
    worker = Worker("transformers_generate", sys.executable, settings(tmp_path), tmp_path / "log", limit=30.0)
    try:
        worker.pause()
        with run.running(worker):
            pass
        state = Path(f"/proc/{worker.leader}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
        assert state == "T"
        assert memory.session_members(worker.leader) == [worker.leader]
        assert memory.proportional(worker.leader) > 0
    finally:
        worker.end()
    assert memory.session_members(worker.leader) == []
