"""Admission: requests start running from the waiting queue, in the policy's order, while budget and memory last.

Memory blocks: if the first in order does not fit, no request behind it starts, or a long prompt would wait for ever.
Everything else is skipped, not blocking: an adapter that does not fit beside the running ones, samples whose prompt the
first sample is still computing, and prompts whose next page or snapshot a running request is computing right now
(`frontiers`: they wait for it and start from it, so a prefix shared by many simultaneous requests is computed once). A
request that has been passed over `max_passes` times is not skipped any more; no other starts before it. If what it
lacks is a slot for its adapter, only that is kept from others: of the adapters that run, the one that will be done
first takes no more requests until its slot is free (the drain rule of S-LoRA and SGLang #15129, for one slot instead of
all).

Where the policy says so, the first in order takes the place of a running request, the least important of those that it
goes before: its slot, its pages, its state, or the slot of an adapter that only such requests use. Resources on their
way back are waited for, no request gives way in vain, and in a step in which one gave way only those start that go
before it, too. An overdue request keeps running.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from enum import Enum
from itertools import islice

from asyncengine.config import BatchingSettings
from asyncengine.kvcache import KVCache, PageTable
from asyncengine.kvcache.radix_tree import Namespace, Node
from asyncengine.kvcache.sessions import continue_branch
from asyncengine.kvcache.states import WorkingState
from asyncengine.policies import Policy, overrides, victim_rank
from asyncengine.scheduler.queues import WaitingQueue
from asyncengine.scheduler.request import Request, RequestState
from asyncengine.scheduler.rows import Plan
from asyncengine.scheduler.slots import Slots

# Pages and snapshots that running requests are about to leave in the cache: others wait for them, and compute less.


class PageFrontiers:
    """Pages that are about to be computed: each by its parent in the tree and its tokens."""

    def __init__(self, kv: KVCache) -> None:
        self._kv = kv
        self._pages: dict[tuple[Node, tuple[int, ...]], int] = {}

    def add(self, request: Request) -> None:
        """`request` runs: note the page it computes next, if it is a full page of a prompt that will be published, or
        the last one, which will be copied."""
        table = request.table
        if table is None or not self._kv.prefix_caching or request.num_computed >= len(request.tokens) - 1:
            return
        page = self._next_page(table, request)
        if len(page[1]) == self._kv.page_size or self._kv.copies:
            self._pages[page] = request.ticket

    def foresee(self, request: Request, namespace: Namespace, limit: int, leader: Request | None = None) -> None:
        """`request` waits, and may find up to `limit` tokens cached in `namespace`: see that the running requests leave
        behind the state that it will start from; `leader`: ask this one only. Pages are left behind in any case."""

    def awaits(self, request: Request, table: PageTable) -> bool:
        """Whether `request`, which could start with `table`, should rather wait."""
        return self._next_page(table, request) in self._pages

    def _next_page(self, table: PageTable, request: Request) -> tuple[Node, tuple[int, ...]]:
        start = table.num_shared * self._kv.page_size
        return (table.node, tuple(request.keys[start : start + self._kv.page_size]))


class SnapshotFrontiers:
    """Running requests that have snapshots yet to take, asked as `PageFrontiers`."""

    most = 4
    """Snapshots of one request that are yet to come: beyond that, no further branch is noted."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._leaders: list[Request] = []

    def add(self, request: Request) -> None:
        state = None if request.table is None else request.table.state
        if state is not None and (state.marks or state.saving):
            self._leaders.append(request)

    def foresee(self, request: Request, namespace: Namespace, limit: int, leader: Request | None = None) -> None:
        for state, tokens in self._leading(namespace, self._leaders if leader is None else (leader,)):
            if request.ticket in state.common:
                continue
            common = self._common(state, tokens, request.keys, limit)
            state.common[request.ticket] = common
            if common > state.position and common not in state.marks and len(state.marks) < self.most:
                state.marks = sorted([*state.marks, common])

    def awaits(self, request: Request, table: PageTable) -> bool:
        start = table.num_shared * self._page_size
        for state, _ in self._leading(table.namespace, self._leaders):
            common = state.common.get(request.ticket, 0)
            if any(start < mark <= common for mark in (*state.saving, *state.marks)):
                return True
        return False

    @staticmethod
    def _leading(namespace: Namespace, leaders: Iterable[Request]) -> Iterator[tuple[WorkingState, list[int]]]:
        for leader in leaders:
            table = leader.table
            if table is not None and table.state is not None and table.namespace == namespace:
                yield table.state, leader.keys

    def _common(self, state: WorkingState, one: list[int], other: list[int], limit: int) -> int:
        """Number of tokens in full pages that the two begin with alike; 0 if less than any snapshot to come."""
        size = self._page_size
        first = state.saving[0] if state.saving else state.position + size
        if first > limit or one[first - size : first] != other[first - size : first]:
            return 0
        return common_pages(one, other, min(limit, len(one) - 1), size)


