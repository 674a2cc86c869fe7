"""Recurrent states in steps: the slots that rows read and write, and the snapshots that they took.

A state cannot be taken back: once a row has moved it over a token, it is that of the next position. So nothing is
launched on a guess here (`rows.may_overlap`), and a request that loses its place, or whose state was lost on the
device, starts again from a snapshot.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from asyncengine.kvcache import KVCache
from asyncengine.scheduler.request import Request, RequestState
from asyncengine.scheduler.rows import InFlight
from asyncengine.step import Row, StepResult


def with_states(rows: Sequence[Row], requests: Sequence[Request], kv: KVCache, step: int) -> tuple[Row, ...]:
    """`rows` of launched step `step`, each with its state."""
    made = []
    for row, request in zip(rows, requests, strict=True):
        assert kv.states is not None
        assert request.table is not None
        assert request.table.state is not None
        full = row.start >= len(row.spec.prompt) and row.start % kv.page_size == 0
        use = kv.states.use(request.table.state, row.start, row.start + row.num_scheduled, step, full)
        made.append(row._replace(state=use))
    return tuple(made)


def settle_snapshots(flown: InFlight, result: StepResult, kv: KVCache, publish: Callable[[Request], None]) -> None:
    """Snapshots of a step that has retired go into the tree, behind the pages that it computed; of rows whose results
    do not count, they are given back."""
    states = kv.states
    assert states is not None
    for index, (row, request, epoch) in enumerate(zip(flown.batch.rows, flown.requests, flown.epochs, strict=True)):
        if row.state is None or not row.state.saves:
            continue
        here = request.state is RequestState.RUNNING and request.epoch == epoch
        if not here or index in result.errors or index in result.lost or request.table is None:
            states.discard(row.state.saves)
            continue
        request.num_computed = row.start + row.num_scheduled
        publish(request)
        assert request.table.state is not None
        states.settle(row.state.saves, request.table.state, request.table.node, kv.page_size)
