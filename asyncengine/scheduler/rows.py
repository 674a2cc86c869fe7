"""The next row of a request, the budget that it comes out of, and the end of a request."""

from __future__ import annotations

from typing import NamedTuple

from asyncengine.kvcache import KVCache
from asyncengine.scheduler.messages import EndReason
from asyncengine.scheduler.request import Request
from asyncengine.step import Batch, ConstrainedToken, GrammarMatcher, Row, WindowPages


class InFlight(NamedTuple):
    """A launched step, and whose rows it carries, as of its launch."""

    batch: Batch
    requests: list[Request]
    epochs: list[int]


class TokenBudget:
    """Hands out at most `max_num_batched_tokens` positions to one step.

    A prompt gets at most `threshold` of them, so that one long prompt cannot make everybody else's step slow (vLLM's
    `long_prefill_token_threshold`). Whether it shares its step with others is known when nobody else is admitted: then
    `rest` gives it all. Who needs all its positions in one step (`whole`) gets all or none, and all if the step is its
    own: a text longer than the budget goes alone.
    """

    __slots__ = ("left", "threshold", "total")

    def __init__(self, total: int, threshold: int | None) -> None:
        self.total = self.left = total
        self.threshold = threshold

    def grant(self, wanted: int, whole: bool = False) -> int:
        """The number of `wanted` positions that this request may compute now (0 if the step is full). Takes nothing."""
        if whole:
            return wanted if wanted <= self.left or self.left == self.total else 0
        if wanted > 1 and self.threshold is not None:
            wanted = min(wanted, self.threshold)
        return min(wanted, self.left)

    def rest(self, wanted: int) -> int:
        """The number of `wanted` more positions that a request gets that has the step for itself. Takes nothing."""
        return min(wanted, self.left)

    def take(self, count: int) -> None:
        self.left = max(0, self.left - count)

    def give_back(self, count: int) -> None:
        self.left += count


def may_overlap(request: Request) -> bool:
    """May this request be launched again before its last token is known? Not if that reaches the length limit, and not
    if several may come, nor if a grammar may put another token there: a recurrent state that has taken one in cannot be
    taken back."""
    if request.drafts_launched:
        return False
    if request.matcher is not None and request.table is not None and request.table.state is not None:
        return False
    return len(request.tokens) + request.num_pending < request.spec.max_total


def plain_end(request: Request, token: int) -> EndReason | None:
    """The reason for which an output without a grammar ends with its last token, if it does."""
    spec = request.spec
    if token in spec.stop_ids and request.num_output > spec.params.min_tokens:
        return "stop"
    return "length" if len(request.tokens) >= spec.max_total else None


def constrained_end(
    matcher: GrammarMatcher, token: ConstrainedToken, reason: EndReason | None
) -> tuple[EndReason | None, str | None]:
    """The end of a constrained output with `token`, if it ends: `reason` is what it would be without its grammar.

    The matcher itself is asked only where the budget is spent: till then a launched step may be moving it.
    """
    if token.complete:
        return "length" if token.steered else "stop", None
    if reason == "length" and (overrun := matcher.overrun()) is not None:
        return "error", overrun
    return reason, None


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
    return Row._make((  # in half the time of calling the class
        request.spec, request.slot, start, count, request.tokens, end > known, pages, samples, request.adapter_slot,
        request.matcher, None, window, (),
    ))  # fmt: skip


def widened(row: Row, request: Request, budget: TokenBudget, kv: KVCache) -> Row:
    """The row of a prompt that nobody shares the step with: as much more as budget and memory have for it."""
    count = row.num_scheduled
    more = budget.rest(len(request.tokens) - request.num_launched - count)
    if more <= 0 or request.table is None or not kv.grow(request.table, request.num_launched + count + more):
        return row
    budget.take(more)
    return next_row(request, count + more)
