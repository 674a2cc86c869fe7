"""Reading a body's fields, one by one, so that whatever is left at the end was not understood."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from asyncengine.checks import as_switch, as_text
from asyncengine.errors import InvalidParameter


class Fields:
    """The fields of a request's body that have not been read yet."""

    def __init__(self, body: object, *, strict: bool = False, name: str = "") -> None:
        """`strict`: fields that would be passed over are refused. `name`: that of the field whose object it is.

        Raises `InvalidParameter` unless it is an object.
        """
        self._left: dict[str, Any] = dict(as_object(name or "body", body))
        self.strict = strict
        self._within = f"{name}." if name else ""
        self.ignored: list[str] = []
        """Names of fields that were given and change nothing; they are told in a header of the response."""

    def take(self, name: str, default: Any = None) -> Any:
        """The value of a field, or `default` where it is missing or null."""
        value = self._left.pop(name, None)
        return default if value is None else value

    def peek(self, name: str) -> Any:
        """The value of a field that is still to be read."""
        return self._left.get(name)

    def text(self, name: str) -> str | None:
        """A str or None. Raises `InvalidParameter`."""
        value = self.take(name)
        return None if value is None else as_text(self._within + name, value)

    def switch(self, name: str, default: bool = False) -> bool:
        """A bool. Raises `InvalidParameter`."""
        return as_switch(self._within + name, self.take(name, default))

    def inner(self, name: str) -> Fields:
        """The fields of an object within; none where it is missing or null. Raises `InvalidParameter`."""
        made = Fields(self.take(name, {}), strict=self.strict, name=self._within + name)
        made.ignored = self.ignored
        return made

    def some(self, names: Mapping[str, str] | Iterable[str]) -> dict[str, Any]:
        """The fields among these that are given and not null; a mapping says what each is called in the engine."""
        renamed = names if isinstance(names, Mapping) else {name: name for name in names}
        return {ours: value for name, ours in renamed.items() if (value := self._left.pop(name, None)) is not None}

    def ignore(self, *names: str) -> None:
        """Pass over fields that this engine has no use for. Raises `InvalidParameter` where `strict`."""
        for name in names:
            if self._left.pop(name, None) is not None:
                self.skip(name)

    def refuse(self, reasons: Mapping[str, str]) -> None:
        """Raises `InvalidParameter` for a field among these, with its reason, unless it is null, false, 0 or empty."""
        for name, reason in reasons.items():
            if value := self._left.pop(name, None):
                raise InvalidParameter(self._within + name, reason, value)

    def skip(self, name: str) -> None:
        """Note that a field, or a part of one, changes nothing. Raises `InvalidParameter` where `strict`."""
        name = (self._within + name)[:100]
        if self.strict:
            raise InvalidParameter(name, "is not served here")
        self.ignored.append(name)

    def end(self, *, known: bool = False) -> None:
        """Pass over the fields that are left: clients of other servers send their own. Raises `InvalidParameter` for
        one of them where `strict`, or where they must all be `known` since each of them asks for another answer.
        """
        if not known:
            self.ignore(*self._left)
        for name, value in self._left.items():
            if value is not None:
                raise InvalidParameter((self._within + name)[:100], "is no field of this request")


def as_object(name: str, value: object) -> Mapping[str, Any]:
    """A JSON object. Raises `InvalidParameter`."""
    if not isinstance(value, Mapping):
        raise InvalidParameter(name, "must be an object", value)
    return value


def objects(name: str, value: object, form: str = "a list of objects") -> list[tuple[str, Mapping[str, Any]]]:
    """The objects in a list, each with its place. Raises `InvalidParameter`, which calls the list `form`."""
    if not isinstance(value, (list, tuple)):
        raise InvalidParameter(name, f"must be {form}", value)
    return [(f"{name}[{at}]", as_object(f"{name}[{at}]", each)) for at, each in enumerate(value)]