Frontiers = PageFrontiers | SnapshotFrontiers


def frontiers(kv: KVCache, running: Iterable[Request]) -> Frontiers:
    """Frontiers of the requests that run now."""
    result: Frontiers = PageFrontiers(kv) if kv.states is None else SnapshotFrontiers(kv.page_size)
    for request in running:
        result.add(request)
    return result


def common_pages(one: Sequence[int], other: Sequence[int], limit: int, page_size: int) -> int:
    """Number of tokens in full pages that `one[:limit]` and `other[:limit]` begin with alike."""
    same, differs = 0, limit // page_size + 1
    while differs - same > 1:
        middle = (same + differs) // 2
        span = slice(same * page_size, middle * page_size)
        if one[span] == other[span]:
            same = middle
        else:
            differs = middle
    return same * page_size


_WALK = 16
"""Waiting requests examined in a step, as a multiple of the lookahead: skipping one of a blocked adapter is cheap, and
behind it may be many whose adapter is running."""


class Verdict(Enum):
    ADMITTED = "admitted"
    SKIPPED = "skipped"
    """Not now; requests behind it may start."""
    NO_SLOT = "no slot"
    """Its adapter does not fit beside the running ones, nor does it for others with that adapter; else as SKIPPED."""
    FULL = "full"
    """No memory or slot for it; requests behind it must not take them either."""
    HOPELESS = "hopeless"
    """Preempting every request that it goes before would not help; else as FULL."""


class _Beside:
    """The requests that run while others are admitted: their frontiers in the cache, and the pages they will need."""

    def __init__(self, kv: KVCache, running: dict[int, Request]) -> None:
        self.running = running
        self.ahead = frontiers(kv, running.values())
        self._kv = kv
        self._promised = [0] * len(kv.groups)
        self._uncounted = list(running.values())

    def add(self, request: Request) -> None:
        """`request` runs from now on, with the pages of its first step."""
        self.ahead.add(request)
        self._uncounted.append(request)

    def computes_the_prompt_of(self, request: Request) -> bool:
        """Whether the first sample of the same prompt is computing it."""
        group = request.spec.group
        first = None if group is None else self.running.get(group)
        return first is not None and first.num_computed < first.spec.prompt_len and not first.num_output

    def promised(self) -> list[int]:
        """Pages of each of the cache's groups that they will need."""
        more, self._uncounted = self._kv.promised(tables_of(self._uncounted)), []
        self._promised = [sum(both) for both in zip(self._promised, more, strict=True)]
        return self._promised


