"""Which engine a framework's object works with: the fields of every adapter class, and what copies of it share."""

from __future__ import annotations

import os
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, field_validator, model_validator

from asyncengine import AsyncEngine, Engine
from asyncengine.errors import InvalidParameter
from asyncengine.integrations.engine_source import AnyEngine, EngineSource


class EngineChoice(BaseModel):
    """An engine by its model's name and settings, or one that the caller owns. Constructing loads nothing.

    The adapter classes refuse unknown fields (the frameworks' own bases would ignore them). Wrong values come as
    pydantic's `ValidationError` (a `ValueError`) naming the field.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)

    variable: ClassVar[str] = "ASYNCENGINE_MODEL"
    """The environment variable that `model` defaults to."""
    choices: ClassVar[str] = 'a path, a hub id or "demo"'

    model: str = ""
    """Path or hub id."""
    engine: AnyEngine | None = Field(default=None, exclude=True, repr=False)
    """An engine that the caller owns; None: the process-wide shared engine of (model, engine_config)."""
    engine_config: dict[str, Any] = Field(default_factory=dict)
    """Further `EngineConfig` fields of the shared engine."""

    _source: EngineSource | None = PrivateAttr(default=None)

    @field_validator("model", mode="before")
    @classmethod
    def _path_as_text(cls, value: Any) -> Any:
        return os.fspath(value) if isinstance(value, os.PathLike) else value

    @model_validator(mode="after")
    def _check_engine_fields(self) -> Self:
        settings = self._settings()
        if self.engine is not None and settings:
            first = "engine_config" if self.engine_config else next(iter(settings))
            raise InvalidParameter(first, "must be left out where engine is given: that engine is configured")
        if self.engine is None and not self.model:
            raise InvalidParameter("model", f"must be given (or set {self.variable}): {self.choices}")
        self._engines()
        return self

    def get_engine(self) -> Engine:
        """The engine behind this object, for what is no request: `load_adapter`, `adapters`, `stats`. Loads the model.

        The shared engine lives as long as a model object that uses it; it is not yours to close.
        """
        return self._engines().sync()

    async def aget_engine(self) -> AsyncEngine:
        """The same engine, for a coroutine."""
        return await self._engines().aio()

    def _settings(self) -> dict[str, Any]:
        """`EngineConfig` fields of the shared engine."""
        return dict(self.engine_config)

    def _engines(self) -> EngineSource:
        """The source of the engine, made anew only where a field it depends on was assigned since."""
        source, settings = self._source, self._settings()
        if source is None or not source.serves(self.model, settings, self.engine):
            source = self._source = EngineSource(self.model, settings, self.engine)
        return source

    def __getstate__(self) -> dict[Any, Any]:
        if self.engine is not None:
            raise TypeError("a model object with an explicit engine cannot be pickled; pass model= instead of engine=")
        return super().__getstate__()

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        memo = {} if memo is None else memo
        memo[id(self.engine)] = self.engine  # an engine is never copied: both objects use it
        return super().__deepcopy__(memo)
