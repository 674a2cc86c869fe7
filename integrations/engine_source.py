"""Sources of a model object's engine: one that the caller owns, or the process-wide shared one."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

from asyncengine import AsyncEngine, Engine, EngineConfig, EngineHandle, ModelInfo, shared_engine
from asyncengine.errors import EngineClosed

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
        """False once a field of the model object was assigned and this source no longer belongs to it."""
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

    def known(self) -> ModelInfo | None:
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
