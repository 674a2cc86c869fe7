"""The search for a life that goes wrong, and for the smallest plan in which it still does."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

from worlds.world.life import Life
from worlds.world.plan import Plan, make_plan

from asyncengine.testing.world import Stuck

ORDERS = 4
"""Orders of events in which a smaller plan is tried: that of the failure need not be one in which it still fails."""


class Finding(NamedTuple):
    """A life that went wrong."""

    plan: Plan
    order: int
    problem: str

    @property
    def replay(self) -> str:
        """The command, in `tests`, that lives it again."""
        parts = [f"python -m worlds.world --seed {self.plan.seed} --order {self.order}"]
        whole = make_plan(self.plan.seed)
        if len(self.plan.calls) < len(whole.calls):
            parts.append("--calls=" + ",".join(str(call.number) for call in self.plan.calls))
        if len(self.plan.faults) < len(whole.faults):
            parts.append("--faults=" + ",".join(str(whole.faults.index(fault)) for fault in self.plan.faults))
        return " ".join(parts)

    def __str__(self) -> str:
        size = f"{len(self.plan.calls)} calls, {len(self.plan.faults)} faults"
        return f"seed {self.plan.seed} ({size}) went wrong:\n{self.problem}\nlive it again: {self.replay}"


class Total(NamedTuple):
    """Lives that went right, and what they amounted to."""

    lives: int
    calls: int
    virtual_seconds: float
    cpu_seconds: float


def live(plan: Plan, order: int = 0) -> Finding | None:
    """Live a plan. None: all went right."""
    return _lived(plan, order)[0]


def _lived(plan: Plan, order: int = 0) -> tuple[Finding | None, float]:
    """The same, and the seconds that it took in its world."""
    life = Life(plan, order)
    try:
        life.run()
    except Stuck as error:
        return Finding(plan, order, f"stuck: {error}"), life.now()
    except Exception as error:
        said = str(error) if isinstance(error, AssertionError) else repr(error)
        return Finding(plan, order, said), life.now()
    return None, life.now()


def explore(seeds: Iterable[int], tell: Callable[[Total], object] = lambda total: None) -> Total:
    """Live a life of each seed. Raises `AssertionError` with the first that goes wrong, made small."""
    lives, calls, virtual, began = 0, 0, 0.0, time.process_time()
    total = Total(0, 0, 0.0, 0.0)
    for seed in seeds:
        plan = make_plan(seed)
        finding, seconds = _lived(plan)
        if finding is not None:
            raise AssertionError(str(shrink(finding)))
        lives, calls, virtual = lives + 1, calls + len(plan.calls), virtual + seconds
        total = Total(lives, calls, virtual, time.process_time() - began)
        tell(total)
    return total


def shrink(finding: Finding, most: int = 300) -> Finding:
    """The same with as few calls and faults as `most` tries find: halves are left out, then quarters, then single ones
    (delta debugging, Zeller and Hildebrandt 2002)."""
    tries = 0
    best = finding
    size = max(len(best.plan.calls), len(best.plan.faults), 1)
    while size:
        smaller = False
        for left_out in _parts(best.plan, size):
            for order in dict.fromkeys((best.order, *range(ORDERS))):
                tries += 1
                found = live(left_out, order) if tries <= most else None
                if found is not None:
                    best, smaller = found, True
                    break
            if smaller:
                break
        if not smaller:
            size //= 2
    return best


def _parts(plan: Plan, size: int) -> Iterable[Plan]:
    """Plans without `size` calls or faults that stand together."""
    numbers = [call.number for call in plan.calls]
    for start in range(0, len(numbers), size):
        if len(numbers) > size:
            yield plan.without(calls=numbers[start : start + size])
    for start in range(0, len(plan.faults), size):
        yield plan.without(faults=range(start, min(start + size, len(plan.faults))))
