"""The engine's errors as LangChain's, so that retries, fallbacks and `except ModelError` work.

A mapped error is an instance of both: `except ContextOverflowError` and `except ContextLengthExceeded` each catch it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from langchain_core import exceptions as lc

from asyncengine import errors

_THEIRS: dict[type[errors.EngineError], str] = {
    errors.InvalidParameter: "ModelInvalidRequestError",
    errors.GrammarError: "ModelInvalidRequestError",
    errors.GrammarUnsupported: "ModelInvalidRequestError",
    errors.GrammarTooLarge: "ModelInvalidRequestError",
    errors.GrammarImpossible: "ModelInvalidRequestError",
    errors.GrammarTimeout: "ModelTimeoutError",
    errors.BudgetTooSmall: "ModelInvalidRequestError",
    errors.ContextLengthExceeded: "ContextOverflowError",
    errors.AdapterNotFound: "ModelNotFoundError",
    errors.AdapterError: "ModelInvalidRequestError",
    errors.AdapterInUse: "ModelInvalidRequestError",
    errors.ModelNotFound: "ModelNotFoundError",
    errors.UnsupportedModel: "ModelNotFoundError",
    errors.OutOfMemory: "ModelAPIError",
    errors.QueueFull: "ModelRateLimitError",
    errors.RequestTimeout: "ModelTimeoutError",
    errors.RequestFailed: "ModelAPIError",
    errors.EngineClosed: "ModelConnectionError",
    errors.EngineAsleep: "ModelConnectionError",
    errors.EngineDead: "ModelConnectionError",
    errors.FleetError: "ModelConnectionError",
}
"""`WrongLoop`, `WrongProcess` and `InvariantViolation` are absent: mistakes in a program, not failures of the model."""


def _both(kind: type[errors.EngineError], name: str) -> type[errors.EngineError]:
    """A name this langchain-core lacks falls back to `ModelError`, then to `LangChainException`."""
    theirs = getattr(lc, name, getattr(lc, "ModelError", lc.LangChainException))
    return type(kind.__name__, (kind, theirs), {"__doc__": kind.__doc__, "__module__": __name__})


_BOTH = {kind: _both(kind, name) for kind, name in _THEIRS.items()}


@contextmanager
def mapped_errors() -> Iterator[None]:
    """Raise what leaves the block as its LangChain counterpart; other errors pass untouched."""
    try:
        yield
    except errors.EngineError as error:
        kind = _BOTH.get(type(error))
        if kind is None:
            raise
        both = kind.__new__(kind)
        both.args = error.args
        both.__dict__.update(error.__dict__)
        raise both.with_traceback(error.__traceback__) from error.__cause__
