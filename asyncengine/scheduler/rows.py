"""What a request's next row is, and how a constrained request ends. Pure functions of one request."""

from __future__ import annotations

from asyncengine.batch import Row
from asyncengine.messages import EndReason
from asyncengine.protocols import GrammarMatcher
from asyncengine.request import Request


def may_overlap(request: Request) -> bool:
    """May this request be launched again before its last token is known?

    Not if that token decides the next one's mask, and not if it reaches the length limit in any case.
    """
    return request.matcher is None and len(request.tokens) + request.num_pending < request.max_total


def constrained_end(matcher: GrammarMatcher, reason: EndReason | None) -> tuple[EndReason | None, str | None]:
    """How a constrained output ends, if it does: `reason` is what it would be without its grammar."""
    if matcher.is_terminated():
        return "length" if matcher.steered else "stop", None
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
