"""The engine's errors as LangChain's, so that retries, fallbacks and `except ModelError` work.

A mapped error is an instance of both: `except ContextOverflowError` and `except ContextLengthExceeded` each catch it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

from langchain_core import exceptions as lc

from asyncengine import errors

_THEIRS: dict[type[errors.EngineError], str | None] = {
    errors.InvalidParameter: "ModelInvalidRequestError", errors.GrammarTimeout: "ModelTimeoutError",
    errors.ContextLengthExceeded: "ContextOverflowError", errors.AdapterNotFound: "ModelNotFoundError",
    errors.ModelNotFound: "ModelNotFoundError", errors.UnsupportedModel: "ModelNotFoundError",
    errors.OutOfMemory: "ModelAPIError", errors.QueueFull: "ModelRateLimitError",
    errors.RequestTimeout: "ModelTimeoutError", errors.RequestFailed: "ModelAPIError",
    errors.EngineClosed: "ModelConnectionError", errors.EngineAsleep: "ModelConnectionError",
    errors.EngineDead: "ModelConnectionError", errors.FleetError: "ModelConnectionError", errors.WrongProcess: None,
}  # fmt: skip
"""LangChain's names of the engine's errors; one that is absent has its base's. `WrongLoop`, `WrongProcess` and
`InvariantViolation` have none: mistakes in a program, not failures of the model."""


@cache
def _both(kind: type[errors.EngineError]) -> type[errors.EngineError] | None:
    """The class that is both; None: there is none, or `kind` is both already. A name that this langchain-core lacks
    falls back to `ModelError`, then to `LangChainException`."""
    name = next((_THEIRS[base] for base in kind.__mro__ if base in _THEIRS), None)
    if name is None or issubclass(kind, lc.LangChainException):
        return None
    theirs = getattr(lc, name, getattr(lc, "ModelError", lc.LangChainException))
    return type(kind.__name__, (kind, theirs), {"__doc__": kind.__doc__, "__module__": __name__})


@contextmanager
def mapped_errors() -> Iterator[None]:
    """Raise what leaves the block as its LangChain counterpart; other errors pass untouched."""
    try:
        yield
    except errors.EngineError as error:
        kind = _both(type(error))  # type: ignore[arg-type]  # a class hashes as a class
        if kind is None:
            raise
        both = kind.__new__(kind)
        both.args = error.args
        both.__dict__.update(error.__dict__)
        raise both.with_traceback(error.__traceback__) from error.__cause__
