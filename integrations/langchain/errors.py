"""The engine's errors as LangChain's, so that retries, fallbacks and `except ModelError` work.

A mapped error is an instance of both: `except ContextOverflowError` and `except ContextLengthExceeded` each catch it.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import resources

from langchain_core import exceptions as lc

from asyncengine import errors

_TABLE = tomllib.loads((resources.files(__package__) / "errors.toml").read_text(encoding="utf-8"))
_THEIRS: dict[type, str] = {getattr(errors, ours): theirs for theirs, names in _TABLE.items() for ours in names}


@cache
def _both(error_type: type[errors.EngineError]) -> type[errors.EngineError] | None:
    """A subclass of `error_type` and of LangChain's counterpart; None: there is none, or `error_type` is one already. A
    name that this langchain-core lacks falls back to `ModelError`, then to `LangChainException`."""
    name = next((_THEIRS[base] for base in error_type.__mro__ if base in _THEIRS), None)
    if name in (None, "none") or issubclass(error_type, lc.LangChainException):
        return None
    theirs = getattr(lc, name, getattr(lc, "ModelError", lc.LangChainException))
    return type(error_type.__name__, (error_type, theirs), {"__doc__": error_type.__doc__, "__module__": __name__})


@contextmanager
def mapped_errors() -> Iterator[None]:
    """Raise the block's engine errors as their LangChain counterparts; other errors pass unchanged."""
    try:
        yield
    except errors.EngineError as error:
        both_class = _both(type(error))  # type: ignore[arg-type]  # a class hashes as a class
        if both_class is None:
            raise
        both = both_class.__new__(both_class)  # not called: constructors of errors take different arguments
        both.args = error.args
        both.__dict__.update(error.__dict__)
        raise both.with_traceback(error.__traceback__) from error.__cause__
