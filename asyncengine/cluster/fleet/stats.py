"""What a fleet reports about itself: the sum of its replicas, and each of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import zip_longest
from typing import Any

from asyncengine.kvcache import PageCounts, StateCounts
from asyncengine.stats import EngineStats, Summary, ThreadStats


@dataclass(frozen=True, slots=True)
class FleetStats(EngineStats):
    """Counts are sums over the replicas there are, of which each tells its own at least every half second; of
    `first_token` and `inter_token`, what consumers here saw; of the other distributions, what the slowest replica has.
    """

    replicas: Mapping[str, EngineStats] = field(default_factory=dict)
    """By name."""
    loads: Mapping[str, float] = field(default_factory=dict)
    """Samples that each replica has now, by name."""
    lost: int = 0
    """Replicas that were lost."""
    resumed: int = 0
    """Requests that went on elsewhere."""
    matched_pages: int = 0
    """Pages of prompts that were expected to be cached where their requests were sent."""


def summed(replicas: Mapping[str, EngineStats], own: EngineStats) -> dict[str, object]:
    """Fields of `EngineStats`: of `replicas` together, and of `own`, what this process measured."""
    each = list(replicas.values())
    values: dict[str, object] = {}
    for item in fields(EngineStats):
        name = item.name
        of_each = [getattr(stats, name) for stats in each]
        mine = getattr(own, name)
        if name in ("first_token", "inter_token", "finished", "uptime", "loop_lag", "requests", "adapters"):
            values[name] = mine
        elif isinstance(mine, int):
            values[name] = sum(of_each)
        elif isinstance(mine, Summary):
            values[name] = max(of_each, key=lambda summary: summary.p50, default=mine)
        elif isinstance(mine, (PageCounts, StateCounts)):
            values[name] = _added([mine, *of_each])
        elif name == "speculation":
            guessed = [stats for stats in of_each if stats is not None]
            values[name] = _added(guessed) if guessed else None
        elif isinstance(mine, ThreadStats):
            values[name] = _threads(of_each)
    return values


def _added(counts: Sequence[Any]) -> Any:
    """Counts of one type, field by field; of tuples, place by place."""
    sums = {}
    for item in fields(counts[0]):
        each = [getattr(count, item.name) for count in counts]
        several = isinstance(each[0], tuple)
        sums[item.name] = tuple(map(sum, zip_longest(*each, fillvalue=0))) if several else sum(each)
    return replace(counts[0], **sums)


def _threads(each: Sequence[ThreadStats]) -> ThreadStats:
    now = sum(threads.now for threads in each)
    used = sum(threads.now * threads.efficiency for threads in each)
    return ThreadStats(now, sum(threads.most for threads in each), used / now) if now else ThreadStats()