class Admission:
    """Moves requests from waiting to running. Stateless between steps."""

    def __init__(self, config: BatchingSettings, kv: KVCache, policy: Policy, slots: Slots) -> None:
        self._kv = kv
        self._policy = policy
        self._slots = slots
        self._lookahead = config.admission_lookahead
        self._max_passes = config.max_passes
        self.preempts = overrides(policy, "preempts")
        self.rank = victim_rank(policy)

    def admit(
        self, waiting: WaitingQueue, running: dict[int, Request], plan: Plan, behind: list[Request],
        preempt: Callable[[Request], None],
    ) -> Iterator[Request]:  # fmt: skip
        """Yield each request as it is admitted; the caller plans its first row before asking for the next.

        Only those start that go before each of `behind`. `preempt`: makes a running request give way.
        """
        if not (self.preempts or self._kv.states or (plan.left and self._slots.num_free)):
            return  # no request can start or preempt, and no snapshot need be asked for
        self._refresh_keys(waiting)  # before `in_order`, which sorts by them
        beside = self._look(waiting, running)
        admitted: list[Request] = []
        blocked: dict[str, None] = {}
        draining = ""
        skipped = 0
        for request in islice(waiting.in_order(), _WALK * (self._lookahead + 1)):
            if skipped > self._lookahead or not all(self.goes_before(request, other) for other in behind):
                break
            if request.adapter_digest in blocked:
                continue
            verdict = self._try(request, beside, plan)
            while self.preempts and (verdict is Verdict.FULL or (verdict is Verdict.NO_SLOT and not draining)):
                victims = self._victims(request, running.values(), verdict)
                if not victims or self._slots.retiring:  # slots on their way back may suffice
                    verdict = Verdict.FULL if victims else verdict
                    break
                for victim in victims:
                    preempt(victim)
                behind = [*behind, *victims]
                beside = self._look(waiting, running)
                verdict = self._try(request, beside, plan)
            if verdict is Verdict.ADMITTED:
                waiting.remove(request)
                request.move(RequestState.RUNNING)
                running[request.ticket] = request
                admitted.append(request)
                yield request
                beside.add(request)
                self._foresee(waiting, beside.ahead, request)
            elif verdict is Verdict.NO_SLOT:
                skipped += 1
                if request.overdue and not draining:
                    draining = _done_first(running.values())
                used = {other.adapter_digest for other in running.values()}
                # slots on their way back may be meant for a request that goes before their adapter's users
                returning = [digest for digest in self._slots.retiring if self.preempts and digest not in used]
                kept = (request.adapter_digest, draining, *returning)
                blocked |= dict.fromkeys(filter(None, kept))
            elif verdict is not Verdict.SKIPPED or request.overdue:
                break
            else:
                skipped += 1
        self._count_passes(waiting, admitted)

    def goes_before(self, request: Request, other: Request) -> bool:
        """Whether waiting `request` would take the place of `other`."""
        return not other.overdue and self._policy.preempts(request, other)

    def _victims(self, request: Request, running: Iterable[Request], verdict: Verdict) -> list[Request]:
        """Requests that give way next for `request`, after `verdict`: the least important, or all that share an
        adapter that no others use."""
        giving = sorted((other for other in running if self.goes_before(request, other)), key=self.rank)
        if verdict is Verdict.FULL or not giving:
            return giving[-1:]
        staying = {"", *(other.adapter_digest for other in running if not self.goes_before(request, other))}
        users: dict[str, list[Request]] = {}
        for other in giving:
            if other.adapter_digest not in staying:
                users.setdefault(other.adapter_digest, []).append(other)
        return list(users.values())[-1] if users else []

    def _try(self, request: Request, beside: _Beside, plan: Plan) -> Verdict:
        if request.num_pending:
            return Verdict.SKIPPED  # preempted while a step sampled for it: that token comes first
        if not request.overdue and beside.computes_the_prompt_of(request):
            return Verdict.SKIPPED
        if not self._slots.num_free or not self._kv.can_start:
            return Verdict.FULL
        if not plan.grant(len(request.tokens), request.spec.whole):
            return Verdict.HOPELESS  # it goes first in the next step
        if not self._slots.adapter_fits(request):
            return Verdict.NO_SLOT
        if request.spec.whole:  # nothing is kept of it: it needs no page
            self._slots.acquire(request, beside.running.values())
            return Verdict.ADMITTED
        table = self._kv.open(self.namespace(request), request.keys, self.match_limit(request))
        matched = table.matched
        verdict = self._fits(request, table, beside)
        if verdict is not Verdict.ADMITTED:
            self._kv.close(table, 0)
            return verdict
        request.table, table.branches = table, request.branches
        if request.branches is not None and self.match_limit(request) == len(request.tokens) - 1:
            continue_branch(self._kv.tree, request.branches, matched)
        request.num_computed = request.num_launched = table.num_shared * self._kv.page_size
        if request.first_step_at is None:
            request.cached_tokens = request.num_computed
            request.restored_tokens = min(request.restored_tokens, request.cached_tokens)
        return Verdict.ADMITTED

    def _fits(self, request: Request, table: PageTable, beside: _Beside) -> Verdict:
        if not request.overdue and self.match_limit(request) and beside.ahead.awaits(request, table):
            return Verdict.SKIPPED
        running, num_tokens = beside.running.values(), len(request.tokens)
        if not self._kv.has_room(table, num_tokens, beside.promised()):
            # Would there be pages if all gave way that it goes before?
            staying = tables_of(other for other in running if not self.goes_before(request, other))
            helps = self.preempts and self._kv.could_have_room(table, num_tokens, staying)
            return Verdict.FULL if helps else Verdict.HOPELESS
        shared = self._kv.prefix_caching or request.spec.group is not None
        if not self._kv.take_state(table, num_tokens, shared=shared):
            return Verdict.FULL
        self._slots.acquire(request, running)
        return Verdict.ADMITTED

    def namespace(self, request: Request) -> Namespace:
        """Key that must match besides the tokens. Without caching, samples of one prompt still share its pages."""
        spec = request.spec
        adapter = request.adapter_digest if request.adapter_from is None else ""  # the keys say where it begins
        shared = (adapter, spec.options.cache_salt or "")
        if self._kv.prefix_caching:
            return shared
        return (*shared, spec.ticket if spec.group is None else spec.group)

    def match_limit(self, request: Request) -> int:
        """The last token is always computed: its logits are what the next one is sampled from."""
        params = request.spec.params
        most = len(request.tokens) - 1
        if params.traced_from is not None and not request.num_output:  # a resumed request computes its last only
            most = min(params.traced_from, most)
        if params.prompt_logprobs and not request.num_output:  # logits are asked for from the position before on
            return min(max(params.prompt_logprobs_start - 1, 0), most)
        if request.spec.pooled is not None and request.spec.pooled.every:
            return 0  # every position's hidden state is asked for
        return most

    def _look(self, waiting: WaitingQueue, running: dict[int, Request]) -> _Beside:
        beside = _Beside(self._kv, running)
        self._foresee(waiting, beside.ahead)
        return beside

    def _foresee(self, waiting: WaitingQueue, ahead: Frontiers, leader: Request | None = None) -> None:
        """Ask running requests for the snapshots that waiting ones will want, before anything is launched: once a state
        has moved on, it cannot be had back."""
        if self._kv.states is None:
            return
        for request in islice(waiting.in_order(), self._lookahead + 1):
            ahead.foresee(request, self.namespace(request), self.match_limit(request), leader)

    def _refresh_keys(self, waiting: WaitingQueue) -> None:
        if self._policy.prefix_hints:
            for count, request in enumerate(waiting):
                limit = self.match_limit(request) if count <= self._lookahead else 0
                request.prefix_hint = self._kv.peek(self.namespace(request), request.keys, limit)
        if self._policy.dynamic:
            self._policy.prepare(waiting)

    def _count_passes(self, waiting: WaitingQueue, admitted: list[Request]) -> None:
        """Each waiting request was passed over by every later one of its flow that has just been admitted."""
        if not admitted or not waiting:
            return
        tickets: dict[Hashable, list[int]] = {}
        for other in sorted(admitted, key=lambda admission: admission.ticket):
            tickets.setdefault(self._policy.flow(other), []).append(other.ticket)
        for request in list(waiting):
            later = tickets.get(self._policy.flow(request), [])
            passed_by = len(later) - bisect_right(later, request.ticket)
            if passed_by:
                request.passes += passed_by
                if request.passes >= self._max_passes and not request.overdue:
                    waiting.remove(request)
                    request.overdue = True  # it goes before all that are not
                    waiting.add(request)


def tables_of(running: Iterable[Request]) -> list[tuple[PageTable, int]]:
    """Page tables of running requests that have any, with the number of their tokens."""
    return [(request.table, len(request.tokens)) for request in running if request.table is not None]


def _done_first(running: Iterable[Request]) -> str:
    """The adapter whose requests will all have ended first, by what each may still generate; "" if none runs."""
    left: dict[str, int] = {}
    for request in running:
        if digest := request.adapter_digest:
            left[digest] = max(left.get(digest, 0), request.spec.max_total - len(request.tokens))
    return min(left, key=lambda digest: left[digest], default="")
