"""The engine of a framework's model object: the fields that choose it, and the source that copies of it share."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import fields
from types import MappingProxyType, NoneType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self, get_args, get_type_hints

from pydantic import BaseModel, Field, PrivateAttr, SkipValidation, create_model, field_validator, model_validator

from asyncengine import AsyncEngine, Engine, EngineConfig, EngineHandle, ModelInfo, shared_engine
from asyncengine.errors import EngineClosed, InvalidParameter, WrongLoop

AnyEngine = AsyncEngine | Engine | EngineHandle


class EngineSource:
    """The engine behind one model object and all its copies.

    Making one loads nothing. Without an explicit engine it holds one reference on the shared engine of
    (model, config), given back when the last copy is garbage collected: the engine lives as long as a model object
    that may use it, and `keep_alive` seconds more. An explicit engine stays the caller's to close.

    Raises `InvalidParameter` for an unknown or malformed setting.
    """

    def __init__(
        self, model: str, config: Mapping[str, Any], engine: AnyEngine | None = None, keep_alive: float | None = None
    ) -> None:
        self.model = model
        self.config = dict(config)
        self.keep_alive = keep_alive
        self.engine = engine
        self._engine: AnyEngine
        if engine is not None:
            self._engine = engine
        else:
            handle = shared_engine(model, config=EngineConfig.from_dict(self.config), keep_alive=keep_alive)
            self._engine = handle
            # At exit the shared engines close themselves; a finalizer running then would find them gone.
            weakref.finalize(self, handle.close).atexit = False

    def serves(self, model: str, config: Mapping[str, Any], engine: AnyEngine | None, keep_alive: float | None) -> bool:
        """Whether this is the source for these fields of a model object, which may have been assigned since."""
        mine = self.model, self.config, self.keep_alive
        return engine is self.engine and (engine is not None or (model, config, keep_alive) == mine)

    def sync(self) -> Engine:
        """The engine for blocking calls from any thread; the first call loads the model.

        Raises what loading raises. The calls themselves raise `WrongLoop` on an owned engine's own loop thread.
        """
        engine = self._engine
        if isinstance(engine, EngineHandle):
            return engine.get()
        return engine if isinstance(engine, Engine) else Engine(engine)

    async def aio(self) -> AsyncEngine:
        """The engine for awaiting calls on the running loop; the first call loads the model off the loop."""
        engine = self._engine
        if isinstance(engine, EngineHandle):
            return await engine.aget()
        return engine if isinstance(engine, AsyncEngine) else engine.aengine

    def check_waiting(self) -> None:
        """Raises `WrongLoop` if this thread runs the engine's loop: waiting here for threads that wait for the engine
        would never end."""
        engine = None if isinstance(self._engine, EngineHandle) else self.sync().aengine
        if engine is not None and engine.alive and engine.host.drives_this_thread():
            raise WrongLoop(
                "other threads would wait for the engine, and this one, on which its event loop runs, for them, for "
                "ever: await abatch() here, or load the engine with hosted=True"
            )

    @property
    def name(self) -> str:
        """The model's name, as far as it is known without loading it."""
        engine = self._engine
        if self.model:
            return self.model
        if isinstance(engine, EngineHandle):
            return engine.name
        try:
            return engine.info.name
        except EngineClosed:  # not started yet
            return "asyncengine"

    def info(self) -> ModelInfo:
        """Facts about the model. Loads the shared engine's model if nothing has yet, blocking."""
        engine = self._engine
        return engine.get().info if isinstance(engine, EngineHandle) else engine.info

    def info_if_loaded(self) -> ModelInfo | None:
        """Facts about the model, if it is loaded already."""
        engine = self._engine
        try:
            if isinstance(engine, EngineHandle):
                return engine.get().info if engine.loaded else None
            return engine.info
        except EngineClosed:  # not started yet, or closed by its owner
            return None

    def __deepcopy__(self, memo: dict[int, Any]) -> EngineSource:
        return self

    def __reduce__(self) -> tuple[type[EngineSource], tuple[str, dict[str, Any], None, float | None]]:
        return EngineSource, (self.model, self.config, None, self.keep_alive)


SETTINGS = frozenset(each.name for each in fields(EngineConfig))


def _setting_fields() -> dict[str, Any]:
    """Pydantic fields for those of `EngineConfig`, with their types; `EngineConfig` checks the values.

    A field's default is None, "the engine's default", unless None is itself a setting: then it is the engine's default.
    """
    hints, made = get_type_hints(EngineConfig), dict[str, Any]()
    for each in fields(EngineConfig):
        takes_none = each.default is not None and NoneType in get_args(hints[each.name])
        made[each.name] = (Annotated[hints[each.name] | None, SkipValidation], each.default if takes_none else None)
    return made


if TYPE_CHECKING:
    EngineSettings = BaseModel
else:
    EngineSettings = create_model("EngineSettings", __config__={"arbitrary_types_allowed": True}, **_setting_fields())


