"""The grammar queue's workers: compile each grammar once, off the event loop, for all requests that wait for it.

One job per grammar, no polling, no sleeping. Requests for the same grammar share its job; when the last one leaves, the
job is given up, whether a worker has begun with it or not, so that a slow grammar keeps a worker from others no longer
than some request waits for it. Each request has its own timeout, which starts when it arrives and so includes the wait
for a worker. Timeouts are not cached.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from asyncengine.errors import BudgetTooSmall, EngineClosed, GrammarError, GrammarTimeout, QueueFull, again
from asyncengine.grammar.limits import check_limits
from asyncengine.grammar.matcher import Matcher
from asyncengine.grammar.narrowing import Narrowing
from asyncengine.grammar.settings import GrammarSettings
from asyncengine.grammar.spec import Grammar
from asyncengine.sampling_params import OnBudget
from asyncengine.seams import GrammarDone, GrammarMatcher, GrammarOrder

if TYPE_CHECKING:
    from asyncengine.grammar.llguidance_backend import LlgTemplate, LlguidanceBackend


class TemplateCache:
    """Least-recently-used cache of compiled grammars by key, bounded in bytes. Not thread-safe: the service holds its
    lock.

    Errors that the grammar itself causes are cached, but no timeouts and no full queue: trying those again may succeed
    (SGLang once kept a timeout as "invalid" for ever).
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._known: OrderedDict[str, tuple[Any, int]] = OrderedDict()
        self.nbytes = 0

    def get(self, key: str) -> LlgTemplate | GrammarError | None:
        """The template, or the error that compiling it always gives; None if neither is cached."""
        entry = self._known.get(key)
        if entry is None:
            return None
        self._known.move_to_end(key)
        return entry[0]

    def put(self, key: str, outcome: LlgTemplate | Exception) -> None:
        """Keep `outcome`, unless it alone is larger than the cache."""
        self.drop(key)
        size = ERROR_BYTES if isinstance(outcome, Exception) else outcome.nbytes
        if size > self._max_bytes:
            return
        self._known[key] = (outcome, size)
        self.nbytes += size
        while self.nbytes > self._max_bytes:
            _, (_, size) = self._known.popitem(last=False)
            self.nbytes -= size

    def drop(self, key: str) -> None:
        """Remove a template that broke. Idempotent."""
        entry = self._known.pop(key, None)
        if entry is not None:
            self.nbytes -= entry[1]


ERROR_BYTES = 4096
"""Most memory of an error with its texts."""
MAX_MESSAGE = 500
"""Most characters of the message that a finished text is invalid."""
STACK_BYTES = 64 << 20
"""Stack of a compiling thread: llguidance recurses, with 3 kB for each rule and group, of which `check_limits` allows
16,000 (`limits.MAX_LEVELS`). Only what is used takes memory."""


@dataclass(slots=True)
class _Waiter:
    order: GrammarOrder
    done: GrammarDone
    loop: asyncio.AbstractEventLoop
    alarm: asyncio.TimerHandle


@dataclass(slots=True, eq=False)
class _Job:
    """One grammar being compiled, and the tickets that wait for it in order of arrival."""

    key: str
    waiters: dict[int, _Waiter] = field(default_factory=dict)
    given_up: bool = False
    future: Future[None] | None = None

    def give_up(self) -> None:
        self.given_up = True
        if self.future is not None:
            self.future.cancel()

    def checkpoint(self) -> None:
        """Raise `GrammarTimeout` once the job is given up. Called regularly by the compiler."""
        if self.given_up:
            raise GrammarTimeout("grammar", "no request waits for it any more")


