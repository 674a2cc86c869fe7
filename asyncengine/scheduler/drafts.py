"""Drafts for the rows of a planned step: the rest of the budget is spent on guesses (`asyncengine.speculation`)."""

from __future__ import annotations

from itertools import takewhile

from asyncengine.config import SpeculationSettings
from asyncengine.kvcache import KVCache
from asyncengine.scheduler.request import Request
from asyncengine.scheduler.roster import Roster
from asyncengine.scheduler.rows import next_row
from asyncengine.seams import LONG_ADAPTER_RUN
from asyncengine.speculation import DraftPlanner
from asyncengine.speculation.costs import StepCosts
from asyncengine.speculation.planner import Candidate
from asyncengine.step import Row, StepResult


class Drafting:
    """Asks the roster's planner, if it has one, for drafts of running requests."""

    def __init__(self, roster: Roster, adapters: bool) -> None:
        """`adapters`: requests with an adapter have drafts as well."""
        self._roster = roster
        self._adapters = adapters

    def add(self, rows: dict[int, Row], budget: int) -> None:
        """Give `rows`, by ticket, the drafts that are worth their time: none where another request's prompt is
        computed, at most `budget` of them, and only on free pages."""
        planner, kv, running = self._roster.drafts, self._roster.kv, self._roster.running
        if planner is None:
            return
        if kv.states is not None:
            budget = min(budget, kv.states.most_guesses)
        tokens, prompt = 0, False
        for row in rows.values():
            tokens += row.num_scheduled
            prompt = prompt or row.start < len(row.spec.prompt)
        if prompt and len(rows) > 1:
            return
        if any(row.adapter_slot for row in rows.values()):
            budget = min(budget, LONG_ADAPTER_RUN - 1 - tokens)  # more tokens would change the order of sums, and bits
        candidates: list[Candidate] = []
        for ticket, row in rows.items():
            request = running[ticket]
            behind = not row.samples or row.in_flight or request.num_pending  # a token that is on its way
            wanted = row.spec.options.speculation is not False
            if not behind and wanted and (self._adapters or not row.adapter_slot):
                most = min(budget, _room(request, row, kv))
                if most > 0:
                    candidates.append(self._candidate(request, most))
        if not candidates:
            return
        if prompt:
            drafted = {candidate.key: planner.plan_behind_prompt(candidate, tokens) for candidate in candidates}
        else:
            drafted = planner.plan(candidates, tokens, len(rows))
        for ticket, planned in drafted.items():
            row, request = rows[ticket], running[ticket]
            table = request.table
            assert table is not None
            end = row.start + row.num_scheduled
            if end + len(planned) > len(table.pages) * kv.page_size and kv.num_free:
                # the page that its next token would have asked for, and with it for what windows have passed
                kv.release(table, request.num_computed, request.last_step)
                kv.grow(table, end + len(planned))
                row = next_row(request, row.num_scheduled)  # of the pages that are left
            drafts = planned[: min(budget, len(table.pages) * kv.page_size - end)]
            if row.spec.images:  # a picture in the text is not to be guessed, and the draft model sees none
                drafts = tuple(takewhile(lambda token: token >= 0, drafts))
            budget -= len(drafts)
            if drafts:
                rows[ticket] = row._replace(num_scheduled=row.num_scheduled + len(drafts), drafts=drafts)

    def worth_waiting(self, request: Request) -> bool:
        """Whether `request` should not be launched behind its token that is on its way, because guesses will do more:
        its next step then knows the token, and can carry some."""
        planner, spec = self._roster.drafts, request.spec
        if planner is None or spec.options.speculation is False or (request.adapter_slot and not self._adapters):
            return False
        most = spec.max_total - len(request.tokens) - 2
        return most > 0 and planner.promises(self._candidate(request, most), len(self._roster.running))

    def _candidate(self, request: Request, room: int) -> Candidate:
        return Candidate(request.ticket, request.spec, request.tokens, self._roster.namespace(request), room)


def _room(request: Request, row: Row, kv: KVCache) -> int:
    """Number of drafts that the request's length allows, and its pages with one more that is free."""
    table = request.table
    assert table is not None
    end = row.start + row.num_scheduled
    num_pages = len(table.pages) + (1 if kv.num_free else 0)
    return min(request.spec.max_total - len(request.tokens) - 1, num_pages * kv.page_size - end)


def settle_drafts(planner: DraftPlanner | None, row: Row, result: StepResult, index: int) -> int:
    """Number of the row's drafts that stand, which the planner learns."""
    accepted = result.accepted.get(index, 0) if row.drafts else 0
    if row.drafts and planner is not None:
        planner.learn(row.spec.ticket, result.drafted.get(index, 0), accepted)
    return accepted


def draft_planner(config: SpeculationSettings) -> DraftPlanner | None:
    """The planner that the configuration asks for; None: there are no drafts. Costs have been measured by then."""
    if config.speculation == "off" or config.speculation_costs is None:
        return None
    draft_costs = None
    if config.draft_costs is not None:
        draft_costs = StepCosts(config.draft_costs, config.speculation_costs[0])
    costs = StepCosts(config.speculation_costs)
    return DraftPlanner(
        costs, config.speculation_tokens, int(config.speculation_memory), draft_costs=draft_costs,
        falls_behind=config.draft_model is not None,
    )  # fmt: skip
