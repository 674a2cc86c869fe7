"""The simulator of placement: its books balance, strategies meet the same events, bad flags are named."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.cluster import __main__ as command
from benchmarks.cluster.events import Plan, make_events, make_nodes
from benchmarks.cluster.placement import Simulation

BUSY = {"nodes": 6, "devices": 4, "hours": 60.0, "arrivals": 12.0, "lifetime": 6.0, "failures": 0.03, "models": 6}


@pytest.mark.parametrize(("strategy", "utilization"), [("spread", 0.0), ("binpack", 0.0), ("binpack", 0.9)])
def test_every_instance_ends_in_one_column(strategy: str, utilization: float) -> None:
    plan = Plan(**BUSY, utilization=utilization)
    simulation = Simulation(plan, strategy)
    found = simulation.run()
    assert found.arrived == found.placed_at_once + found.placed_later + found.never > 500
    assert found.lost == found.recovered + found.recovered_later + found.abandoned > 20
    assert min(found.placed_later, found.never) > 0
    assert found.recovered > 0 or utilization  # of whole devices none is free that soon
    placed = found.placed_at_once + found.placed_later + found.recovered + found.recovered_later
    assert sum(found.stages.values()) == placed
    assert 0 < found.used <= found.busiest <= 1
    assert found.refused["device memory"] > 0
    table = simulation.table  # what runs at the end is what was placed and has not left
    taken = sum(taken for each in table.instances.values() for share in each.shares for _, taken in share.devices)
    assert int(table.used.sum()) == taken > 0
    assert (table.used <= table.limit).all()


def test_the_same_seed_is_the_same_life_and_another_is_not() -> None:
    def life(seed: int) -> tuple[Any, ...]:
        plan = Plan(**{**BUSY, "hours": 20.0}, seed=seed)
        found = Simulation(plan, "spread").run()
        found.milliseconds = (0.0, 0.0)
        return list(make_events(plan)), make_nodes(plan), found

    assert life(3) == life(3)
    assert life(3)[0] != life(4)[0]


def test_the_command_prints_a_table_or_json(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--nodes", "4", "--hours", "6", "--utilization", "0.9"]
    assert command.main(["placement", *flags]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("|")[1].strip() for line in lines[2:]] == ["spread", "binpack"]
    assert command.main(["placement", *flags, "--strategy", "spread", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["plan"]["nodes"] == 4
    assert [each["strategy"] for each in report["results"]] == ["spread"]


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--devices", "-1"], "devices: must be"),
        (["--nodes", "0"], "nodes: must be between 1 and 100000"),
        (["--hours", "nan"], "hours: must be finite"),
        (["--arrivals", "-3"], "arrivals: must be > 0"),
        (["--hours", "1e6", "--arrivals", "1e6"], "hours: make more than ten million events"),
        (["--strategy", "random"], "strategy: must be one of 'spread', 'binpack'"),
    ],
)
def test_bad_flags_are_named(flags: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["placement", *flags]) == 2
    assert says in capsys.readouterr().err


def test_without_matplotlib_the_extra_is_named_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for long in (["placement", "--hours", "1e5"], ["routing", "--requests", "1000000"]):
        assert command.main([*long, "--plot", str(tmp_path / "plot.png")]) == 2
        assert 'pip install "asyncengine[bench]"' in capsys.readouterr().err
