"""Every request of an engine, each in exactly one queue: arrival, preemption, suspension, end.

This is the state that the scheduler's verbs share. They decide (`scheduler` before a step, `results` after it), and the
roster acts, so that no request changes its queue without all that goes with it: pages and slot, deadline, the prefix
that others may start from, and the news for its consumer.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from asyncengine.errors import InvariantViolation
from asyncengine.kvcache import KVCache
from asyncengine.kvcache.radix_tree import Branches, Namespace, tick_of
from asyncengine.kvcache.sessions import close_branches, end_branch
from asyncengine.policies import Policy
from asyncengine.request_spec import RequestSpec
from asyncengine.scheduler.messages import EndReason, SessionEvent, UpdateMode
from asyncengine.scheduler.output import Counters, Output, with_counts
from asyncengine.scheduler.queues import Deadlines, WaitingQueue
from asyncengine.scheduler.request import Request, RequestState
from asyncengine.scheduler.restores import Restores
from asyncengine.scheduler.slots import Slots
from asyncengine.speculation import DraftPlanner

MOST_SESSIONS = 4096
"""Sessions that are known; the one longest unused is closed where there are more."""


class Sessions:
    """Sessions by name, the one longest unused first."""

    def __init__(self, kv: KVCache) -> None:
        self._kv = kv
        self._branches: dict[str, Branches] = {}
        self._next_expiry = math.inf

    def arrive(self, spec: RequestSpec) -> Branches | None:
        """A request has come: its session is back. None: it belongs to none."""
        name = spec.options.session
        if name is None:
            return None
        branches = self._use(name, spec.arrival)
        branches.back = tick_of(spec.arrival)
        return branches

    def tell(self, event: SessionEvent) -> None:
        """Apply an event of a session."""
        if event.what == "close":
            self._close(event.name)
        elif event.what == "open":
            self._use(event.name, event.at, event.seconds)
        elif (branches := self._branches.get(event.name)) is not None:
            branches.back = tick_of(event.at + event.seconds)
            self._kv.tree.rank_anew(branches.tips)

    def expire(self, now: float) -> None:
        """Close sessions that have not been used for as long as they said."""
        self._kv.tree.advance(now)
        if now >= self._next_expiry:
            for name in [name for name, branches in self._branches.items() if branches.expiry <= now]:
                self._close(name)
            self._next_expiry = min((branches.expiry for branches in self._branches.values()), default=math.inf)

    def _use(self, name: str, at: float, patience: float | None = None) -> Branches:
        branches = self._branches[name] = self._branches.pop(name) if name in self._branches else Branches()
        branches.patience = branches.patience if patience is None else patience
        branches.expiry = at + branches.patience
        self._next_expiry = min(self._next_expiry, branches.expiry)
        if len(self._branches) > MOST_SESSIONS:
            self._close(next(iter(self._branches)))
        return branches

    def _close(self, name: str) -> None:
        branches = self._branches.pop(name, None)
        if branches is not None:
            close_branches(self._kv.tree, branches)


# Updates of the model's weights that have been asked for, and which requests they make wait.


class WeightUpdates:
    """Weight updates in the order in which they were asked for. `held`: requests that wait for an update alone."""

    def __init__(self) -> None:
        self.held: dict[int, Request] = {}
        self.pending: dict[int, tuple[int, UpdateMode]] = {}
        """(rank in the order of all updates, mode) of each update, by its number."""
        self.num_asked = 0
        self._paused: int | None = None
        """The number of the pause that has begun, which is among those pending."""

    def add(self, number: int, mode: UpdateMode) -> None:
        self.num_asked += 1
        self.pending[number] = (self.num_asked, mode)

    def remove(self, number: int) -> list[Request]:
        """Forget an update that has happened or was withdrawn. Returns the requests that need not wait any longer;
        unknown numbers change nothing."""
        self.pending.pop(number, None)
        freed = [request for request in self.held.values() if not self.is_before(request)]
        for request in freed:
            del self.held[request.ticket]
        return freed

    def pause(self, number: int) -> bool:
        """Begin pause `number`. False: one has begun already, which suffices."""
        first, self._paused = self._paused is None, number if self._paused is None else self._paused
        return first

    def resume(self) -> int | None:
        """End the pause. Returns its number, to be removed; None: there was none."""
        number, self._paused = self._paused, None
        return number

    def is_before(self, request: Request) -> bool:
        """Whether an update that `request` came after has yet to happen."""
        return any(order <= request.num_updates for order, _ in self.pending.values())

    @property
    def stop_steps(self) -> bool:
        """The next update waits for no request: no further step is launched before it."""
        return self._paused is not None or any(mode == "recompute" for _, mode in list(self.pending.values())[:1])

    def due(self, requests: Mapping[int, Request]) -> int | None:
        """The number of the update that may happen as soon as no step is in flight. `requests`: all there are, in order
        of arrival."""
        number = next((pending for pending in self.pending if pending != self._paused), None)
        if number is None:
            return None
        first = next(iter(requests.values()), None)
        return number if self.stop_steps or first is None or self.is_before(first) else None


logger = logging.getLogger("asyncengine")


class Roster:
    """The requests of one engine, from arrival to end."""

    def __init__(
        self, kv: KVCache, policy: Policy, slots: Slots, drafts: DraftPlanner | None,
        namespace: Callable[[Request], Namespace], restores: Restores,
    ) -> None:  # fmt: skip
        """`namespace`: where in the prefix cache a request's pages are."""
        self.kv = kv
        self.namespace = namespace
        self.slots = slots
        self.drafts = drafts
        self.policy = policy
        self.requests: dict[int, Request] = {}
        """Every request that has not ended, by ticket, in order of arrival."""
        self.waiting = WaitingQueue(policy)
        self.running: dict[int, Request] = {}
        """Running requests by ticket, in order of admission."""
        self.grammar_queue: dict[int, Request] = {}
        self.adapter_queue: dict[int, Request] = {}
        self.restores = restores
        self.to_pin: dict[int, None] = {}
        """Tickets of requests whose prompts are to be pinned when they end."""
        self.weights = WeightUpdates()
        self.suspended: dict[int, Request] = {}
        """Requests in state WAITING that hold no pages and are not admitted until their consumers read."""
        self.suspends = True
        """False: the engine drains, and its last requests must not wait for a consumer."""
        self.sessions = Sessions(kv)
        self.deadlines = Deadlines()
        self.counters = Counters()
        self.outputs: list[Output] = []
        """News that the loop has not taken yet."""

    # ---------------------------------------------------------------- arriving

    def add(self, spec: RequestSpec) -> None:
        """A request has come."""
        request = Request(spec)
        request.branches = self.sessions.arrive(spec)
        request.num_updates = self.weights.num_asked  # it comes after these
        self.requests[spec.ticket] = request
        self.policy.arrive(request)
        self.deadlines.add(request)
        if spec.options.adapter is not None:
            self.adapter_queue[spec.ticket] = request
        if spec.params.grammar is not None:
            self.grammar_queue[spec.ticket] = request
        if request.state is RequestState.WAITING:
            self._wait(request)

    def _wait(self, request: Request) -> None:
        """Queue a request that has its grammar and adapter, or hold it for a weight update."""
        if self.weights.is_before(request):
            self.weights.held[request.ticket] = request
        elif not self.restores.add(request):
            self.waiting.add(request)

    def leave_restores(self, requests: Iterable[Request]) -> None:
        """Put requests that waited for a disk or a peer into the waiting queue."""
        for request in requests:
            request.move(RequestState.WAITING)
            self.waiting.add(request)

    def leave_queue(self, queue: dict[int, Request], ticket: int, error: Exception | str | None) -> None:
        """The grammar or adapter that `ticket` waited for in `queue` is here, or will never be (`error`)."""
        request = queue.pop(ticket, None)
        if request is None:
            return
        if error is not None:
            self.end(request, "error", error)
        elif ticket in self.grammar_queue:
            pass  # its adapter came first: the grammar queue still holds it
        elif ticket in self.adapter_queue:
            request.move(RequestState.ADAPTER_QUEUE)
        else:
            request.move(RequestState.WAITING)
            self._wait(request)

    def release_held(self, number: int) -> None:
        """Update `number` has happened or was withdrawn: queue the requests that were held for it alone."""
        for request in self.weights.remove(number):
            self.waiting.add(request)

    # ---------------------------------------------------------------- running

    def note_start(self, request: Request, now: float) -> None:
        """Count an admission, if it is the first of its request."""
        if request.first_step_at is None:
            request.first_step_at = now
            self._count_left_queue(request)
            self.counters.prompt_tokens += request.spec.prompt_len
            self.counters.cached_tokens += request.cached_tokens
            self.counters.restored_tokens += request.restored_tokens

    def preempt(self, request: Request) -> None:
        """Take the request's pages; it keeps its tokens and computes them again when readmitted.

        Its full pages stay findable in the prefix cache until another request needs the memory, so resuming is often
        no more than a cache hit.
        """
        self._stop_running(request)
        request.preemptions += 1
        self.counters.preemptions += 1
        self.waiting.add(request)

    def _stop_running(self, request: Request) -> None:
        self._close(request)
        request.num_kept = len(request.tokens) + request.num_pending
        request.num_computed = request.num_launched = 0
        request.move(RequestState.WAITING)

    def suspend(self, ticket: int) -> None:
        """Take the request out of the steps until `resume`. Its pages stay findable as those of a preempted one."""
        request = self.requests.get(ticket)
        if request is None or ticket in self.suspended or not self.suspends or self.weights.pending:
            return
        if request.state is RequestState.RUNNING:
            self._stop_running(request)
        elif request.state is RequestState.WAITING and request.num_output:
            self.waiting.remove(request)
        else:
            return
        request.suspended = True
        self.suspended[ticket] = request

    def resume(self, tickets: Iterable[int], at: float) -> None:
        """Let suspended requests of these tickets wait for their turn again; others are left as they are. `at`: the
        clock reading from which the time to their next tokens counts."""
        for ticket in tickets:
            request = self.suspended.pop(ticket, None)
            if request is not None:
                request.suspended = False
                request.last_token_at = max(request.last_token_at, at)
                self.waiting.add(request)

    def add_update(self, number: int, mode: UpdateMode) -> None:
        """Note that the weights are to change. Suspended requests go on, as they may have to end before that."""
        self.weights.add(number, mode)
        self.resume(list(self.suspended), 0.0)

    def _close(self, request: Request) -> None:
        """Stop running: publish the computed pages, give back everything held."""
        if request.table is not None:
            self.publish(request)
            if request.branches is None:
                self.kv.tree.share(request.table.node)
            else:
                end_branch(self.kv.tree, request.branches, request.table.node, request.spec.group)
            self.kv.close(request.table, request.last_step)
            request.table = None
        self.slots.release(request, request.last_step)
        request.epoch += 1  # results in flight still count for its tokens, and no more for its pages
        del self.running[request.ticket]

    def publish(self, request: Request) -> None:
        """Let others start from this request's full pages."""
        if request.spec.whole or (not self.kv.prefix_caching and request.spec.group is None):
            return
        table = request.table
        assert table is not None  # a result of an earlier admission says nothing about pages
        if request.num_computed // self.kv.page_size > table.num_shared:
            priority = request.spec.options.priority
            self.kv.publish(table, request.keys, request.num_computed, request.last_step, priority)

    # ---------------------------------------------------------------- ending

    def end_ticket(self, ticket: int, reason: EndReason) -> None:
        request = self.requests.get(ticket)
        if request is not None:
            self.end(request, reason)

    def end_all(self, reason: EndReason, why: str) -> None:
        """End every request there is, and tell each `why`."""
        for request in list(self.requests.values()):
            self.end(request, reason, why)

    def end(self, request: Request, reason: EndReason, error: Exception | str | None = None, **news: Any) -> None:
        """End the request, and put out its reason."""
        self.forget(request)
        self.outputs.append(with_counts(request, reason=reason, error=error, **news))

    def forget(self, request: Request) -> None:
        """Remove a request that has ended; its pages, slot and adapter return when the last step that names them has
        retired. Its last output is the caller's business."""
        match request.state:
            case RequestState.RUNNING:
                self._close(request)
            case RequestState.WAITING:
                if request.ticket in self.suspended:
                    del self.suspended[request.ticket]
                elif self.weights.held.pop(request.ticket, None) is None:
                    self.waiting.remove(request)
            case RequestState.RESTORE_QUEUE:
                self.restores.discard(request)
        if request.ticket in self.to_pin:
            del self.to_pin[request.ticket]
            if request.state in (RequestState.RUNNING, RequestState.WAITING):  # else it has computed nothing
                self.kv.pin(request.ticket, self.namespace(request), request.spec.prompt[: request.adapter_from])
        self.grammar_queue.pop(request.ticket, None)
        self.adapter_queue.pop(request.ticket, None)
        if request.first_step_at is None:
            self._count_left_queue(request)
        request.move(RequestState.FINISHED)
        if self.drafts is not None:
            # others may draft from its output, unless a grammar wrote parts of it
            constrained = request.matcher is not None or request.spec.params.grammar is not None
            output = [] if constrained else request.tokens[len(request.spec.prompt) :]
            request.predicted = self.drafts.forget(request.ticket, self.namespace(request), output)
        self.deadlines.discard(request)
        self.policy.leave(request)
        del self.requests[request.ticket]

    # ---------------------------------------------------------------- pinned prefixes

    def unpin(self, ticket: int) -> None:
        """The prompt of `ticket` need not stay in the cache."""
        self.to_pin.pop(ticket, None)
        self.kv.unpin(ticket)

    def drop_pins(self, why: str) -> bool:
        """Unpin all there are, with a warning that says `why`. False: there are none."""
        pins = self.kv.pins
        if pins:
            logger.warning("%d pinned prefixes are not pinned any more: %s", len(pins), why)
        for ticket in pins:
            self.kv.unpin(ticket)
        return bool(pins)

    def _count_left_queue(self, request: Request) -> None:
        self.counters.left_queue += 1
        self.counters.left_queue_tokens += request.spec.prompt_len

    # ---------------------------------------------------------------- outputs and counts

    def take_outputs(self) -> list[Output]:
        """News since the last call, in order."""
        outputs, self.outputs = self.outputs, []
        return outputs

    @property
    def num_waiting(self) -> int:
        """Requests that wait for their turn, or for other weights."""
        return len(self.waiting) + len(self.weights.held)

    def check_places(self) -> None:
        """Raises `InvariantViolation` if a request is in no queue, or in two."""
        queued = {**self.grammar_queue, **self.adapter_queue, **self.restores.queue}
        if len(self.running) + self.num_waiting + len(self.suspended) + len(queued) != len(self.requests):
            raise InvariantViolation(f"{len(self.requests)} requests, but not each in exactly one place")
