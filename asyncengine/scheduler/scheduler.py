"""The scheduler: synchronous, deterministic, alone. It knows no tasks, devices or text.

Four verbs, called by the engine's loop alone:

    apply(message)        the world changes: a request arrives, leaves, its grammar is ready
    schedule(now)         the next step: expire, run, preempt, admit
    commit(result)        a step has retired: tokens are appended, pages published, requests end (`results`)
    take_outputs()        the tokens and ends that consumers are to be told of

The requests are in the `roster`, each in exactly one queue; this module decides which positions a step computes.

There is no prefill phase and no decode phase (vLLM V1): each request has computed some of its tokens, and a step
hands out a token budget so that `computed` catches up with `total`, running requests first. Same messages, same clock
readings, same results: same batches. That is what makes a recorded run replayable.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import partial
from itertools import chain

from asyncengine.cache_news import PrefixCacheReset
from asyncengine.config import EngineConfig
from asyncengine.errors import InvariantViolation
from asyncengine.kvcache import KVCache
from asyncengine.policies import overrides, start_policy
from asyncengine.request_spec import RequestSpec
from asyncengine.scheduler import messages
from asyncengine.scheduler.admission import Admission, tables_of
from asyncengine.scheduler.drafts import Drafting, draft_planner
from asyncengine.scheduler.encoding import EncodedImages
from asyncengine.scheduler.output import Output
from asyncengine.scheduler.pace import Pace
from asyncengine.scheduler.request import Request, RequestState
from asyncengine.scheduler.restores import Restores
from asyncengine.scheduler.results import Results
from asyncengine.scheduler.roster import Roster
from asyncengine.scheduler.rows import InFlight, Plan, can_copy, copied, is_stream, may_overlap, next_row
from asyncengine.scheduler.slots import Slots
from asyncengine.scheduler.states import with_states
from asyncengine.seams import AdapterAdmission
from asyncengine.speculation import DraftPlanner
from asyncengine.speculation.planner import SpeculationCounters
from asyncengine.step import Batch, Row, StepResult

CROWDED = "a request needs their pages"
"""Why pins give way."""


class Scheduler:
    """Requests of one engine, from arrival to end. See the module docstring for the verbs."""

    def __init__(
        self, config: EngineConfig, kv: KVCache, adapters: AdapterAdmission | None = None,
        drafts: DraftPlanner | None = None, copies: bool = False,
    ) -> None:  # fmt: skip
        """`drafts`: None is as the configuration says. `copies`: the executor makes `Batch.copies`."""
        self.config = config
        self.kv = kv
        self.last_step = 0
        kv.copies = copies and kv.states is None  # no state of a position within a page is kept
        self.last_reset = PrefixCacheReset(0, 0)
        self._policy = start_policy(config.policy)
        # A decode must never wait for budget: then every running request advances in every step.
        slots = Slots(min(config.max_num_seqs, config.max_num_batched_tokens), adapters)
        self._admission = Admission(config, kv, self._policy, slots)
        drafts = drafts or draft_planner(config)
        restores = Restores(kv, self._admission.namespace, self._admission.match_limit)
        roster = Roster(kv, self._policy, slots, drafts, self._admission.namespace, restores)
        self.roster = roster
        # aliases of the roster's dictionaries, which every method below reads
        self.requests, self.running, self.waiting = roster.requests, roster.running, roster.waiting
        self.grammar_queue, self.adapter_queue = roster.grammar_queue, roster.adapter_queue
        self.restores = restores
        self.counters = roster.counters
        self._results = Results(roster)
        self._in_flight: deque[InFlight] = deque()
        self._charge = self._policy.charge if overrides(self._policy, "charge") else None
        self._policy_listens = any(overrides(self._policy, name) for name in ("arrive", "charge", "leave"))
        self._pace = Pace(config.step_time_target)
        self._committed_at = 0.0
        self._drafting = Drafting(roster, bool(config.speculation_with_adapters))
        self.encoding = EncodedImages(int(config.image_cache_memory), self.running)

    # ---------------------------------------------------------------- apply

    def apply(self, message: messages.Message) -> None:
        """Take note of one message. Messages about unknown or ended tickets change nothing."""
        match message:
            case RequestSpec():
                self.roster.add(message)
            case messages.Abort(ticket):
                self.roster.end_ticket(ticket, "abort")
            case messages.StopText(ticket):
                self.roster.end_ticket(ticket, "stop")
            case messages.Suspend(ticket):
                self.roster.suspend(ticket)
            case messages.Resume(ticket, at):
                self.roster.resume([ticket], at)
            case messages.GrammarReady(ticket, matcher, error):
                if ticket in self.grammar_queue and matcher is not None:
                    error = self.grammar_queue[ticket].catch_up(matcher) or error
                self.roster.leave_queue(self.grammar_queue, ticket, error)
            case messages.AdapterReady(ticket, digest, error, invocation):
                if ticket in self.adapter_queue:
                    self.adapter_queue[ticket].use_adapter(digest, invocation)
                self.roster.leave_queue(self.adapter_queue, ticket, error)
            case messages.PrefixFound():
                request = self.restores.start_reading(message, tables_of(self.running.values()))
                self.roster.leave_restores([] if request is None else [request])
            case messages.PrefixLoaded():
                self.roster.leave_restores(self.restores.end_reading(message))
            case messages.ImportPrefix():
                self.restores.import_prefix(message, tables_of(self.running.values()))
            case messages.Drain():
                self.roster.suspends = False
                self.roster.resume(list(self.roster.suspended), 0.0)
            case messages.PinPrefix(ticket):
                self.roster.to_pin[ticket] = None
            case messages.UnpinPrefix(ticket):
                self.roster.unpin(ticket)
            case messages.SessionEvent():
                self.roster.sessions.tell(message)
            case messages.UpdateWeights(number, mode):
                self.roster.add_update(number, mode)
            case messages.Pause(number, mode):
                if mode == "abort":
                    self.end_all("abort", "the engine was put to sleep or paused")
                self.roster.add_update(number, "wait" if mode == "finish" else "recompute")
            case messages.ResetPrefixCache(_, salt):
                self.last_reset = self.kv.drop_unused(salt)
            case messages.WithdrawUpdate(number):
                self.roster.release_held(number)

    def end_all(self, reason: messages.EndReason, why: str = "the engine is closing") -> None:
        """End every request there is, and tell each `why`."""
        self.roster.end_all(reason, why)

    # ---------------------------------------------------------------- schedule

    def schedule(self, now: float) -> Batch | None:
        """The next step, or None if there is nothing to compute before a message or a result arrives."""
        for request in self.roster.deadlines.expired(now):
            self.roster.end(request, "timeout")
        self.roster.sessions.expire(now)
        self.roster.leave_restores(self.restores.overdue(now))
        if not self.requests or self.roster.weights.stop_steps:
            return None
        plan = Plan(self.config.max_num_batched_tokens, self.config.long_prefill_token_threshold)
        rows = plan.rows
        preemptions = self.counters.preemptions
        self._force_preemption()
        yielding = self._schedule_running(plan)
        had_to_preempt = self.counters.preemptions > preemptions  # memory is short: who starts now gives way next
        if self.waiting and (not had_to_preempt or not (rows or self._in_flight)):
            self._admit(plan, now, yielding)
        for request in yielding:
            if request.state is RequestState.RUNNING and request.ticket not in rows:
                self._schedule_prompt(request, plan)
        if plan.threshold is not None and rows and len(self.running) == 1:
            lone = next(iter(self.running.values()))
            if not lone.spec.images:  # an image may not be encoded yet, and its tokens may not be cut
                plan.widen(lone, self.kv)
        if rows:
            self._drafting.add(rows, plan.total)
            return self._launch(plan, now)
        if self.waiting and not (self.running or self._in_flight or self.restores):  # no result will free memory
            if self.roster.drop_pins(CROWDED):
                return self.schedule(now)
            raise InvariantViolation(f"{len(self.waiting)} requests wait, none runs, and none could be admitted")
        return None

    def _schedule_running(self, plan: Plan) -> list[Request]:
        """Decodes first, so that no prompt delays them; then prompts share the rest of the budget. Returns the prompts
        that yield to the first request in the queue: they get the budget that it leaves."""
        prompts: list[Request] = []
        rows, page_size, drafting = plan.rows, self.kv.page_size, self.roster.drafts is not None
        stages = self.config.pipeline_parallel
        most = -(-len(self.running) // stages)  # else one step would take all rows, and the other stages would idle
        for request in list(self.running.values()):
            launched = request.num_launched
            behind = len(request.tokens) + request.num_pending - launched
            if behind > 1:
                prompts.append(request)
                continue
            if not behind or request.state is not RequestState.RUNNING or len(rows) == most:
                continue
            if request.num_pending and (
                stages > 1 or not may_overlap(request) or (drafting and self._drafting.worth_waiting(request))
            ):
                continue
            assert request.table is not None
            full = launched >= len(request.table.pages) * page_size
            if full and not self._make_room(request, launched + 1, plan):
                continue
            rows[request.spec.ticket] = next_row(request, 1)  # `plan.add` inlined: nearly every row comes this way
            plan.left -= 1
        if rows or any(map(is_stream, self.running.values())):
            wanting = len(prompts) + min(len(self.waiting), self.roster.slots.num_free)
            plan.left = self._pace.most(plan.left, len(rows), wanting)
        first = None
        if self._admission.preempts:  # other policies keep the order of admission
            prompts.sort(key=self._admission.rank)
            first = None if self._policy.dynamic else self.waiting.first
        for index, request in enumerate(prompts):
            if not plan.left:
                break
            if first is not None and self._admission.goes_before(first, request):
                return prompts[index:]
            if request.state is RequestState.RUNNING:
                self._schedule_prompt(request, plan)
        return []

    def _grant(self, request: Request, plan: Plan) -> int:
        """Number of its positions that `request` may compute in this step: all of them where no page keeps them."""
        if request.table is None:
            return plan.grant(len(request.tokens), whole=True)
        count = request.with_one_adapter(plan.grant(self.kv.most_at_once(len(request.tokens), request.num_launched)))
        return self.encoding.fit(request, count) if request.spec.images else count

    def _schedule_prompt(self, request: Request, plan: Plan) -> None:
        count = self._grant(request, plan)
        if count and self._make_room(request, request.num_launched + count, plan):
            plan.add(request, count)

    def _make_room(self, request: Request, num_tokens: int, plan: Plan) -> bool:
        """Grow the pages of `request` to `num_tokens`, preempting others if need be. False: not in this step."""
        assert request.table is not None
        self.kv.release(request.table, request.num_computed, request.last_step)
        while not self.kv.grow(request.table, num_tokens):
            if self.kv.will_have_more(request.num_computed, request.num_launched):
                return False
            for reading in self.restores.readings.values():
                reading.order.cancelled = True  # it ends early, with the pages that it has read
            if len(self.running) == 1:
                if self.restores:
                    return False  # their pages become evictable as soon as they end
                if self.roster.drop_pins(CROWDED):
                    continue
                needed = self.kv.pages_for(num_tokens)
                self.roster.end(request, "error", f"needs {needed} KV pages, the cache has {self.kv.pool.capacity}")
                return False
            victim = max(self.running.values(), key=self._admission.rank)
            self._preempt(victim, plan)
            if victim is request:
                return False
        return True

    def _preempt(self, victim: Request, plan: Plan) -> None:
        plan.drop(victim)
        self.roster.preempt(victim)

    def _force_preemption(self) -> None:
        """Preempt a request in every step of `preempt_every` (for tests), but none without a token since admission:
        chunks and preemptions in step with each other could go on for ever."""
        every = self.config.preempt_every
        if every and (self.last_step + 1) % every == 0:
            ahead = [r for r in self.running.values() if r.num_output and len(r.tokens) > r.num_kept]
            ahead = [r for r in ahead if r.num_computed >= len(r.tokens) - 1]
            if ahead:
                self.roster.preempt(max(ahead, key=self._admission.rank))

    def _admit(self, plan: Plan, now: float, yielding: list[Request]) -> None:
        preempt = partial(self._preempt, plan=plan)
        for request in self._admission.admit(self.waiting, self.running, plan, yielding, preempt):
            self.roster.note_start(request, now)
            leader = self._leader_of(request)
            if leader is not None:
                request.num_computed = request.num_launched = len(request.tokens) - 1
            count = self._grant(request, plan)
            if request.table is not None and not self.kv.grow(request.table, request.num_launched + count):
                raise InvariantViolation(f"{request} was admitted without room for its first {count} tokens")
            if count:  # else its picture is encoded in a later step
                plan.add(request, count)
            if leader is not None and leader.table is not None and request.table is not None:
                plan.copies[request.ticket] = copied(leader.table, request.table)
                leader.last_step = self.last_step + 1  # a fence: the copying step reads the leader's page

    def _leader_of(self, request: Request) -> Request | None:
        """A running request (another sample, another fork) that has computed all tokens of `request` but the last, if
        the two share all full pages of these: `request` takes the next page as a copy, and computes its last token."""
        table, last = request.table, len(request.tokens) - 1
        if not self.kv.copies or table is None or request.spec.images or self._admission.match_limit(request) < last:
            return None
        start = table.num_shared * self.kv.page_size
        if not start < last < start + self.kv.page_size:  # only a page filled in part is copied; full ones are shared
            return None
        beyond = request.keys[start:last]
        for leader in self.running.values():
            ahead = leader.num_computed >= last and leader.table is not None and can_copy(leader.table, table)
            if ahead and leader.keys[start:last] == beyond:  # compared last: `keys` may copy all tokens
                return leader
        return None

    def _launch(self, plan: Plan, now: float) -> Batch:
        """Turn the plan into a batch in flight, and count its positions as launched."""
        rows = plan.rows
        self.last_step += 1
        requests = [self.running[ticket] for ticket in rows]
        charge = self._charge
        planned = tuple(rows.values())
        step = self.last_step
        if self.kv.states is not None:
            planned = with_states(planned, requests, self.kv, step)
        total = 0
        for request, row in zip(requests, planned, strict=True):
            drafts = len(row.drafts)
            count = row.num_scheduled - drafts
            total += count
            request.drafts_launched = drafts
            request.num_launched = row.start + count  # without drafts: how many stand is known at commit
            request.last_step = step
            if charge is not None:
                charge(request, count)
            if row.samples:
                request.num_pending += 1
        encode = self.encoding.take() if self.encoding.used else None
        batch = Batch(
            self.last_step,
            planned,
            self.roster.slots.take_swaps(),
            encode,
            tuple(chain.from_iterable(plan.copies.values())),
        )
        epochs = [request.epoch for request in requests]
        self._in_flight.append(InFlight(batch, requests, epochs, now, total - len(requests)))
        return batch

    # ---------------------------------------------------------------- commit

    def commit(self, result: StepResult, now: float) -> None:
        """Apply the result of the oldest step in flight."""
        launched = self._in_flight.popleft()
        for index in result.errors:
            self.encoding.forget(launched.requests[index])
        self._results.apply(launched, result, now)
        # a row's next step waits for all stages of this one, but not for a whole step that was launched before it
        since = launched.at if self.config.pipeline_parallel > 1 else max(launched.at, self._committed_at)
        self._committed_at = now
        if not (launched.batch.encode or launched.batch.swaps):
            self._pace.learn(launched.num_prompt, now - since)

    # ---------------------------------------------------------------- texts alone

    def step_alone(self, specs: Sequence[RequestSpec], now: float) -> Batch | None:
        """A step of whole texts that come while there is no request, without a queue and records of requests. None:
        they must be posted. Its result goes to `commit_alone` before any other call.
        """
        if self.requests or self._in_flight or self.roster.weights.stop_steps or self._policy_listens:
            return None
        if any(not spec.whole or spec.options.adapter is not None or spec.start_by <= now for spec in specs):
            return None
        self.last_step += 1
        rows = (
            Row(spec, slot, 0, spec.prompt_len, list(spec.prompt), False, [], True) for slot, spec in enumerate(specs)
        )
        return Batch(self.last_step, tuple(rows))

    def commit_alone(self, batch: Batch, result: StepResult, launched_at: float) -> None:
        """Count the step, and put out its vectors."""
        counters, tokens = self.counters, batch.num_tokens
        counters.steps += 1
        counters.prompt_tokens += tokens
        counters.computed_tokens += tokens
        counters.left_queue += len(batch.rows)
        counters.left_queue_tokens += tokens
        for index, row in enumerate(batch.rows):
            error, vector = result.errors.get(index), result.vectors.get(index)
            reason: messages.EndReason = "stop" if error is None else "error"
            output = Output(row.spec.ticket, reason=reason, started_at=launched_at, error=error, vector=vector)
            self.roster.outputs.append(output)

    def take_outputs(self) -> list[Output]:
        """News since the last call, in order."""
        return self.roster.take_outputs()

    # ---------------------------------------------------------------- other weights

    @property
    def due_update(self) -> int | None:
        """The number of the weight update whose turn it is: its requests have ended, and no step is in flight."""
        return None if self._in_flight or self.restores else self.roster.weights.due(self.requests)

    def start_anew(self, number: int) -> None:
        """Apply weight update `number`: all keys, values and drafts of the old weights are dropped. Running requests
        keep their tokens, and compute them again."""
        self.clear_cache()
        if self.roster.drafts is not None:
            self.roster.drafts.clear()
        self.roster.release_held(number)

    def clear_cache(self) -> None:
        """Drop all that is cached; running requests compute their tokens again."""
        for request in list(self.running.values()):
            self.roster.preempt(request)
        self.roster.drop_pins("the cache was emptied")
        self.kv.clear()

    def pause(self, number: int) -> None:
        """Pause `number` begins: no step is scheduled until `resume`."""
        if not self.roster.weights.pause(number):
            self.roster.release_held(number)

    def resume(self) -> None:
        """The pause ends, if there is one: requests that were held, and those that ran, go on."""
        number = self.roster.weights.resume()
        if number is not None:
            self.roster.release_held(number)

    # ---------------------------------------------------------------- counts and checks

    @property
    def speculation(self) -> SpeculationCounters | None:
        """Totals of drafts; None: there are none."""
        return None if self.roster.drafts is None else self.roster.drafts.counters

    @property
    def num_waiting(self) -> int:
        """Requests that wait for their turn, or for other weights."""
        return self.roster.num_waiting

    @property
    def next_deadline(self) -> float:
        """No request times out before this clock reading (inf: none has a deadline)."""
        return min(self.roster.deadlines.next(), self.restores.next_deadline)

    def check_sums(self) -> None:
        """The cheap form of `check`, for production: O(running requests)."""
        tables = [table for table, _ in (*tables_of(self.running.values()), *self.restores.tables)]
        self.kv.check_sums(tables, idle=not self._in_flight)
        self.roster.check_places()

    def check(self) -> None:
        """Prove that nothing is lost: pages, states, slots, adapters, requests. Raises `InvariantViolation`."""
        self.kv.check(table for table, _ in (*tables_of(self.running.values()), *self.restores.tables))
        self.roster.slots.check(self.running.values())
        self.roster.check_places()
        for request in self.running.values():
            behind = len(request.tokens) + request.num_pending - request.num_launched
            if request.num_computed > request.num_launched or behind < 0 or not (behind or request.num_pending):
                raise InvariantViolation(f"{request}: progress counters out of order")
