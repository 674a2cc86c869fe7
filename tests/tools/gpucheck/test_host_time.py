"""The clock around an engine's own functions: all parts are seen, and nothing of it stays."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from tools.gpucheck.host_time import PARTS, HostClock
from tools.gpucheck.session import Session, Settings
from tools.gpucheck.shapes import Shape
from tools.gpucheck.speed import loaded
from tools.gpucheck.workloads import burst

TINY = Shape("tiny", 32, 48, 2, 2, 1, tied=True, head_dim=16, vocab=128)


async def test_parts_of_a_step(tmp_path: Path) -> None:
    session = Session(Settings("cpu", "torch"), tmp_path)
    async with loaded(session, TINY, told=False) as engine:
        loop: Any = engine.core.loop
        schedule = loop._schedule

        def slow() -> Any:
            time.sleep(0.003)
            return schedule()

        loop._schedule = slow
        clock = HostClock(engine)
        await burst(engine, [(5, 30)] * 3, 1)
        found = clock.medians(3)
        assert set(found) == {*PARTS, "total"}
        assert all(found[part] > 0 for part in PARTS)
        assert found["schedule"] >= 0.003
        assert found["total"] >= max(found[part] for part in PARTS)
        assert clock.medians(4) == {}, "no step had four rows"
        clock.close()
        assert not {"_apply_inbox", "_deliver", "_commit"} & set(vars(loop))
        assert "launch" not in vars(loop.runner.executor)
        steps = len(clock._steps)
        await burst(engine, [(5, 3)], 1)
        assert len(clock._steps) == steps
