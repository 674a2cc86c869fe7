"""Every error a caller can meet. One root, `EngineError`; each class names what to do about it.

Errors raised at submit (`InvalidParameter` and its subclasses, `QueueFull`, `EngineClosed`) do not affect other
requests: the refused one never reached the scheduler.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from importlib import resources
from typing import Self

_LONGEST_NAME, _LONGEST_VALUE, _LONGEST_LIMIT = 80, 80, 1000
"""Characters of what a message quotes."""
_LONGEST_GUESS = 64
"""Characters; a longer unknown name is no misspelling, and comparing it takes long."""


@cache
def _elsewhere() -> dict[str, str]:
    """Our name for each of other libraries' names."""
    tables = tomllib.loads((resources.files(__package__) / "other_names.toml").read_text(encoding="utf-8"))
    return {theirs: ours for ours, names in tables.items() for theirs in names}


def shorten(text: str, most: int) -> str:
    """At most `most` characters of `text`."""
    return text if len(text) <= most else text[: most - 3] + "..."


def nearest(name: str, names: Collection[str]) -> str | None:
    """The one of `names` that another library calls `name`, or that `name` misspells; None if there is none."""
    near = difflib.get_close_matches(name, names, n=1) if len(name) <= _LONGEST_GUESS else []
    return meant if (meant := _elsewhere().get(name)) in names else next(iter(near), None)


def _shown(value: object) -> str:
    try:
        return shorten(repr(value), _LONGEST_VALUE)
    except Exception:  # an integer of too many digits, a structure too deep, a broken __repr__
        return f"a {type(value).__name__} that cannot be shown"


class EngineError(Exception):
    """Root of all errors raised by asyncengine. They can be pickled, whatever their constructors take: errors of
    another process are raised in this one."""

    def __reduce__(self) -> tuple[object, ...]:
        return _remade, (type(self), self.args), self.__dict__


def _remade(error_type: type[EngineError], args: tuple[object, ...]) -> EngineError:
    error = error_type.__new__(error_type)
    error.args = args
    return error


class InvalidParameter(EngineError, ValueError):
    """A parameter is malformed, non-finite, out of range or unknown. Raised at submit or construction.

    `field` is the parameter's name as the caller wrote it and `limit` the bound it broke, in words.
    """

    def __init__(self, field: str, limit: str, value: object = None) -> None:
        self.field = field
        self.limit = limit
        self.value = value
        got = "" if value is None else f", got {_shown(value)}"
        super().__init__(f"{shorten(field, _LONGEST_NAME)}: {shorten(limit, _LONGEST_LIMIT)}{got}")

    @classmethod
    def unknown(cls, name: str, known: Collection[str], elsewhere: Mapping[str, str] | None = None) -> Self:
        """The refusal of a name that is not in `known`, with the one that was meant. `elsewhere`: advice
        for names that belong to another object."""
        meant = _elsewhere().get(name, name)
        if elsewhere is not None and meant in elsewhere:
            return cls(name, elsewhere[meant])
        guess = nearest(name, known)
        return cls(name, "unknown parameter" + (f"; did you mean {guess!r}?" if guess else ""))


@contextmanager
def naming(theirs: Mapping[str, str]) -> Iterator[None]:
    """Have errors about a parameter, or a part of it, name the caller's field, where `theirs` has it."""
    try:
        yield
    except InvalidParameter as error:
        field, bracket, rest = error.field.partition("[")
        if theirs.get(field, field) != field:
            raise type(error)(theirs[field] + bracket + rest, error.limit, error.value) from None
        raise


class ContextLengthExceeded(InvalidParameter):
    """Prompt plus requested output can never fit the model's context (or the KV cache)."""


class GrammarError(InvalidParameter):
    """A grammar cannot be used: malformed, unsupported, too large, or its compilation failed."""


_BRANCHES = "write an anyOf with a branch for each case"
INSTEAD = {
    "uniqueItems": "declare a list in place of a set",
    "not": "list what is allowed (enum, type, pattern)",
    "contains": "describe every item",
    "$dynamicRef": "use $ref",
    **dict.fromkeys(("if", "oneOf", "dependentSchemas"), _BRANCHES),
}
"""Advice by keyword: how to write something that can be enforced. Read only."""


