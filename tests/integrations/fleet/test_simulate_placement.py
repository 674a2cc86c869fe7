"""The simulator of placement: its books balance."""

from __future__ import annotations

import pytest

from benchmarks.cluster.events import Plan
from benchmarks.cluster.placement import Simulation

BUSY = {"nodes": 6, "devices": 4, "hours": 60.0, "arrivals": 12.0, "lifetime": 6.0, "failures": 0.03, "models": 6}


@pytest.mark.parametrize(("strategy", "utilization"), [("spread", 0.0), ("binpack", 0.9)])
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
