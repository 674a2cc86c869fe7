"""The engine's errors as HTTP has them: a status, and the parts of which every dialect makes its own error object."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from asyncengine.errors import (
    AdapterInUse,
    AdapterNotFound,
    ContextLengthExceeded,
    EngineClosed,
    EngineDead,
    EngineError,
    GrammarTimeout,
    InvalidParameter,
    ModelNotFound,
    OutOfMemory,
    QueueFull,
    RequestTimeout,
)

log = logging.getLogger("asyncengine.serve")


@dataclass(frozen=True, slots=True)
class Problem(Exception):
    """An error on its way to a client."""

    status: int
    message: str
    param: str | None = None
    """Name of the field that is at fault."""
    code: str | None = None
    """A short name that programs look at, such as "model_not_found"."""
    headers: tuple[tuple[str, str], ...] = ()


RETRY = (("retry-after", "1"),)


def problem_of(error: BaseException) -> Problem:
    """The status and the parts of an error. One that nobody foresaw is logged, and says nothing of its inside."""
    match error:
        case Problem():
            return error
        case ContextLengthExceeded():
            return Problem(400, str(error), error.field, "context_length_exceeded")
        case AdapterNotFound():
            return Problem(404, str(error), error.field, "model_not_found")
        case AdapterInUse():
            return Problem(409, str(error), error.field, "adapter_in_use")
        case GrammarTimeout():
            return Problem(400, str(error), error.field, "grammar_timeout")
        case InvalidParameter():
            return Problem(400, str(error), error.field, "invalid_value")
        case ModelNotFound():
            return Problem(404, str(error), "model", "model_not_found")
        case QueueFull():
            return Problem(429, str(error), None, "queue_full", RETRY)
        case EngineClosed() | EngineDead():
            return Problem(503, str(error), None, "engine_unavailable")
        case OutOfMemory():
            return Problem(503, str(error), None, "out_of_memory")
        case RequestTimeout():
            return Problem(504, str(error), None, "timeout")
        case EngineError():
            return Problem(500, str(error), None, "engine_error")
    log.error("a request failed for a reason that nobody foresaw", exc_info=error)
    return Problem(500, "the server failed; its log says more", None, "internal_error")
