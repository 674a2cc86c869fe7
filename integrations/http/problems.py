"""The engine's errors as HTTP has them: a status, and the parts of which every dialect makes its own error object."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

from asyncengine import errors

log = logging.getLogger("asyncengine.serve")


@dataclass(eq=False)  # not frozen: Python sets the traceback of what is raised
class Problem(Exception):
    """An error on its way to a client."""

    status: int
    message: str
    param: str | None = None
    """Name of the field that is at fault."""
    code: str | None = None
    """A short name that programs look at, such as "model_not_found"."""
    headers: tuple[tuple[str, str], ...] = ()


STATUSES: Mapping[type[errors.EngineError], tuple[int, str]] = {
    errors.ContextLengthExceeded: (400, "context_length_exceeded"),
    errors.AdapterNotFound: (404, "model_not_found"),
    errors.AdapterInUse: (409, "adapter_in_use"),
    errors.GrammarTimeout: (400, "grammar_timeout"),
    errors.InvalidParameter: (400, "invalid_value"),
    errors.ModelNotFound: (404, "model_not_found"),
    errors.QueueFull: (429, "queue_full"),
    errors.EngineAsleep: (503, "engine_asleep"),
    errors.EngineClosed: (503, "engine_unavailable"),
    errors.EngineDead: (503, "engine_unavailable"),
    errors.OutOfMemory: (503, "out_of_memory"),
    errors.RequestTimeout: (504, "timeout"),
    errors.EngineError: (500, "engine_error"),
}
"""Status and code of each kind of error; the first that fits counts."""


def problem_of(error: BaseException) -> Problem:
    """The status and the parts of an error. One that nobody foresaw is logged, and says nothing of its inside."""
    if isinstance(error, Problem):
        return error
    for kind, (status, code) in STATUSES.items():
        if isinstance(error, kind):
            field = "model" if kind is errors.ModelNotFound else None
            field = error.field if isinstance(error, errors.InvalidParameter) else field
            again = (("retry-after", "1"),) if kind in (errors.QueueFull, errors.EngineAsleep) else ()
            return Problem(status, str(error), field, code, again)
    log.error("a request failed for a reason that nobody foresaw", exc_info=error)
    return Problem(500, "the server failed; its log says more", None, "internal_error")
