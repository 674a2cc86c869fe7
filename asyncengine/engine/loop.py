"""The engine: one task, one loop, the only writer. Start reading here.

Everyone else posts messages into its inbox and reads a mailbox. Messages are applied only between steps, so nothing
is ever freed under a running step, and a recorded inbox replays to the same outputs with no event loop at all
(`asyncengine.testing.replay`).

    inbox ──take──▶ scheduler.apply ─▶ scheduler.schedule ─▶ runner.launch ──▶ device
                          ▲                                      │
    mailboxes ◀─deliver── outputs ◀──── scheduler.commit ◀───────┘ (result)
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import InvalidStateError
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from asyncengine.config import EngineConfig
from asyncengine.engine.clock import Clock
from asyncengine.engine.device_thread import DeviceThread, Watchdog
from asyncengine.engine.prefix_sources import PrefixSources
from asyncengine.engine.serving_loop import ServingLoop
from asyncengine.engine.threads import interrupts_postponed
from asyncengine.engine.turns import CacheReset, Sleep, Turn, WeightUpdate, refusal
from asyncengine.errors import EngineClosed, EngineError
from asyncengine.events import EngineDied, Preempted, StepDone, StepSlow
from asyncengine.options import WeightSource
from asyncengine.request_spec import RequestSpec
from asyncengine.scheduler import Scheduler
from asyncengine.scheduler.messages import AdapterReady, Drain, GrammarReady, Message, ResetPrefixCache, WithdrawUpdate
from asyncengine.seams import AdapterStore, GrammarCompiler, GrammarMatcher, GrammarOrder
from asyncengine.step import Batch, StepResult
from asyncengine.text.token_table import TokenTable

if TYPE_CHECKING:
    from asyncengine.engine.cache_feed import CacheFeed

logger = logging.getLogger("asyncengine")

LAG_PROBE = 0.1
"""Seconds between two readings of the event loop's lag."""


class Launched(NamedTuple):
    batch: Batch
    result: asyncio.Future[StepResult]
    at: float


CANCELLED = "its task was cancelled, as asyncio.run does at its end: await aclose() first, or load it with hosted=True"
Recorder = Callable[[str, object], None]
"""Called with ("apply", message), ("schedule", now), ("commit", now), ("start_anew", number of a weight update),
("pause", its number), ("resume", None), ("clear_cache", None) and ("end_all", reason), in order; see `testing.replay`.
"""


