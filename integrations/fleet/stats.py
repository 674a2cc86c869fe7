"""Statistics of a fleet: the sum of its replicas, and each of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import zip_longest
from typing import Any

from asyncengine.integrations.fleet.dispatcher import Dispatcher
from asyncengine.integrations.placement.routing import Role
from asyncengine.kvcache import PageCounts
from asyncengine.stats import EngineStats, Summary, ThreadStats

_MEASURED_HERE = ("first_token", "inter_token", "finished", "uptime", "loop_lag", "requests", "adapters", "state")
"""Fields of `EngineStats` that the fleet's own process measures."""


@dataclass(frozen=True, slots=True)
class FleetStats(EngineStats):
    """A snapshot of a fleet. Counts are sums over its replicas, each of which tells its own at least every half second;
    `first_token` and `inter_token` are what consumers here saw; the other distributions are the slowest replica's.
    """

    replicas: Mapping[str, EngineStats] = field(default_factory=dict)
    """Statistics of each replica, by name."""
    loads: Mapping[str, float] = field(default_factory=dict)
    """Samples, and prompts for other replicas, that each replica has now, by name."""
    lost: int = 0
    """Replicas that were lost."""
    resumed: int = 0
    """Requests that went on elsewhere."""
    matched_pages: int = 0
    """Pages of prompts that were expected to be cached where their requests were sent."""
    roles: Mapping[str, Role] = field(default_factory=dict)
    """Role of each replica, by name."""
    prefilled: int = 0
    """Prompts that one replica computed and another one pulled."""
    prefills_failed: Mapping[str, int] = field(default_factory=dict)
    """Prompts that were to be, and were computed by their requests' own replicas, by reason: the other replica was
    "lost" or has "refused" the prompt, or not all of its pages came from there ("missing")."""


def fleet_stats(dispatcher: Dispatcher, started_at: float) -> FleetStats:
    """Statistics of a fleet that was started at `started_at` by its clock. From any thread."""
    by_replica = {replica.name: stats for replica in list(dispatcher.replicas.values()) if (stats := replica.stats)}
    running = [request.begun for request in list(dispatcher.requests.values())]
    requests = {"waiting": running.count(False), "running": sum(running), "grammar_queue": 0, "adapter_queue": 0}
    zeros: dict[str, Any] = {item.name: 0 for item in fields(EngineStats) if item.type == "int"}
    here = EngineStats(
        requests=requests, finished=dispatcher.loop.finished(), pages=PageCounts(),
        uptime=dispatcher.clock.now() - started_at, adapters=dispatcher.adapters.counts(),
        **dispatcher.loop.meter.summaries(), **zeros,
    )  # fmt: skip
    return FleetStats(
        **sum_stats(by_replica, here), replicas=by_replica, loads=dispatcher.router.loads(), lost=dispatcher.lost,
        resumed=dispatcher.resumed, matched_pages=dispatcher.matched_pages, roles=dispatcher.router.roles(),
        prefilled=dispatcher.prefills.pulled, prefills_failed=dict(dispatcher.prefills.failed),
    )  # fmt: skip


def sum_stats(replicas: Mapping[str, EngineStats], here: EngineStats) -> dict[str, Any]:
    """Fields of `EngineStats`, by name: of `replicas` together, or of `here` for those that this process measures."""
    values: dict[str, Any] = {}
    for item in fields(EngineStats):
        value = getattr(here, item.name)
        values_of = [getattr(stats, item.name) for stats in replicas.values()]
        if item.name in _MEASURED_HERE:
            values[item.name] = value
        elif isinstance(value, Summary):
            values[item.name] = max(values_of, key=lambda summary: summary.p50, default=value)
        elif isinstance(value, ThreadStats):
            values[item.name] = _threads(values_of)
        else:
            counts = [count for count in (value, *values_of) if count is not None]
            values[item.name] = _added(counts) if counts else None
    return values


def _added(counts: Sequence[Any]) -> Any:
    """Sums of counts of one type: of dataclasses field by field, of tuples item by item."""
    if isinstance(counts[0], tuple):
        return tuple(map(sum, zip_longest(*counts, fillvalue=0)))
    if isinstance(counts[0], (int, float)):
        return sum(counts)
    names = [item.name for item in fields(counts[0])]
    return replace(counts[0], **{name: _added([getattr(count, name) for count in counts]) for name in names})


def _threads(stats: Sequence[ThreadStats]) -> ThreadStats:
    now = sum(threads.now for threads in stats)
    used = sum(threads.now * threads.efficiency for threads in stats)
    return ThreadStats(now, sum(threads.most for threads in stats), used / now) if now else ThreadStats()
