"""A check that an idle engine has given everything back."""

from __future__ import annotations

from asyncengine.engine.frontend import Frontend


def assert_nothing_held(core: Frontend) -> None:
    """Raise `AssertionError` unless the idle engine holds nothing: request, stream, place in the queue, page, slot.

    Cached pages and snapshots are not held: they are given up as soon as a request needs them.
    """
    scheduler = core.loop.scheduler
    scheduler.check()
    problems = {
        "requests": len(scheduler.requests),
        "running": len(scheduler.running),
        "waiting": scheduler.num_waiting,
        "streams": len(core.loop.delivery.streams),
        "places in the queue": core.loop.queue_limit.waiting,
        "steps in flight": len(core.loop.in_flight),
    }
    pages = scheduler.kv.counts([])
    problems["shared pages"] = pages.shared
    problems["retiring pages"] = pages.retiring
    problems["missing pages"] = pages.total - pages.free - pages.cached
    near = scheduler.kv.window_counts([])
    problems["missing window pages"] = near.total - near.free - near.cached
    states = scheduler.kv.state_counts([])
    problems["missing states"] = states.total - states.free - states.snapshots
    leaks = {name: count for name, count in problems.items() if count}
    if leaks:
        raise AssertionError(f"the engine still holds {leaks}")
