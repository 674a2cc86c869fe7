"""The engine's errors for HTTP: a status, and the values of which each dialect makes its own error object."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from importlib import resources

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


_LINES = (resources.files(__package__) / "problems.txt").read_text(encoding="utf-8").splitlines()
STATUSES = [tuple(map(str.strip, line.split("|"))) for line in _LINES if line and line[0] != ";"]
"""Class name, status and code of each error; the first whose class fits counts."""


def problem_of(error: BaseException) -> Problem:
    """The problem that tells an error to clients. An unforeseen one is logged, and its text is not told: it may name
    files and internals."""
    if isinstance(error, Problem):
        return error
    for error_name, status, code in STATUSES:
        if isinstance(error, getattr(errors, error_name)):
            field = "model" if error_name == "ModelNotFound" else None
            field = error.field if isinstance(error, errors.InvalidParameter) else field
            again = (("retry-after", "1"),) if error_name in ("QueueFull", "EngineAsleep") else ()
            # in words that vLLM's and OpenAI's clients look for
            advice = ". Please reduce the length of the input prompt." if error_name == "ContextLengthExceeded" else ""
            return Problem(int(status), str(error) + advice, field, code, again)
    log.error("a request failed for a reason that nobody foresaw", exc_info=error)
    return Problem(500, "the server failed; its log says more", None, "internal_error")
