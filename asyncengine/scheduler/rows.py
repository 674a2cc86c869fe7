"""What a request's next row is, and how it ends. Functions of one request."""

from __future__ import annotations

from asyncengine.batch import ConstrainedToken, Row
from asyncengine.kvcache import KVCache
from asyncengine.protocols import GrammarMatcher
from asyncengine.scheduler.budget import TokenBudget
from asyncengine.scheduler.messages import EndReason
from asyncengine.scheduler.request import Request


def may_overlap(request: Request) -> bool:
    """May this request be launched again before its last token is known? Not if that reaches the length limit."""
    return len(request.tokens) + request.num_pending < request.max_total


def plain_end(request: Request, token: int) -> EndReason | None:
    """How an output ends with its last token, if it does and has no grammar."""
    if token in request.spec.stop_ids and request.num_output > request.spec.params.min_tokens:
        return "stop"
    return "length" if len(request.tokens) >= request.max_total else None


def constrained_end(
    matcher: GrammarMatcher, token: ConstrainedToken, reason: EndReason | None
) -> tuple[EndReason | None, str | None]:
    """How a constrained output ends with `token`, if it does: `reason` is what it would be without its grammar.

    The matcher itself is asked only where the budget is spent: till then a launched step may be moving it.
    """
    if token.complete:
        return "length" if token.steered else "stop", None
    if reason == "length" and (overrun := matcher.overrun()) is not None:
        return "error", overrun
    return reason, None


def next_row(request: Request, count: int) -> Row:
    """The next `count` positions of `request`."""
    assert request.table is not None
    start = request.num_launched
    known = len(request.tokens)
    return Row(
        request.spec,
        request.slot,
        start,
        count,
        request.tokens,
        start + count > known,
        request.table.pages,
        start + count == known + request.num_pending,
        request.adapter_slot,
        request.matcher,
    )


def widened(row: Row, request: Request, budget: TokenBudget, kv: KVCache) -> Row:
    """The row of a prompt that nobody shares the step with: as much more as budget and memory have for it."""
    assert request.table is not None
    count = row.num_scheduled
    more = budget.rest(len(request.tokens) - request.num_launched - count)
    if more <= 0 or not kv.grow(request.table, request.num_launched + count + more):
        return row
    budget.take(more)
    return next_row(request, count + more)
