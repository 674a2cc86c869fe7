"""Events that an engine reports to its observers while it works. Hooks run on the engine's loop and must return at
once."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextvars import Context
from dataclasses import dataclass

from asyncengine.errors import InvalidParameter
from asyncengine.outputs import FinishReason, Timings
from asyncengine.pooling_spec import Task
from asyncengine.sampling_params import SamplingParams

logger = logging.getLogger("asyncengine")


@dataclass(frozen=True, slots=True)
class StepDone:
    """A step has retired."""

    step: int
    rows: int
    tokens: int
    """Positions computed."""
    seconds: float
    """Launch to result."""
    running: int
    waiting: int


@dataclass(frozen=True, slots=True)
class StepSlow:
    """A step has been running for `step_soft_limit` seconds. `plan` says what it computes."""

    step: int
    plan: str


@dataclass(frozen=True, slots=True)
class Preempted:
    """`count` requests lost their pages while a step was scheduled; they will resume."""

    step: int
    count: int


@dataclass(frozen=True, slots=True)
class RequestDone:
    """A request for text has ended, with all its samples. Its consumer hears of it after this.

    Hooks are called in a copy of the context (`contextvars`) of the call that made the request: a tracer finds the
    caller's span there.
    """

    request_id: str
    is_chat: bool
    """False: a text to go on with."""
    adapter: str | None
    params: SamplingParams
    """With the model's defaults filled in."""
    finish_reasons: tuple[FinishReason, ...]
    """Reason of each sample, in the order in which they ended."""
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    """Tokens of all samples together."""
    timings: Timings
    session: str | None = None
    away: float | None = None
    """Seconds between an answer of its session with calls of tools and this request."""


@dataclass(frozen=True, slots=True)
class VectorsDone:
    """A call to embed, rerank or classify has ended, with all its texts. Hooks are called in the caller's thread and
    context. `stats().finished` counts its texts."""

    request_id: str
    call: Task
    """"embed", "rerank" or "classify"."""
    adapter: str | None
    texts: int
    prompt_tokens: int
    cached_tokens: int
    seconds: float
    dimensions: int | None = None
    """Length of each vector, of a call to embed."""
    error: str | None = None
    """Name of the exception that ended it."""


@dataclass(frozen=True, slots=True)
class EngineDied:
    """The engine is dead; every stream has the error."""

    cause: BaseException


Event = StepDone | StepSlow | Preempted | RequestDone | VectorsDone | EngineDied
Hook = Callable[[Event], None]


class Hooks:
    """Observers of one engine. One that raises is logged, the first time, and the others still hear of it."""

    def __init__(self) -> None:
        self._hooks: list[Hook] = []
        self._broken: list[Hook] = []
        """Hooks that have raised."""

    def __bool__(self) -> bool:
        return bool(self._hooks)

    def add(self, hook: Hook) -> Callable[[], None]:
        """Observe from now on; the returned function ends it. Raises `InvalidParameter` for what cannot be called."""
        if not callable(hook):
            raise InvalidParameter("hook", "must be callable", hook)
        self._hooks = [*self._hooks, hook]

        def remove() -> None:
            self._hooks = [other for other in self._hooks if other is not hook]
            self._broken = [other for other in self._broken if other is not hook]

        return remove

    def emit(self, event: Event, context: Context | None = None) -> None:
        """Tell every hook of `event`, within `context` if there is one."""
        for hook in self._hooks:
            try:
                hook(event) if context is None else context.run(hook, event)
            except Exception:
                if not any(other is hook for other in self._broken):  # else it would say so at every step
                    self._broken = [*self._broken, hook]
                    logger.exception("an event hook failed on %s", type(event).__name__)
