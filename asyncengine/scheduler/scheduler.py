"""The scheduler: synchronous, deterministic, alone. It knows no tasks, devices or text.

Four verbs, called by the engine's loop and nobody else:

    apply(message)        the world changes: a request arrives, leaves, its grammar is ready
    schedule(now)         what the next step computes: expire, run, preempt, admit
    commit(result)        a step has retired: tokens are appended, pages published, requests end
    take_outputs()        what that means for the requests' consumers

There is no prefill phase and no decode phase (vLLM V1): each request has computed some of its tokens, and a step
hands out a token budget so that `computed` catches up with `total`, running requests first. Same messages, same clock
readings, same results: same batches. That is what makes a recorded run replayable.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from asyncengine.config import EngineConfig
from asyncengine.errors import InvariantViolation
from asyncengine.kvcache import KVCache
from asyncengine.lora.interface import AdapterAdmission
from asyncengine.request_spec import RequestSpec
from asyncengine.scheduler.admission import Admission
from asyncengine.scheduler.drafts import add_drafts, draft_planner, end_drafting, settle_drafts, worth_waiting
from asyncengine.scheduler.messages import (
    Abort,
    AdapterReady,
    Drain,
    EndReason,
    GrammarReady,
    Message,
    StopText,
    UpdateWeights,
    WithdrawUpdate,
)
from asyncengine.scheduler.output import Counters, Output, with_counts
from asyncengine.scheduler.policy import choose_victim, scheduling_policy
from asyncengine.scheduler.queues import Deadlines, WaitingQueue
from asyncengine.scheduler.request import Request, RequestState
from asyncengine.scheduler.rows import InFlight, TokenBudget, constrained_end, may_overlap, next_row, plain_end, widened
from asyncengine.scheduler.slots import Slots
from asyncengine.scheduler.states import settle_snapshots, with_states
from asyncengine.scheduler.weight_updates import WeightUpdates
from asyncengine.speculation import DraftPlanner
from asyncengine.speculation.planner import SpeculationCounters
from asyncengine.step import Batch, ConstrainedToken, Row, StepResult, TokenLogprob


class Scheduler:
    """Requests of one engine, from arrival to end. See the module docstring for the verbs."""

    def __init__(
        self,
        config: EngineConfig,
        kv: KVCache,
        adapters: AdapterAdmission | None = None,
        drafts: DraftPlanner | None = None,
    ) -> None:
        """`drafts`: None is as the configuration says."""
        self.config = config
        self.kv = kv
        self.policy = scheduling_policy(config.policy)
        self.requests: dict[int, Request] = {}
        """Every request that has not ended, by ticket, in order of arrival."""
        self.waiting = WaitingQueue(self.policy)
        self.running: dict[int, Request] = {}
        """In order of admission."""
        self.grammar_queue: dict[int, Request] = {}
        self.adapter_queue: dict[int, Request] = {}
        self.counters = Counters()
        self.last_step = 0
        self._weights = WeightUpdates()
        self._deadlines = Deadlines()
        # A decode must never wait for budget: then every running request advances in every step.
        self._slots = Slots(min(config.max_num_seqs, config.max_num_batched_tokens), adapters)
        self._admission = Admission(config, kv, self.policy, self._slots)
        self._in_flight: deque[InFlight] = deque()
        self._outputs: list[Output] = []
        self._drafts = drafts or draft_planner(config)

    # ---------------------------------------------------------------- apply

    def apply(self, message: Message) -> None:
        """Take note of one message. Messages about unknown or ended tickets change nothing."""
        match message:
            case RequestSpec():
                self._add(message)
            case Abort(ticket):
                self._end_ticket(ticket, "abort")
            case StopText(ticket):
                self._end_ticket(ticket, "stop")
            case GrammarReady(ticket, matcher, error):
                if ticket in self.grammar_queue and matcher is not None:
                    error = self.grammar_queue[ticket].catch_up(matcher) or error
                self._leave_queue(self.grammar_queue, ticket, error)
            case AdapterReady(ticket, digest, error):
                if ticket in self.adapter_queue:
                    self.adapter_queue[ticket].adapter_digest = digest
                self._leave_queue(self.adapter_queue, ticket, error)
            case Drain():
                pass  # the engine's business: no request changes
            case UpdateWeights(number, mode):
                self._weights.add(number, mode)
            case WithdrawUpdate(number):
                self._release(number)

    def _add(self, spec: RequestSpec) -> None:
        request = Request(spec)
        self._weights.note_arrival(request)
        self.requests[spec.ticket] = request
        self._deadlines.add(request)
        if spec.options.adapter is not None:
            self.adapter_queue[spec.ticket] = request
        if spec.params.grammar is not None:
            self.grammar_queue[spec.ticket] = request
        if request.state is RequestState.WAITING:
            self._wait(request)

    def _wait(self, request: Request) -> None:
        """It has all it needs: it waits for its turn, or before that for other weights."""
        if self._weights.is_before(request):
            self._weights.held[request.ticket] = request
        else:
            self.waiting.add(request)

    def _leave_queue(self, queue: dict[int, Request], ticket: int, error: Exception | str | None) -> None:
        """What `ticket` waited for in `queue` is here, or will never be (`error`)."""
        request = queue.pop(ticket, None)
        if request is None:
            return
        if error is not None:
            self._end(request, "error", error)
        elif ticket in self.grammar_queue:
            pass  # its adapter came first: the grammar queue still holds it
        elif ticket in self.adapter_queue:
            request.move(RequestState.ADAPTER_QUEUE)
        else:
            request.move(RequestState.WAITING)
            self._wait(request)

    def _end_ticket(self, ticket: int, reason: EndReason) -> None:
        request = self.requests.get(ticket)
        if request is not None:
            self._end(request, reason)

    def end_all(self, reason: EndReason) -> None:
        """End every request there is."""
        for request in list(self.requests.values()):
            self._end(request, reason)

    # ---------------------------------------------------------------- schedule

    def schedule(self, now: float) -> Batch | None:
        """The next step, or None if there is nothing to compute before a message or a result arrives."""
        for request in self._deadlines.expired(now):
            self._end(request, "timeout")
        if not self.requests or self._weights.stop_steps:
            return None
        budget = TokenBudget(self.config.max_num_batched_tokens, self.config.long_prefill_token_threshold)
        rows: dict[int, Row] = {}
        preemptions = self.counters.preemptions
        self._force_preemption()
        self._schedule_running(rows, budget)
        had_to_preempt = self.counters.preemptions > preemptions
        if self.waiting and (not had_to_preempt or not (rows or self._in_flight)):
            self._admit(rows, budget, now)
        if budget.threshold is not None and rows and len(self.running) == 1:
            (request,) = self.running.values()
            rows[request.ticket] = widened(rows[request.ticket], request, budget, self.kv)
        if rows:
            if self._drafts is not None:
                adapters = bool(self.config.speculation_with_adapters)
                add_drafts(self._drafts, rows, self.running, self.kv, budget.left, self._admission.namespace, adapters)
            return self._launch(rows)
        if self.waiting and not self.running and not self._in_flight:
            raise InvariantViolation(f"{len(self.waiting)} requests wait, none runs, and none could be admitted")
        return None

    def _schedule_running(self, rows: dict[int, Row], budget: TokenBudget) -> None:
        """Decodes first, so that no prompt delays them; then prompts share what is left of the budget."""
        prompts: list[Request] = []
        page_size = self.kv.page_size
        for request in list(self.running.values()):
            behind = len(request.tokens) + request.num_pending - request.num_launched
            if behind > 1:
                prompts.append(request)
                continue
            if request.state is not RequestState.RUNNING or not behind:
                continue
            if request.num_pending and (not may_overlap(request) or self._waits(request)):
                continue
            assert request.table is not None
            end = request.num_launched + 1
            if end > len(request.table.pages) * page_size and not self._make_room(request, end, rows, budget):
                continue
            rows[request.spec.ticket] = next_row(request, 1)
            budget.left -= 1
        for request in prompts:
            if not budget.left:
                break
            if request.state is RequestState.RUNNING:
                self._schedule_prompt(request, rows, budget)

    def _waits(self, request: Request) -> bool:
        adapters = bool(self.config.speculation_with_adapters)
        return worth_waiting(self._drafts, request, len(self.running), self._admission.namespace, adapters)

    def _schedule_prompt(self, request: Request, rows: dict[int, Row], budget: TokenBudget) -> None:
        count = budget.grant(self.kv.most_at_once(len(request.tokens), request.num_launched))
        if count and self._make_room(request, request.num_launched + count, rows, budget):
            rows[request.ticket] = next_row(request, count)
            budget.take(count)

    def _make_room(self, request: Request, num_tokens: int, rows: dict[int, Row], budget: TokenBudget) -> bool:
        """Pages for `num_tokens` of `request`, preempting others if need be. False: not in this step."""
        assert request.table is not None
        self.kv.release(request.table, request.num_computed, request.last_step)
        while not self.kv.grow(request.table, num_tokens):
            if self.kv.anything_retiring or self.kv.will_release(request.num_computed, request.num_launched):
                return False  # pages are on their way back: wait for them rather than preempt for them
            if len(self.running) == 1:
                needed = self.kv.pages_for(num_tokens)
                self._end(request, "error", f"needs {needed} KV pages, the cache has {self.kv.pool.capacity}")
                return False
            victim = choose_victim(self.running.values(), self.policy)
            planned = rows.pop(victim.ticket, None)
            if planned is not None:
                budget.give_back(planned.num_scheduled)
            self._preempt(victim)
            if victim is request:
                return False
        return True

    def _force_preemption(self) -> None:
        """For tests. Only who has got a token since it was admitted is taken: else chunks and preemptions in step with
        each other could go on for ever."""
        every = self.config.preempt_every
        if every and (self.last_step + 1) % every == 0:
            ahead = [r for r in self.running.values() if r.num_output and len(r.tokens) > r.num_kept]
            ahead = [r for r in ahead if r.num_computed >= len(r.tokens) - 1]
            if ahead:
                self._preempt(choose_victim(ahead, self.policy))

    def _preempt(self, request: Request) -> None:
        """Take the request's pages; it keeps its tokens and computes them again when readmitted.

        Its full pages stay findable in the prefix cache until somebody really needs the memory, so resuming is often
        no more than a cache hit.
        """
        self._close(request)
        request.num_kept = len(request.tokens) + request.num_pending
        request.num_computed = request.num_launched = 0
        request.preemptions += 1
        self.counters.preemptions += 1
        request.move(RequestState.WAITING)
        self.waiting.add(request)

    def _admit(self, rows: dict[int, Row], budget: TokenBudget, now: float) -> None:
        for request in self._admission.admit(self.waiting, self.running, self.requests, budget):
            if request.first_step_at is None:
                request.first_step_at = now
                self._count_left_queue(request)
                self.counters.prompt_tokens += request.spec.prompt_len
                self.counters.cached_tokens += request.cached_tokens
            behind = self.kv.most_at_once(len(request.tokens), request.num_launched)
            count = budget.grant(behind, request.spec.whole)
            if request.table is not None and not self.kv.grow(request.table, request.num_launched + count):
                raise InvariantViolation(f"{request} was admitted without room for its first {count} tokens")
            rows[request.ticket] = next_row(request, count)
            budget.take(count)

    def _launch(self, rows: dict[int, Row]) -> Batch:
        """Make the plan a fact: from here on results for it will come."""
        self.last_step += 1
        requests = [self.running[ticket] for ticket in rows]
        for request, row in zip(requests, rows.values(), strict=True):
            request.drafts_launched = len(row.drafts)
            request.num_launched = row.start + row.num_scheduled - request.drafts_launched
            request.last_step = self.last_step
            if row.samples:
                request.num_pending += 1
        planned = tuple(rows.values())
        if self.kv.states is not None:
            planned = with_states(planned, requests, self.kv, self.last_step)
        batch = Batch(self.last_step, planned, self._slots.take_swaps())
        self._in_flight.append(InFlight(batch, requests, [request.epoch for request in requests]))
        return batch

    # ---------------------------------------------------------------- commit

    def commit(self, result: StepResult, now: float) -> None:
        """Apply the result of the oldest step in flight. The only place where results become facts."""
        flown = self._in_flight.popleft()
        batch, requests, epochs = flown
        if result.step != batch.step:
            raise InvariantViolation(f"result of step {result.step}, but step {batch.step} is the oldest in flight")
        self.kv.retire(batch.step)
        self._slots.retire(batch.step)
        if self.kv.states is not None:
            settle_snapshots(flown, result, self.kv, self._publish)
            for index in result.lost:
                self._start_again(batch.rows[index], requests[index], epochs[index])
        self.counters.steps += 1
        tokens, errors, logprobs = result.tokens, result.errors, result.logprobs
        computed = sampled = 0
        for index, (row, request, epoch) in enumerate(zip(batch.rows, requests, epochs, strict=True)):
            computed += row.num_scheduled
            if request.state is RequestState.FINISHED:
                continue  # it ended while the step ran: the token nobody waits for is dropped
            if batch.step <= request.discard_until:
                continue  # launched for a token that its grammar did not let stand: computed again
            if errors and index in errors:
                self._end(request, "error", errors[index])
                continue
            if request.epoch == epoch:
                request.num_computed = row.start + row.num_scheduled - len(row.drafts)
                if row.num_scheduled > 1 or row.start < len(row.spec.prompt):
                    self._publish(request)
            if result.prompt_logprobs and index in result.prompt_logprobs:
                entries = (row.start + 1, result.prompt_logprobs[index])
                self._outputs.append(Output(request.ticket, prompt_logprobs=entries))
            if row.samples:
                request.num_pending -= 1
                if row.spec.max_total == len(row.spec.prompt):  # asked for no token: for a vector, or a prompt's scores
                    pooled = row.spec.pooled is not None
                    self._end(request, "stop" if pooled else "length", vector=result.vectors[index] if pooled else None)
                    continue
                self.counters.passes += 1
                scored = logprobs.get(index) if logprobs else None
                if request.matcher is None and not row.drafts:
                    sampled += 1
                    self._accept(request, tokens[index], scored[0] if scored else None, now)
                else:
                    several = (tokens[index], *result.further.get(index, ()))
                    accepted = settle_drafts(self._drafts, row, result, index)
                    computed -= len(row.drafts) - accepted
                    accepted = accepted if request.epoch == epoch else 0
                    constrained = result.constrained[index] if request.matcher is not None else None
                    sampled += self._accept_several(request, several, accepted, constrained, scored, now)
        self.counters.computed_tokens += computed
        self.counters.generated_tokens += sampled

    def _start_again(self, row: Row, request: Request, epoch: int) -> None:
        """Its state was lost in a step that had no memory: a second time without a token in between is an error."""
        if request.state is RequestState.FINISHED or (request.epoch != epoch and not row.samples):
            return
        request.discard_launched()
        if request.state is RequestState.RUNNING:
            if request.num_kept == len(request.tokens):
                self._end(request, "error", "the device has not enough memory for this request's steps")
            else:
                self._preempt(request)

    def _accept(
        self,
        request: Request,
        token: int,
        logprob: TokenLogprob | None,
        now: float,
        constrained: ConstrainedToken | None = None,
    ) -> None:
        """Append a token of `request`; end the request if that was its last.

        A request preempted meanwhile takes its token all the same: it was sampled from intact pages. `constrained`:
        what its grammar made of the last of the tokens that came with this one, if this is that one.
        """
        request.tokens.append(token)
        request.last_token_at = now
        reason, error = plain_end(request, token), None
        if constrained is not None and request.matcher is not None:
            reason, error = constrained_end(request.matcher, constrained, reason)
        if reason is None and logprob is None and request.num_output > 1:
            self._outputs.append(Output(request.spec.ticket, token, True))
            return
        if reason is not None:
            self._retire_request(request)
        self._outputs.append(with_counts(request, token, reason, logprob=logprob, error=error))

    def _accept_several(
        self,
        request: Request,
        tokens: tuple[int, ...],
        accepted: int,
        constrained: ConstrainedToken | None,
        scored: list[TokenLogprob] | None,
        now: float,
    ) -> int:
        """Append the tokens of one row, until one ends the request: drafts that were right, and what its grammar
        forces, which is computed like a chunk in the next step. Returns how many were taken.

        `accepted`: so many of them were guessed, so that their positions are computed already.
        """
        if constrained is not None and request.num_pending and (constrained.replaced or len(tokens) > 1):
            request.discard_launched()
        request.drafts_launched = 0
        last = len(tokens) - 1
        for place, token in enumerate(tokens):
            if place < accepted:
                request.num_computed += 1
                request.num_launched += 1
            self._accept(request, token, scored[place] if scored else None, now, constrained if place == last else None)
            if request.state is RequestState.FINISHED and place < last:  # a stop token id of the caller's
                forced = 0 if constrained is None else max(0, constrained.forced - (last - place))
                self.counters.forced_tokens += forced
                return place + 1
        self.counters.forced_tokens += 0 if constrained is None else constrained.forced
        return len(tokens)

    def take_outputs(self) -> list[Output]:
        """News since the last call, in order."""
        outputs, self._outputs = self._outputs, []
        return outputs

    # ---------------------------------------------------------------- other weights

    @property
    def due_update(self) -> int | None:
        """The number of the weight update whose turn it is: its requests have ended, and no step is in flight."""
        return None if self._in_flight else self._weights.due(self.requests)

    def start_anew(self, number: int) -> None:
        """The model's weights are those of update `number` from here on: nothing that was computed counts any more.
        Running requests keep their tokens, and compute them again."""
        for request in list(self.running.values()):
            self._preempt(request)
        self.kv.clear()
        if self._drafts is not None:
            self._drafts.clear()
        self._release(number)

    def _release(self, number: int) -> None:
        for request in self._weights.remove(number):
            self.waiting.add(request)

    # ---------------------------------------------------------------- endings

    def _end(self, request: Request, reason: EndReason, error: Exception | str | None = None, **news: Any) -> None:
        self._retire_request(request)
        self._outputs.append(with_counts(request, reason=reason, error=error, **news))

    def _retire_request(self, request: Request) -> None:
        """Forget the request; its pages, slot and adapter return when the last step that names them has retired."""
        match request.state:
            case RequestState.RUNNING:
                self._close(request)
            case RequestState.WAITING:
                if self._weights.held.pop(request.ticket, None) is None:
                    self.waiting.remove(request)
        self.grammar_queue.pop(request.ticket, None)
        self.adapter_queue.pop(request.ticket, None)
        if request.first_step_at is None:
            self._count_left_queue(request)
        request.move(RequestState.FINISHED)
        if self._drafts is not None:
            end_drafting(self._drafts, request, self._admission.namespace(request))
        self._deadlines.discard(request)
        del self.requests[request.ticket]

    def _close(self, request: Request) -> None:
        """Stop running: publish what is computed, give back everything held."""
        if request.table is not None:
            self._publish(request)
            self.kv.close(request.table, request.last_step)
            request.table = None
        self._slots.release(request, request.last_step)
        request.epoch += 1
        del self.running[request.ticket]

    def _publish(self, request: Request) -> None:
        """Let others start from this request's full pages."""
        if request.spec.whole or (not self.kv.prefix_caching and request.spec.group is None):
            return
        table = request.table
        assert table is not None
        if request.num_computed // self.kv.page_size > table.num_shared:
            priority = request.spec.options.priority
            self.kv.publish(table, request.tokens, request.num_computed, request.last_step, priority)

    def _count_left_queue(self, request: Request) -> None:
        self.counters.left_queue += 1
        self.counters.left_queue_tokens += request.spec.prompt_len

    # ---------------------------------------------------------------- books

    @property
    def speculation(self) -> SpeculationCounters | None:
        """What became of drafts; None: there are none."""
        return None if self._drafts is None else self._drafts.counters

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for their turn, or for other weights."""
        return len(self.waiting) + len(self._weights.held)

    @property
    def next_deadline(self) -> float:
        """No request times out before this clock reading (inf: none has a deadline)."""
        return self._deadlines.next()

    def check_sums(self) -> None:
        """The cheap form of `check`, for production: O(running requests)."""
        tables = [table for r in self.running.values() if (table := r.table) is not None]
        self.kv.check_sums(tables, idle=not self._in_flight)
        self._check_places()

    def check(self) -> None:
        """Prove that nothing is lost: pages, states, slots, adapters, requests. Raises `InvariantViolation`."""
        self.kv.check(request.table for request in self.running.values() if request.table is not None)
        self._slots.check(self.running.values())
        self._check_places()
        for request in self.running.values():
            if not request.progress_is_sound:
                raise InvariantViolation(f"{request}: progress counters out of order")

    def _check_places(self) -> None:
        queued = {**self.grammar_queue, **self.adapter_queue}
        if len(self.running) + self.num_waiting + len(queued) != len(self.requests):
            raise InvariantViolation(f"{len(self.requests)} requests, but not each in exactly one place")