class GrammarUnsupported(GrammarError):
    """The grammar library cannot enforce a part of the schema; `features` are (keyword, JSON pointer) pairs.

    Leave the part out, or choose `unsupported="ignore"` or `unsupported="validate"`.
    """

    def __init__(self, field: str, features: Sequence[tuple[str, str]], detail: str = "") -> None:
        self.features = tuple(features)
        self.detail = detail
        shown = ", ".join(f"{keyword!r} at {pointer or '/'}" for keyword, pointer in self.features[:8])
        more = f" and {len(self.features) - 8} more" if len(self.features) > 8 else ""
        problem = f"cannot enforce {shown}{more}" if self.features else "cannot be enforced"
        instead = dict.fromkeys(INSTEAD[keyword] for keyword, _ in self.features if keyword in INSTEAD)
        advice = " and ".join(list(instead)[:3]) or "leave it out"
        if any(pointer for _, pointer in self.features):  # a schema: the only kind that can do with less
            advice += (
                ', or have it not enforced: "strict": False in a tool or a json_schema response_format, or '
                'Grammar.json_schema(..., unsupported="ignore"), or "validate" to check it at the end'
            )
        super().__init__(field, f"{problem}{f' ({detail})' if detail else ''}; {advice}")


class GrammarTooLarge(GrammarError):
    """The grammar exceeds a limit of size, nesting or complexity; the message names the limit."""


class GrammarImpossible(GrammarError):
    """No output matches the grammar, or none was found within the search's limit."""


class GrammarTimeout(GrammarError):
    """Compiling the grammar took longer than `grammar_timeout`. Nothing is remembered: it may be tried again."""


class BudgetTooSmall(InvalidParameter):
    """The token budget is below the shortest output the grammar allows."""


class AdapterError(InvalidParameter):
    """An adapter cannot be loaded: malformed, unsupported, too large, or made for another model.

    `field` is the setting of adapter_config.json, the tensor or the argument that is at fault.
    """


class AdapterNotFound(AdapterError):
    """No adapter is loaded under that name."""


class AdapterInUse(AdapterError):
    """Requests still use the adapter, or all the memory for adapters. Try again when they have ended."""


class ModelNotFound(EngineError):
    """No model at that path or hub id, or its files are incomplete."""

    def __init__(self, message: str) -> None:
        super().__init__(shorten(message, _LONGEST_LIMIT))


class UnsupportedModel(EngineError):
    """The model loads, but this engine cannot run its family; the message says which part."""

    def __init__(self, message: str) -> None:
        super().__init__(shorten(message, _LONGEST_LIMIT))


class OutOfMemory(EngineError):
    """The weights or the requested KV cache do not fit into the memory there is."""


class QueueFull(EngineError):
    """The waiting queue is at its limit (`max_queued_requests` or `max_queued_tokens`). Try again later."""

    def __init__(self, field: str, limit: int, waiting: int | None = None) -> None:
        """`waiting`: how many wait now; None: as many as may."""
        self.field = field
        self.limit = limit
        self.waiting = limit if waiting is None else waiting
        super().__init__(f"the waiting queue is full: {field}={limit}")


class EngineAsleep(EngineError):
    """The engine is paused or sleeps, and refuses requests meanwhile; try again once it is awake."""


class EngineClosed(EngineError):
    """The engine is closed, draining, or was never started."""


class WrongProcess(EngineClosed):
    """An engine does not survive a fork: spawn processes instead, or fork before the first engine is loaded."""


class EngineDead(EngineError):
    """The engine's loop or its runner died. `cause` is what killed it; no request can be served."""

    def __init__(self, cause: BaseException | None = None) -> None:
        self.cause = cause
        detail = f": {type(cause).__name__}: {cause}" if cause is not None else ""
        super().__init__(f"the engine died{detail}")


class FleetError(EngineError):
    """A fleet cannot be started, reached or changed as asked; the message says which part is missing."""


class RequestTimeout(EngineError):
    """A deadline passed. `partial` carries the text produced until then where the caller asked to raise."""

    def __init__(self, message: str, partial: str = "") -> None:
        self.partial = partial
        super().__init__(message)


class RequestFailed(EngineError):
    """This one request ended with an error; the engine and all other requests live on."""


class WrongLoop(EngineError, RuntimeError):
    """A blocking call would deadlock: it came from the very thread that drives the engine."""


class InvariantViolation(EngineError):
    """The engine's books do not balance (a leak, a double free, an illegal transition). Always a bug here."""


def again(error: Exception) -> Exception:
    """The same error as a new object: one that is raised twice would carry both callers' tracebacks."""
    copy = type(error).__new__(type(error))
    copy.__dict__.update(error.__dict__)
    copy.args = error.args
    return copy
