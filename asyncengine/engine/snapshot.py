"""A snapshot of a running engine: its figures, its requests, its prefix cache. From any thread."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from asyncengine.engine.loop import EngineLoop
from asyncengine.engine.prefix_store import PrefixStore
from asyncengine.engine.serving_loop import ServingLoop
from asyncengine.kvcache.radix_tree import Node
from asyncengine.kvcache.store.record import StoreCounts
from asyncengine.scheduler import Scheduler
from asyncengine.scheduler.request import Request, RequestState
from asyncengine.stats import EngineStats, ImageStats, PrefixRun, RequestInfo, SpeculationStats, ThreadStats

if TYPE_CHECKING:
    from asyncengine.lora.registry import AdapterRegistry


def snapshot(loop: EngineLoop, adapters: AdapterRegistry | None, started_at: float) -> EngineStats:
    """From any thread: nothing is locked, so counts may be a step apart from each other."""
    scheduler, meter, counters = loop.scheduler, loop.meter, loop.scheduler.counters
    running = list(scheduler.running.values())
    totals = {name: count for name, count in asdict(counters).items() if not name.startswith("left_queue")}
    stored = [source.store.counts for source in loop.sources.tiers if isinstance(source, PrefixStore)]
    tables = [table for r in running if (table := r.table) is not None]
    speculation = None
    if (guesses := scheduler.speculation) is not None:
        figures = guesses.rows, guesses.drafted, guesses.accepted, tuple(guesses.by_position), *guesses.by_model
        speculation = SpeculationStats(*figures)
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
        threads=loop.runner.executor.threads() or ThreadStats(),
        window_pages=scheduler.kv.window_counts(tables),
        states=scheduler.kv.state_counts(tables),
        stored=stored[0] if stored else StoreCounts(),
        speculation=speculation,
        state="awake" if loop.asleep is None else loop.asleep.state,
        images=ImageStats(scheduler.encoding.encoded, scheduler.encoding.reused, scheduler.encoding.nbytes),
    )


_WAITS_FOR = {
    RequestState.RUNNING: "", RequestState.GRAMMAR_QUEUE: "its grammar, which is compiled",
    RequestState.ADAPTER_QUEUE: "its adapter, which is loaded",
    RequestState.RESTORE_QUEUE: "its prefix, which a disk or another engine may have",
}  # fmt: skip


def list_requests(loop: ServingLoop) -> tuple[RequestInfo, ...]:
    """Every request that has not ended, in order of arrival; none of a fleet, whose replicas have them."""
    if not isinstance(loop, EngineLoop):
        return ()
    scheduler, now = loop.scheduler, loop.clock.now()
    drafting = {} if scheduler.roster.drafts is None else scheduler.roster.drafts.requests
    listed = []
    for request in list(scheduler.requests.values()):
        spec, draft_state = request.spec, drafting.get(request.ticket)
        guesses = (0, 0) if draft_state is None else draft_state.guesses
        state = "suspended" if request.suspended else request.state.value
        counts = request.cached_tokens, request.num_computed, request.num_output, spec.max_total - spec.prompt_len
        why, age, adapter = _waits_for(request, scheduler), now - spec.arrival, spec.options.adapter
        facts = spec.request_id, spec.index, state, why, age, adapter, spec.prompt_len
        listed.append(RequestInfo(*facts, *counts, *guesses, request.preemptions))
    return tuple(listed)


def _waits_for(request: Request, scheduler: Scheduler) -> str:
    """The resource that a request lacks to run, in the order in which the scheduler checks them."""
    roster, kv = scheduler.roster, scheduler.kv
    if request.suspended:
        return "its reader, who has not taken what there is"
    if request.state in _WAITS_FOR:
        return _WAITS_FOR[request.state]
    if request.ticket in roster.weights.held or roster.weights.stop_steps:
        return "the end of a pause, or other weights"
    if not roster.slots.num_free:
        return f"a place: {roster.slots.total} requests run"
    if not roster.slots.adapter_fits(request):
        return "a slot for its adapter"
    needed = kv.pages_for(len(request.tokens))
    return f"pages: it needs up to {needed} of {kv.pool.capacity}" if needed > kv.num_available else "its turn"


def prefix_runs(loop: ServingLoop, most: int) -> tuple[PrefixRun, ...]:
    """The prefix cache's tree, level by level, up to `most` runs of pages; none of a fleet."""
    roots = list(loop.scheduler.kv.tree.roots.values()) if isinstance(loop, EngineLoop) else []
    todo: list[tuple[Node, int]] = [(root, -1) for root in roots]
    runs: list[PrefixRun] = []
    for node, parent in todo:  # which grows
        if len(runs) == most:
            break
        pages, last, children = int(bool(node.page)), node, list(node.children.values())
        while len(children) == 1 and node.page and children[0].locks == node.locks:
            last, pages = children[0], pages + bool(children[0].page)
            children = list(last.children.values())
        todo += [(child, len(runs)) for child in children]
        runs.append(PrefixRun(parent, pages, node.locks, node.hits))
    return tuple(runs)
