"""Recurrent states in steps: the slots that rows read and write, and the snapshots that they took.

A state cannot be taken back: once a row has moved it over a token, it is that of the next position. So a row with
drafts leaves the state before each of them (`StateUse.guesses`), nothing is launched before it is known whether a
grammar lets a token stand (`rows.may_overlap`), and a request that loses its place, or whose state was lost on the
device, starts again from a snapshot.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from asyncengine.kvcache import KVCache
from asyncengine.scheduler.request import Request, RequestState
from asyncengine.scheduler.rows import InFlight
from asyncengine.step import Row, StepResult


def with_states(rows: Sequence[Row], requests: Sequence[Request], kv: KVCache, step: int) -> tuple[Row, ...]:
    """`rows` of launched step `step`, each with its state, and with as many of its drafts as there are slots for."""
    planned = []
    for row, request in zip(rows, requests, strict=True):
        assert kv.states is not None
        assert request.table is not None
        assert request.table.state is not None
        full = row.start >= len(row.spec.prompt) and row.start % kv.page_size == 0
        count = row.num_scheduled - len(row.drafts)
        use = kv.states.use(request.table.state, row.start, row.start + count, step, full, len(row.drafts))
        drafts = row.drafts[: len(use.guesses)]
        planned.append(row._replace(state=use, num_scheduled=count + len(drafts), drafts=drafts))
    return tuple(planned)


def settle_snapshots(flown: InFlight, result: StepResult, kv: KVCache, publish: Callable[[Request], None]) -> None:
    """Snapshots of a step that has retired go into the tree, behind the pages that it computed, and requests go on from
    the states before their first wrong drafts; of rows whose results do not count, slots are given back."""
    states = kv.states
    assert states is not None
    for index, (row, request, epoch) in enumerate(zip(flown.batch.rows, flown.requests, flown.epochs, strict=True)):
        use = row.state
        if use is None or not (use.saves or use.guesses):
            continue
        here = request.state is RequestState.RUNNING and request.epoch == epoch
        if not here or index in result.errors or index in result.lost or request.table is None:
            states.discard(use.saves)
            states.settle_guesses(use)
            continue
        working, position = request.table.state, row.start + row.num_scheduled - len(row.drafts)
        assert working is not None
        if use.saves:
            request.num_computed = position
            publish(request)
            states.settle(use.saves, working, request.table.node, kv.page_size)
        if use.guesses:
            accepted, computed = result.accepted.get(index, 0), result.drafted.get(index, 0)
            page = (position + accepted - 1) // kv.page_size * kv.page_size  # the last that they fill and go beyond
            filled = page - position if page >= max(position, len(row.spec.prompt)) else None
            states.settle_guesses(use, working, accepted, computed, filled if accepted else None)
