"""A snapshot of a running engine's figures."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from asyncengine.engine.loop import EngineLoop
from asyncengine.engine.prefix_store import PrefixStore
from asyncengine.kvcache.store.counts import StoreCounts
from asyncengine.speculation.planner import SpeculationCounters
from asyncengine.stats import EngineStats, ImageStats, SpeculationStats, ThreadStats

if TYPE_CHECKING:
    from asyncengine.lora.registry import AdapterRegistry


def snapshot(
    loop: EngineLoop, adapters: AdapterRegistry | None, threads: ThreadStats, started_at: float
) -> EngineStats:
    """From any thread: nothing is locked, so counts may be a step apart from each other."""
    scheduler, meter, counters = loop.scheduler, loop.meter, loop.scheduler.counters
    running = list(scheduler.running.values())
    totals = {name: count for name, count in asdict(counters).items() if not name.startswith("left_queue")}
    stored = [source.store.counts for source in loop.sources.tiers if isinstance(source, PrefixStore)]
    tables = [table for r in running if (table := r.table) is not None]
    return EngineStats(
        requests={
            "waiting": scheduler.num_waiting,
            "running": len(running),
            "grammar_queue": len(scheduler.grammar_queue),
            "adapter_queue": len(scheduler.adapter_queue),
            "restore_queue": len(scheduler.restores.queue),
            "suspended": len(scheduler.roster.suspended),
        },
        finished=loop.finished(),
        pages=scheduler.kv.counts(tables),
        **totals,
        **meter.summaries(),
        uptime=loop.clock.now() - started_at,
        adapters={} if adapters is None else adapters.counts(),
        threads=threads,
        window_pages=scheduler.kv.window_counts(tables),
        states=scheduler.kv.state_counts(tables),
        stored=stored[0] if stored else StoreCounts(),
        speculation=_speculation(scheduler.speculation),
        state="awake" if loop.asleep is None else loop.asleep.state,
        images=ImageStats(scheduler.encoding.encoded, scheduler.encoding.found, scheduler.encoding.nbytes),
    )


def _speculation(counters: SpeculationCounters | None) -> SpeculationStats | None:
    if counters is None:
        return None
    by_position = tuple(counters.by_position)
    return SpeculationStats(counters.rows, counters.drafted, counters.accepted, by_position, *counters.by_model)
