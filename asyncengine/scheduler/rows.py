"""Rows of a step: the plan that they share a budget in, the next row of a request, and how an output ends."""

from __future__ import annotations

from typing import NamedTuple

from asyncengine.kvcache import KVCache, PageTable
from asyncengine.scheduler.messages import EndReason
from asyncengine.scheduler.request import Request
from asyncengine.step import Batch, ConstrainedToken, RecordType, Row, WindowPages


class InFlight(NamedTuple):
    """A launched step, and whose rows it carries, as of its launch."""

    batch: Batch
    requests: list[Request]
    epochs: list[int]
    at: float
    """Clock reading as of which it was scheduled."""
    num_prompt: int
    """Tokens that it computes beyond one of each request and its drafts: of prompts, all but the last ones."""


class Plan:
    """Rows of the step that is being planned, out of a budget of at most `max_num_batched_tokens` positions.

    A prompt gets at most `threshold` of them, so that one long prompt cannot make the steps of others slow (vLLM's
    `long_prefill_token_threshold`). Whether it shares its step with others is known when no other is admitted: then
    `widen` gives it all. A request that needs all its positions in one step (`whole`) gets all or none, and all if the
    step is its own: a text longer than the budget goes alone.
    """

    __slots__ = ("copies", "left", "rows", "threshold", "total")

    def __init__(self, total: int, threshold: int | None) -> None:
        self.total = self.left = total
        self.threshold = threshold
        self.rows: dict[int, Row] = {}
        """Rows by ticket, in the order in which they were planned."""
        self.copies: dict[int, list[tuple[RecordType, int, int]]] = {}
        """`Batch.copies` by the ticket whose row reads the copy."""

    def grant(self, wanted: int, whole: bool = False) -> int:
        """Number of `wanted` positions that a request may compute now (0 if the step is full). Takes nothing."""
        if whole:
            return wanted if wanted <= self.left or self.left == self.total else 0
        if wanted > 1 and self.threshold is not None:
            wanted = min(wanted, self.threshold)
        return min(wanted, self.left)

    def add(self, request: Request, count: int) -> None:
        """Plan the next `count` positions of `request`."""
        self.rows[request.ticket] = next_row(request, count)
        self.left = max(0, self.left - count)

    def drop(self, request: Request) -> None:
        """Take `request` out of this step."""
        self.copies.pop(request.ticket, None)
        planned = self.rows.pop(request.ticket, None)
        if planned is not None:
            self.left += planned.num_scheduled

    def widen(self, request: Request, kv: KVCache) -> None:
        """Give `request`, which has the step for itself, as much more of its prompt as budget and memory have."""
        count = self.rows[request.ticket].num_scheduled
        most = request.with_one_adapter(len(request.tokens) - request.num_launched)
        more = min(self.left, most - count)
        if more > 0 and request.table is not None and kv.grow(request.table, request.num_launched + count + more):
            self.drop(request)
            self.add(request, count + more)


def is_stream(request: Request) -> bool:
    """Whether this request is past its prompt, and more tokens will come after those in flight."""
    total = len(request.tokens) + request.num_pending
    return total - request.num_launched <= 1 and total < request.spec.max_total


def may_overlap(request: Request) -> bool:
    """Whether this request may be launched again before its last token is known. Not if that reaches the length limit,
    if several tokens may come, or if a grammar may put another one there: a recurrent state that has taken one in stays
    as it is. Nor if a sampling parameter reads it."""
    if request.drafts_launched or request.spec.one_by_one:
        return False
    if request.matcher is not None and request.table is not None and request.table.state is not None:
        return False
    return len(request.tokens) + request.num_pending < request.spec.max_total


def plain_end(request: Request, token: int) -> EndReason | None:
    """Reason for which an output without a grammar ends with its last token; None: it goes on."""
    spec = request.spec
    if token in spec.stop_ids and request.num_output > spec.params.min_tokens:
        return "stop"
    return "length" if len(request.tokens) >= spec.max_total else None


def constrained_end(
    request: Request, token: ConstrainedToken, reason: EndReason | None
) -> tuple[EndReason | None, str | None]:
    """Reason and error with which a constrained output ends, if it does; `reason` is the one without its grammar.

    The matcher itself is asked only where the budget is spent: till then a launched step may be moving it.
    """
    assert request.matcher is not None
    steered = token.steered_from is not None
    offered = steered and request.spec.params.on_budget == "offer"
    if token.complete:
        return "length" if steered and not offered else "stop", None
    if reason == "length" and (overrun := request.matcher.overrun()) is not None:
        return "error", overrun
    return "stop" if reason == "length" and offered else reason, None


def can_copy(source: PageTable, table: PageTable) -> bool:
    """Whether `source` begins with the same shared pages as `table`, and still has the page behind them."""
    index, window = table.num_shared, source if source.window is None else source.window
    if source.namespace != table.namespace or max(source.num_unseen, window.num_unseen) > index:
        return False
    return not index or source.pages[index - 1 : index] == table.pages[index - 1 : index]


def copied(source: PageTable, table: PageTable) -> list[tuple[RecordType, int, int]]:
    """`Batch.copies` by which the first page of `table` behind its shared ones becomes one of `source`."""
    index, pairs = table.num_shared, [(RecordType.PAGE, source, table)]
    if source.window is not None and table.window is not None:
        pairs.append((RecordType.WINDOW, source.window, table.window))
    return [(type_, old.pages[index - old.first], new.pages[index - new.first]) for type_, old, new in pairs]


def next_row(request: Request, count: int) -> Row:
    """The next `count` positions of `request`."""
    start = request.num_launched
    end = start + count
    known = len(request.tokens)
    table = request.table
    near = None if table is None else table.window
    window = None if near is None else WindowPages(near.first, near.pages)
    samples = end == known + request.num_pending
    pages = [] if table is None else table.pages
    adapter = request.adapter_slot
    if request.adapter_from is not None and start < request.adapter_from:
        adapter = 0
    return Row._make((  # in half the time of calling the class
        request.spec, request.slot, start, count, request.tokens, end > known, pages, samples, adapter,
        request.matcher, None, window, (),
    ))  # fmt: skip