class EngineChoice(EngineSettings):
    """An engine by its model's name and settings, or one that the caller owns. Constructing loads nothing.

    Every field of `EngineConfig` is a field here, too. The adapter classes refuse unknown fields by name, with the
    nearest known one (the frameworks' own bases would ignore them). Wrong values come as pydantic's `ValidationError`
    (a `ValueError`) naming the field.
    """

    setting_names: ClassVar[frozenset[str]] = SETTINGS
    """Fields that are settings of the engine."""
    elsewhere: ClassVar[Mapping[str, str]] = MappingProxyType({})
    """Names that are no fields here but exist elsewhere, with the end of the error's sentence about each."""
    variable: ClassVar[str] = "ASYNCENGINE_MODEL"
    """The environment variable that `model` defaults to."""
    choices: ClassVar[str] = 'a path, a hub id or "demo"'

    model: str = ""
    """Path or hub id."""
    engine: AnyEngine | None = Field(default=None, exclude=True, repr=False)
    """An engine that the caller owns; None: the process-wide shared engine of (model, engine_config)."""
    engine_config: dict[str, Any] = Field(default_factory=dict)
    """Settings of the shared engine in one piece: `EngineConfig` fields, or an `EngineConfig`."""
    keep_alive: float | None = None
    """Seconds that the shared engine stays loaded after its last model object; None: a minute, 0: not at all."""

    _source: EngineSource | None = PrivateAttr(default=None)

    @model_validator(mode="before")
    @classmethod
    def _check_names(cls, given: Any) -> Any:
        if isinstance(given, dict):
            spelled = [(field.validation_alias or name) for name, field in cls.model_fields.items()]
            names = [name for alias in spelled for name in getattr(alias, "choices", [alias])]
            for name in given:
                if name not in names:
                    raise InvalidParameter.unknown(name, names, cls.elsewhere)
        return given

    @field_validator("engine_config", mode="before")
    @classmethod
    def _config_as_dict(cls, value: Any) -> Any:
        if not isinstance(value, EngineConfig):
            return value
        default = EngineConfig()
        return {name: mine for name in sorted(SETTINGS) if (mine := getattr(value, name)) != getattr(default, name)}

    @field_validator("model", *SETTINGS, mode="before", check_fields=False)
    @classmethod
    def _paths_as_text(cls, value: Any) -> Any:
        """Paths as text, which can be serialized and compared."""
        if isinstance(value, Mapping):
            return {name: cls._paths_as_text(path) for name, path in value.items()}
        return os.fspath(value) if isinstance(value, os.PathLike) else value

    @model_validator(mode="after")
    def _check_engine_fields(self) -> Self:
        settings = self._settings()
        if self.engine is not None and (settings or self.keep_alive is not None):
            first = "engine_config" if self.engine_config else next(iter(settings), "keep_alive")
            raise InvalidParameter(first, "must be left out where engine is given: that engine is configured")
        if self.engine is None and not self.model:
            raise InvalidParameter("model", f"must be given (or set {self.variable}): {self.choices}")
        self._engines()
        return self

    def get_engine(self) -> Engine:
        """The engine of this object, to call `load_adapter`, `adapters` or `stats`, say. Loads the model.

        The shared engine lives `keep_alive` seconds longer than model objects that use it; it is not yours to close.
        """
        return self._engines().sync()

    async def aget_engine(self) -> AsyncEngine:
        """The same engine, for a coroutine."""
        return await self._engines().aio()

    def _settings(self) -> dict[str, Any]:
        """`EngineConfig` fields of the shared engine, from fields here and from `engine_config`, sorted by name, as
        LangChain's caches have them in their keys. Raises `InvalidParameter` for one with two values."""
        assigned = {name: getattr(self, name) for name in self.setting_names & self.model_fields_set}
        assigned = {name: value for name, value in assigned.items() if value != type(self).model_fields[name].default}
        for name in sorted(assigned.keys() & self.engine_config):
            if assigned[name] != self.engine_config[name]:
                raise InvalidParameter(name, "is given twice: as a field and in engine_config", assigned[name])
        return dict(sorted({**self.engine_config, **assigned}.items()))

    def _engines(self) -> EngineSource:
        """The source of the engine, made anew only if a field that it depends on was assigned since."""
        source, settings = self._source, self._settings()
        if source is None or not source.serves(self.model, settings, self.engine, self.keep_alive):
            source = self._source = EngineSource(self.model, settings, self.engine, self.keep_alive)
        return source

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        """Fields for the repr, without settings at their defaults."""
        for name, value in super().__repr_args__():
            if name not in SETTINGS or value != type(self).model_fields[name].default:
                yield name, value

    def __getstate__(self) -> dict[Any, Any]:
        if self.engine is not None:
            raise TypeError("a model object with an explicit engine cannot be pickled; pass model= instead of engine=")
        return super().__getstate__()

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        memo = {} if memo is None else memo
        memo[id(self.engine)] = self.engine  # an engine is never copied: both objects use it
        return super().__deepcopy__(memo)
