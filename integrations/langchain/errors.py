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
def _both(kind: type[errors.EngineError]) -> type[errors.EngineError] | None:
    """The class that is both; None: there is none, or `kind` is both already. A name that this langchain-core lacks
    falls back to `ModelError`, then to `LangChainException`."""
    name = next((_THEIRS[base] for base in kind.__mro__ if base in _THEIRS), None)
    if name in (None, "none") or issubclass(kind, lc.LangChainException):
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