class EngineLoop(ServingLoop):
    """The actor. `run` is the whole engine; the other methods are its steps. Its base has what
    callers use: inbox, queue limit, delivery."""

    def __init__(
        self, config: EngineConfig, scheduler: Scheduler, runner: DeviceThread, clock: Clock, *,
        grammars: GrammarCompiler | None = None, adapters: AdapterStore | None = None, table: TokenTable | None = None,
        recorder: Recorder | None = None,
    ) -> None:  # fmt: skip
        super().__init__(config, clock, grammars=grammars, adapters=adapters, table=table)
        self.scheduler = scheduler
        self.runner = runner
        self.sources = PrefixSources(scheduler, clock, self._apply, self.inbox.post)
        self.record = recorder
        self._lost: Exception | None = None
        self.depth = config.max_steps_in_flight or 1
        self.in_flight: deque[Launched] = deque()
        self.updates: dict[int, Turn] = {}
        """Weight updates, pauses and resets by number; one is here before its message is posted."""
        self.write_again: Callable[[], None] | None = partial(self.write_from, None)
        """Writes the model's weights once more, from files; None: they came from tensors."""
        self.asleep: Sleep | None = None
        self.cache_feeds: list[CacheFeed] = []
        """Readers of cache events. Appended to from any thread."""
        self.on_tick: Callable[[], None] | None = None
        """Called on this loop's thread every `LAG_PROBE` seconds, and once the loop has ended."""
        self._left_queue = (0, 0)
        self._lag_timer: asyncio.TimerHandle | None = None
        limits = config.step_soft_limit, config.step_hard_limit
        self._watchdog = Watchdog(*limits, self._report_slow, self._give_up)

    def write_from(self, weights: WeightSource | None) -> None:
        """Write whole weights from files; None: from those of the model. Reads them now, on the device's thread."""
        self.runner.executor.prepare_update(weights, self.config, False)()

    def have_loop(self) -> None:
        """Called before `run`: no other code will use the event loop that it runs on."""
        self.runner.have_loop()

    async def run(self) -> None:
        """Serve until drained. Raises only cancellation: every stream raises an error that kills the engine."""
        self._probe_lag(self.clock.now())
        try:
            while not self._drained():
                self.apply_inbox()  # 1 the world changes only here
                if (due := self.scheduler.due_update) is not None:
                    await self._take_turn(due)
                batch = self.schedule()  # 2 pure: expire, run, preempt, admit, evict
                if batch is not None:  # 3 the device starts
                    if self.in_flight and batch.num_tokens > len(batch.rows):
                        self.deliver()  # launching prompts takes long, and the device has work meanwhile
                        await asyncio.sleep(0)
                    at = self.clock.now()
                    self.in_flight.append(Launched(batch, self.runner.launch(batch), at))
                self.deliver()  # 4 outputs of the step before go out while this one runs
                if not self.in_flight:
                    await self._idle()
                elif batch is None or len(self.in_flight) >= self.depth:
                    result = await self._watch(self.in_flight[0])  # 5 consumers run here
                    self.commit(result)  # 6 the only place where results are applied
        except BaseException as error:
            cancelled = isinstance(error, asyncio.CancelledError)
            self.failure = self.failure or (EngineClosed(CANCELLED) if cancelled else error)
            if not isinstance(error, Exception):  # cancelled: the loop that hosts us is going away
                raise
            logger.exception("the engine died")
            self.hooks.emit(EngineDied(error))
        finally:
            try:
                self.end_all()
                await self.sources.flush()
            finally:
                await self.runner.aclose()

    def fail(self, error: Exception) -> None:
        """End the engine with an error from elsewhere, without waiting for steps in flight. From any thread."""
        self._lost = error
        self.inbox.post()  # no message: this wakes the loop where it waits for one
        for launched in list(self.in_flight)[:1]:  # `run` awaits the oldest step, which may never end
            with suppress(RuntimeError):  # the event loop is closed
                launched.result.get_loop().call_soon_threadsafe(_end, launched.result, error)

    # ---------------------------------------------------------------- the steps of a turn

    def apply_inbox(self) -> None:
        """Apply what was posted. Raises the error that `fail` was given."""
        if self._lost is not None:
            raise self._lost
        for message in self.inbox.take():
            self._apply(message)
        if self.scheduler.grammar_queue or self.scheduler.adapter_queue:  # cached ones were answered at once
            for message in self.inbox.take():
                self._apply(message)
        self.sources.turn()

    def compute_now(self, specs: Sequence[RequestSpec]) -> bool:
        """Compute short texts at once, on the calling thread, where the loop is idle: no message and no change of
        threads lies between a caller and its vectors. False: nothing was done, and the caller posts them.

        `run` waits for a message meanwhile. An error ends the engine when `run` goes on.
        """
        if not 0 < sum(spec.prompt_len for spec in specs) <= self.runner.brief_tokens or self.record is not None:
            return False
        with interrupts_postponed(), self.inbox.borrowed() as free:
            return free and self._compute(specs)

    def _compute(self, specs: Sequence[RequestSpec]) -> bool:
        now = self.clock.now()
        if self._lost is not None or (batch := self.scheduler.step_alone(specs, now)) is None:
            return False
        for spec in specs:
            self.delivery.open(spec.ticket)
        try:
            self.scheduler.commit_alone(batch, self.runner.compute(batch), now)
            self._note_step(batch, now)
            self.deliver()
        except BaseException as error:
            self.fail(error if isinstance(error, Exception) else RuntimeError(f"a step was left by {error!r}"))
            if not isinstance(error, Exception):
                raise
        return True

    def _apply(self, message: Message) -> None:
        if isinstance(message, RequestSpec):
            self.delivery.open(message.ticket)
        if self.record is not None:
            self.record("apply", message)
        self.scheduler.apply(message)
        match message:
            case RequestSpec():
                self._order(message)
            case GrammarReady() | AdapterReady():
                self.delivery.prepared(message.ticket)
            case Drain():
                self.start_drain(message)
            case ResetPrefixCache(number):
                reset = self.updates.pop(number, None)
                if isinstance(reset, CacheReset) and reset.done.set_running_or_notify_cancel():
                    reset.done.set_result(self.scheduler.last_reset)
            case WithdrawUpdate(number):
                self.updates.pop(number, None)

    def _order(self, spec: RequestSpec) -> None:
        """Have other threads load the adapter and compile the grammar that the request must wait for."""
        ticket, params = spec.ticket, spec.params
        if spec.options.adapter is not None and self.adapters is not None:
            self.adapters.start(ticket, self._adapter_done)
        if params.grammar is not None and self.grammars is not None:
            order = GrammarOrder(params.grammar, spec.max_total - spec.prompt_len, params.on_budget)
            try:
                self.grammars.start(ticket, order, self._grammar_done)
            except Exception as error:  # the fault of one request
                self._grammar_done(ticket, error)

    def _adapter_done(self, ticket: int, outcome: str | Exception) -> None:
        """The adapter store's answer, from any thread."""
        if isinstance(outcome, Exception):
            self.inbox.post(AdapterReady(ticket, error=outcome))
        elif self.adapters is not None:
            self.inbox.post(AdapterReady(ticket, outcome, invocation=self.adapters.invocation(outcome)))

    def _grammar_done(self, ticket: int, outcome: GrammarMatcher | Exception) -> None:
        """The compile service's answer, from any thread."""
        if isinstance(outcome, Exception):
            error = outcome if isinstance(outcome, EngineError) else f"the grammar did not compile: {outcome!r}"
            self.inbox.post(GrammarReady(ticket, error=error))
        else:
            self.inbox.post(GrammarReady(ticket, matcher=outcome))

    def schedule(self) -> Batch | None:
        """Plan the next step; None: there is nothing to compute now."""
        now = self.clock.now()
        deadline = None if self._drain is None else self._drain.deadline if self.asleep is None else now
        if deadline is not None and now >= deadline:  # requests that still run; a sleeping engine cannot finish them
            self._perform("end_all", "abort", partial(self.scheduler.end_all, "abort"))
        if self.record is not None:
            self.record("schedule", now)
        preemptions = self.scheduler.counters.preemptions
        batch = self.scheduler.schedule(now)
        if self.sources.tiers:
            self.sources.save()
        if self.hooks and self.scheduler.counters.preemptions > preemptions:
            self.hooks.emit(Preempted(self.scheduler.last_step, self.scheduler.counters.preemptions - preemptions))
        return batch

    async def _take_turn(self, number: int) -> None:
        """Exchange the model's weights, fall asleep or wake. A failure kills the engine, since the model may have a
        mixture of old and new weights by then; an engine that slept without weights loses nothing, and sleeps on."""
        self.deliver()  # tokens of the old weights go out before their version changes
        turn, before = self.updates.pop(number), self.asleep
        assert not isinstance(turn, CacheReset)
        refused = refusal(turn, before, self.write_again, closes=self._drain is not None)
        if not turn.done.set_running_or_notify_cancel() or refused is not None:
            self._apply(WithdrawUpdate(number))
            if refused is not None and not turn.done.cancelled():
                turn.done.set_exception(refused)
            return
        try:
            await (self._fall_asleep(number, turn) if isinstance(turn, Sleep) else self._update_weights(number, turn))
        except BaseException as error:
            if before is not None and before.weights and isinstance(error, Exception):
                self._apply(WithdrawUpdate(number))
                turn.done.set_exception(error)
                return
            self.failure = self.failure or error
            turn.done.set_exception(self.make_failure())
            raise

    async def _fall_asleep(self, number: int, sleep: Sleep) -> None:
        if sleep.cache:
            await self.sources.flush()  # before the cache is cleared: writers copy from its pages
            self._perform("clear_cache", None, self.scheduler.clear_cache)
        self._perform("pause", number, partial(self.scheduler.pause, number))
        if sleep.release is not None:
            await self.runner.call(sleep.release)
        self.asleep = sleep.joined(self.asleep)
        sleep.done.set_result(None)

    async def _update_weights(self, number: int, update: WeightUpdate) -> None:
        write, version = update.write, self.delivery.weight_version
        if write is not None:
            self._perform("start_anew", number, partial(self.scheduler.start_anew, number))
            self.sources.forget()
            version = version + 1 if update.version is None else update.version
        elif self.asleep is not None and self.asleep.weights:
            write = self.write_again
        if write is not None:
            await self.runner.call(write)
        if update.write is not None:
            self.delivery.change_weights(version)
            self.write_again = update.again
        if self.asleep is not None:
            self.asleep = self.asleep._replace(weights=False)
        if update.wakes:
            self._apply(WithdrawUpdate(number))
            self._perform("resume", None, self.scheduler.resume)
            self.asleep = None
        update.done.set_result(version)

    def _perform(self, event: str, value: object, call: Callable[[], None]) -> None:
        """Call a rare operation of the scheduler, and record it for a replay."""
        if self.record is not None:
            self.record(event, value)
        call()

    @property
    def refuses(self) -> bool:
        """Whether new requests are refused: it sleeps, or is about to, with `requests="refuse"`. From any thread."""
        turns = [turn for turn in (self.asleep, *self.updates.values()) if isinstance(turn, Sleep)]
        return any(turn.refuses and not turn.done.cancelled() for turn in turns)

    def deliver(self) -> None:
        """Hand the scheduler's outputs to their consumers, and free places in the queue to the callers in line."""
        outputs = self.scheduler.take_outputs()
        for output in outputs:
            if output.reason is not None:  # before the consumer, perhaps on another thread, hears of it
                self.let_go(output.ticket)
        self.delivery.deliver(outputs)
        counters = self.scheduler.counters
        left = (counters.left_queue, counters.left_queue_tokens)  # running totals: the difference has left since
        if left != self._left_queue:
            self.queue_limit.leave(left[0] - self._left_queue[0], left[1] - self._left_queue[1])
            self._left_queue = left
        for feed in self.cache_feeds[:]:
            feed.update()

    async def _idle(self) -> None:
        """Wait until a message comes or a deadline passes. Invariants are checked before: the time costs no request."""
        if not self._drained() and self.scheduler.due_update is None:
            self.scheduler.check_sums()
            if self.adapters is not None:
                self.adapters.check()
            until = self.scheduler.next_deadline
            if self._drain is not None and self._drain.deadline is not None:
                until = min(until, self._drain.deadline)
            await self.inbox.wait(None if until == float("inf") else until - self.clock.now())

    async def _watch(self, launched: Launched) -> StepResult:
        """The step's result; a slow step is reported, one that exceeds the hard limit kills the engine."""
        if self._lost is not None:
            raise self._lost
        self._watchdog.begin(launched)
        try:
            if not launched.result.done():
                self.runner.expect(launched.result)
            if launched.result.done():
                await asyncio.sleep(0)  # awaiting a finished result does not yield, and consumers must run
            return await launched.result
        finally:
            self._watchdog.end()

    def commit(self, result: StepResult) -> None:
        """Apply the result of the oldest step in flight. Raises as `apply_inbox`."""
        if self._lost is not None:  # the result of a step that has lost a rank is incomplete
            raise self._lost
        batch, _, launched_at = self.in_flight.popleft()
        now = self.clock.now()
        if self.record is not None:
            self.record("commit", now)
        self.scheduler.commit(result, now)
        self._note_step(batch, launched_at, now)

    def _note_step(self, batch: Batch, launched_at: float, now: float | None = None) -> None:
        self.meter.step.append(took := (self.clock.now() if now is None else now) - launched_at)
        self.sources.saw(batch, took)
        if batch.step % self.config.check_every == 0:
            self.scheduler.check_sums()
        if self.hooks:
            running, waiting = len(self.scheduler.running), self.scheduler.num_waiting
            self.hooks.emit(StepDone(batch.step, len(batch.rows), batch.num_tokens, took, running, waiting))

    # ---------------------------------------------------------------- watching

    def _report_slow(self, launched: Launched) -> None:
        batch = launched.batch
        longest = max(row.start + row.num_scheduled for row in batch.rows)
        plan = f"{len(batch.rows)} rows, {batch.num_tokens} tokens, longest context {longest}"
        logger.warning("step %d has run for %.0f s: %s", batch.step, self.config.step_soft_limit, plan)
        self.hooks.emit(StepSlow(batch.step, plan))

    def _give_up(self, launched: Launched) -> None:
        if not launched.result.done():
            limit = self.config.step_hard_limit
            launched.result.set_exception(TimeoutError(f"step {launched.batch.step} ran for over {limit:.0f} s"))

    def _probe_lag(self, due: float) -> None:
        """Measure how late timers run on this loop."""
        now = self.clock.now()
        self.meter.loop_lag.append(max(0.0, now - due))
        self._lag_timer = asyncio.get_running_loop().call_later(LAG_PROBE, self._probe_lag, now + LAG_PROBE)
        if self.on_tick is not None:
            self.on_tick()

    # ---------------------------------------------------------------- the end

    def _drained(self) -> bool:
        return self._drain is not None and not self.scheduler.requests and not self.in_flight

    def end_all(self) -> None:
        """Fail every open request and update, stop timers and feeds, and close the sources."""
        if self._lag_timer is not None:
            self._lag_timer.cancel()
        self._watchdog.close()
        self.queue_limit.close()  # before places are given to those in line
        if self.failure is None:
            self.deliver()
        super().end_all()
        for feed in self.cache_feeds:
            feed.end(self.make_failure())
        for launched in self.in_flight:
            launched.result.cancel()  # no task will read it
        for number in list(self.updates):
            self.fail_update(number)
        self.sources.close()
        if self.on_tick is not None:
            self.on_tick()

    def fail_update(self, number: int) -> None:
        """The engine closed before its turn came. From any thread; idempotent."""
        update = self.updates.pop(number, None)
        if update is not None:
            with suppress(InvalidStateError):  # its owner cancelled it
                update.done.set_exception(self.make_failure())


def _end(result: asyncio.Future[StepResult], error: Exception) -> None:
    if not result.done():
        result.set_exception(error)
        result.exception()  # marks it as retrieved: asyncio logs errors that no one reads
