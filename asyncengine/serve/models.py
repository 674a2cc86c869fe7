"""The models that an app serves, by the names that requests give."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from asyncengine.async_engine import AsyncEngine
from asyncengine.serve.problems import Problem


@dataclass(slots=True)
class Target:
    """The engine that answers a request."""

    name: str
    """Name for the response: the one that was asked for, or the model's own."""
    engine: AsyncEngine
    adapter: str | None = None

    def release(self) -> None:
        """The request has ended."""


class Models:
    """Engines by name, their adapters, and other names for both."""

    def __init__(self, engines: Mapping[str, AsyncEngine], aliases: Mapping[str, str] | None = None) -> None:
        """`aliases`: other names of models and adapters; the one called "*" stands for every name that is unknown."""
        self._engines = dict(engines)
        self._aliases = dict(aliases or {})

    @property
    def loaded(self) -> Mapping[str, AsyncEngine]:
        """Engines that run, by name."""
        return self._engines

    def watch(self, observer: Callable[[str, AsyncEngine], object]) -> None:
        """Have every engine that serves shown to `observer`, with its name: those there are now, and later ones."""
        for name, engine in self._engines.items():
            observer(name, engine)

    async def acquire(self, name: str | None, task: str = "generate") -> Target:
        """The engine for a request; None: the only one for `task`. To be released when the request has ended.

        Raises `Problem` 404 naming the models there are.
        """
        able = [each for each, engine in self._engines.items() if engine.info.task == task]
        if name is None:
            if len(able) != 1:
                raise Problem(400, f"must say which model: {_listed(able)}", "model", "model_required")
            return Target(able[0], self._engines[able[0]])
        found = self._find(self._aliases.get(name, name)) or self._find(self._aliases.get("*", ""))
        if found is None:
            raise Problem(
                404,
                f"no model {name[:100]!r} is served here: {_listed(list(self._engines))}",
                "model",
                "model_not_found",
            )
        return Target(name, *found)

    def _find(self, name: str) -> tuple[AsyncEngine, str | None] | None:
        if name in self._engines:
            return self._engines[name], None
        for engine in self._engines.values():
            if any(adapter.name == name for adapter in engine.adapters()):
                return engine, name
        return None

    @property
    def alive(self) -> bool:
        """True if every engine would take a request."""
        return all(engine.alive for engine in self._engines.values())

    def listing(self) -> list[dict[str, Any]]:
        """Objects of OpenAI's /v1/models: models, then adapters with the model that is under them."""
        rows = [_row(name, None) for name in self._engines]
        for name, engine in self._engines.items():
            rows += [_row(adapter.name, name) for adapter in engine.adapters()]
        return rows


def _row(name: str, parent: str | None) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": 0,
        "owned_by": "asyncengine",
        "root": parent or name,
        "parent": parent,
    }


def _listed(names: list[str]) -> str:
    shown = ", ".join(map(repr, names[:20]))
    return shown + (f" and {len(names) - 20} more" if len(names) > 20 else "") or "none"