class GrammarService:
    """A `GrammarCompiler`. `start` and `cancel` are called on the engine's loop, `check` from any thread."""

    def __init__(self, make: Callable[[], LlguidanceBackend], config: GrammarSettings) -> None:
        """`make` returns the backend; it is called at first use, for that loads the library."""
        self.make = make
        self.config = config
        self._backend: LlguidanceBackend | None = None
        self.cache = TemplateCache(int(config.grammar_cache_memory))
        self._jobs: dict[str, _Job] = {}
        self.waiting: dict[int, _Job] = {}
        """The job that each ticket waits for."""
        self._pool: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()
        self._closed = False
        self.compiled = 0
        """Grammars compiled since the start."""

    # ---------------------------------------------------------------- submit

    def check(self, grammar: Any, budget: int, on_budget: OnBudget) -> Grammar:
        spec = Grammar.of(grammar)
        key = spec.key
        with self._lock:
            compiled = self.cache.get(key)
        if compiled is None:  # what is in the cache has been checked before
            check_limits(spec, max_bytes=self.config.max_grammar_bytes, max_depth=self.config.max_grammar_depth)
        with self._lock:
            if compiled is None and key not in self._jobs and len(self._jobs) >= self.config.max_pending_grammars:
                raise QueueFull("max_pending_grammars", self.config.max_pending_grammars)
        if isinstance(compiled, GrammarError):
            raise again(compiled)
        if compiled is not None and budget > compiled.far:
            _check_budget(compiled, budget, on_budget)
        return spec

    def text_check(self, grammar: Grammar | None) -> Callable[[str], str | None] | None:
        """The check of a text that was generated under `grammar`; None if there is nothing left to check.

        The check returns what the text breaks, or None. It runs with the consumer, after the last chunk.
        """
        if grammar is None or grammar.kind != "json_schema" or grammar.unsupported != "validate":
            return None
        return partial(_broken_by, json.loads(grammar.text))

    # ---------------------------------------------------------------- the queue

    def start(self, ticket: int, order: GrammarOrder, done: Callable[[int, Any], None]) -> None:
        if isinstance(constraint := order.grammar, Narrowing):
            done = partial(self._around, constraint, done)
            if constraint.grammar is None:
                done(ticket, None)
            else:
                self.start(ticket, order._replace(grammar=constraint.grammar), done)
            return
        spec: Grammar = order.grammar
        key = spec.key
        with self._lock:
            if self._closed:
                raise EngineClosed("the engine is closed")
            compiled = self.cache.get(key)
            ready = isinstance(compiled, GrammarError) or (compiled is not None and order.budget > compiled.far)
            outcome = _outcome(compiled, order) if compiled is not None and ready else None
            is_broken = isinstance(outcome, GrammarError) and not isinstance(compiled, GrammarError)
            if is_broken:  # an output hit a limit of the library, which breaks the template too: compile it again
                self.cache.drop(key)
            if outcome is None or is_broken:
                self._wait(ticket, key, spec, order, done)
                return
        done(ticket, outcome)

    def _around(self, constraint: Narrowing, done: GrammarDone, ticket: int, outcome: Any) -> None:
        """Finish with the matcher of a constraint around that of a compiled grammar, or around none."""
        failed = isinstance(outcome, Exception)
        done(ticket, outcome if failed else constraint.matcher(constraint, self._library().vocabulary, outcome))

    def _wait(self, ticket: int, key: str, spec: Grammar, order: GrammarOrder, done: GrammarDone) -> None:
        """Join or begin the job of `key`. The caller holds the lock."""
        job = self._jobs.get(key)
        if job is None:
            job = self._jobs[key] = _Job(key)
            if self._pool is None:
                self._pool = ThreadPoolExecutor(self.config.grammar_workers, thread_name_prefix="asyncengine-grammar")
            stack_size = threading.stack_size(STACK_BYTES)
            try:
                job.future = self._pool.submit(self._run, job, spec)  # may start a thread, with the stack set above
            finally:
                threading.stack_size(stack_size)
        loop = asyncio.get_running_loop()
        alarm = loop.call_later(self.config.grammar_timeout, self._time_out, ticket)
        job.waiters[ticket] = _Waiter(order, done, loop, alarm)
        self.waiting[ticket] = job

    def cancel(self, ticket: int) -> None:
        self._leave(ticket)

    def _leave(self, ticket: int) -> _Waiter | None:
        """Remove `ticket` from its job, and give up a job without waiters. None if it waits for none."""
        with self._lock:
            job = self.waiting.pop(ticket, None)
            if job is None:
                return None
            waiter = job.waiters.pop(ticket)
            if not job.waiters:
                job.give_up()
                del self._jobs[job.key]
        waiter.alarm.cancel()
        return waiter

    def _time_out(self, ticket: int) -> None:
        waiter = self._leave(ticket)
        if waiter is not None:
            limit = self.config.grammar_timeout
            waiter.done(ticket, GrammarTimeout("grammar", f"took over grammar_timeout={limit:g} s to be compiled"))

    # ---------------------------------------------------------------- on a worker thread

    def _run(self, job: _Job, spec: Grammar) -> None:
        with self._lock:
            compiled = self.cache.get(job.key)
        outcome: LlgTemplate | Exception
        try:
            if compiled is None or isinstance(compiled, GrammarError):
                compiled = self._library().compile(spec, job.checkpoint)
                self.compiled += 1
            outcome = compiled
        except Exception as error:  # an error of the library ends the requests with this grammar and no others
            outcome = (
                error if isinstance(error, GrammarError) else GrammarError("grammar", f"did not compile: {error!r}")
            )
        with self._lock:
            if self._jobs.get(job.key) is job:
                del self._jobs[job.key]
            waiters, job.waiters = job.waiters, {}
            for ticket in waiters:
                self.waiting.pop(ticket, None)
            if not isinstance(outcome, GrammarTimeout):
                self.cache.put(job.key, again(outcome) if isinstance(outcome, Exception) else outcome)
        for ticket, waiter in waiters.items():
            with contextlib.suppress(RuntimeError):  # its loop is closed, and the alarm with it
                waiter.loop.call_soon_threadsafe(waiter.alarm.cancel)
            waiter.done(ticket, _outcome(outcome, waiter.order))

    def _library(self) -> LlguidanceBackend:
        with self._lock:
            if self._backend is None:
                self._backend = self.make()
            return self._backend

    def close(self) -> None:
        """Give up all jobs. Idempotent."""
        with self._lock:
            self._closed = True
            pool, self._pool = self._pool, None
            backend = self._backend
            waiters = [waiter for job in self._jobs.values() for waiter in job.waiters.values()]
            for job in self._jobs.values():
                job.give_up()
            self._jobs.clear()
            self.waiting.clear()
        for waiter in waiters:
            waiter.alarm.cancel()
        if backend is not None:
            backend.close()
        if pool is not None:
            pool.shutdown(wait=False, cancel_futures=True)


def _outcome(compiled: LlgTemplate | Exception, order: GrammarOrder) -> GrammarMatcher | Exception:
    """The result of a compilation for one waiter: a matcher, or an error of its own (`again`)."""
    if isinstance(compiled, Exception):
        return again(compiled)
    try:
        _check_budget(compiled, order.budget, order.on_budget)
        return Matcher(compiled, order.budget, order.on_budget)
    except Exception as error:  # raised on a worker thread it would be lost, and the request would wait for ever
        return error


def _check_budget(template: LlgTemplate, budget: int, on_budget: OnBudget) -> None:
    needed = 0 if on_budget == "truncate" or budget > template.far > 0 else template.min_tokens
    if budget < needed:
        limit = (
            f"the shortest output known for this grammar takes {needed} tokens, and {budget} are left for the output"
        )
        raise BudgetTooSmall("max_tokens", limit)


def _broken_by(schema: Any, text: str) -> str | None:
    from jsonschema.exceptions import best_match
    from jsonschema.validators import validator_for

    try:
        instance = json.loads(text)
    except (ValueError, RecursionError) as error:
        return f"not JSON: {error}"
    validator = validator_for(schema)
    try:
        worst = best_match(validator(schema, format_checker=validator.FORMAT_CHECKER).iter_errors(instance))
    except Exception as error:  # only a validator finds some faults of a schema, and it may raise anything
        return f"the schema cannot be checked: {error}"[:MAX_MESSAGE]
    return None if worst is None else f"{worst.json_path}: {worst.message}"[:MAX_MESSAGE]
