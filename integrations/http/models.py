"""The models that an app serves, by the names that requests give, and its settings."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self

from asyncengine.async_engine import AsyncEngine
from asyncengine.engine_group import EngineGroup
from asyncengine.errors import EngineClosed, EngineError, ModelNotFound
from asyncengine.integrations.http.keys import Key
from asyncengine.integrations.http.problems import Problem
from asyncengine.integrations.http.requests import KEY, MAX_WAIT, Requests

log = logging.getLogger("asyncengine.serve")


@dataclass(slots=True)
class Target:
    """The engine that answers a request."""

    name: str
    """Name for the response: the one that was asked for, or the model's own."""
    base: str
    """The model's own name."""
    engine: AsyncEngine
    adapter: str | None = None
    _let_go: Callable[[], None] | None = None
    """Tells the group that this request has ended; None once it was told."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        """The request has ended, and its model may be closed. Idempotent."""
        let_go, self._let_go = self._let_go, None
        if let_go is not None:
            let_go()


class Models:
    """Models by name, loaded or not, their adapters, and other names for both."""

    def __init__(
        self, engines: EngineGroup | Mapping[str, AsyncEngine], aliases: Mapping[str, str] | None = None
    ) -> None:
        """`aliases`: other names of models and adapters; the one called "*" stands for every name that is unknown."""
        self.group = engines if isinstance(engines, EngineGroup) else EngineGroup(engines)
        self._aliases = dict(aliases or {})
        self._observers: list[Callable[[str, AsyncEngine], object]] = []
        self._shown: dict[str, AsyncEngine] = {}
        self.draining_until: float | None = None
        """When the last request must have ended, on the monotonic clock; None: the server goes on."""
        self._in_use = 0
        """Targets that are not released: requests under way."""
        self._drained: Callable[[], object] = bool
        self._begun, self._created = int(time.time()), dict[str, int]()
        """Times at which the app was made and models were loaded, in seconds since 1970."""
        self._abilities: dict[str, dict[str, Any]] = {}
        """Abilities of models that are loaded, or were when they were listed."""
        for name, engine in self.group.loaded.items():
            self._show(name, engine)

    def watch(self, observer: Callable[[str, AsyncEngine], object]) -> None:
        """Call `observer` with the name of each engine and the engine: the loaded ones now, later ones once loaded."""
        self._observers.append(observer)
        for name, engine in self.group.loaded.items():
            observer(name, engine)

    def _show(self, name: str, engine: AsyncEngine) -> None:
        self._shown[name] = engine
        self._created[name] = int(time.time())
        for observer in self._observers:
            observer(name, engine)

    async def acquire(self, name: str | None, task: str = "generate") -> Target:
        """The engine for a request, loaded if need be; None: the only one for `task`. To be released when the request
        has ended.

        Raises `Problem`: 400 where the request must say which, 404 naming the models there are, 503 for a model that
        cannot be loaded now.
        """
        base, adapter = self._find(name, task)
        if self.draining_until is not None:
            left = max(1, min(MAX_WAIT, math.ceil(self.draining_until - time.monotonic())))
            why = "the server ends, and takes no more requests"
            raise Problem(503, why, code="draining", headers=(("retry-after", str(left)),))
        engine = await self._acquired(base)
        if self._shown.get(base) is not engine:  # it was unloaded and loaded again: observers hook into each engine
            self._show(base, engine)
        self._in_use += 1
        return Target(name or base, base, engine, adapter, partial(self._release, base))

    def _release(self, base: str) -> None:
        self._in_use -= 1
        self.group.release(base)
        self._check_drained()

    def drain(self, seconds: float, then: Callable[[], object]) -> None:
        """Refuse new requests, and call `then` once all running ones have ended. `seconds`: the time these have."""
        self.draining_until, self._drained = time.monotonic() + seconds, then
        self._check_drained()

    def _check_drained(self) -> None:
        if self.draining_until is not None and not self._in_use:
            self._drained()

    async def _acquired(self, base: str) -> AsyncEngine:
        try:
            return await self.group.acquire(base)
        except EngineError as error:
            if isinstance(error, EngineClosed):
                raise
            log.error("%s cannot be loaded: %s", base, error)  # which may name folders: nothing for clients
            status = 404 if isinstance(error, ModelNotFound) else 503
            message = f"{base!r} cannot be loaded; the server's log says why"
            raise Problem(status, message, "model", "model_unavailable") from error

    def _find(self, name: str | None, task: str) -> tuple[str, str | None]:
        """The name of a model, and of an adapter of it if that is meant."""
        if name is None:
            able_to = (task, "auto", "generate") if task == "decide" else (task, "auto")
            able = [model for model in self.group if self.group.task_of(model) in able_to]
            usual = self._aliases.get("", self._aliases.get("*"))
            able = [usual] if usual in able else able
            if len(able) != 1:
                why = f"must say which model: {_listed(able)}" if able else f"no model here is one to {task}"
                raise Problem(400, why, "model", "model_required")
            return able[0], None
        plain = name.removesuffix(":latest")  # which clients of Ollama put behind a name without a tag
        for wanted in (self._aliases.get(name, name), self._aliases.get(plain, plain), self._aliases.get("*")):
            for base, adapter in self._names():
                if wanted == (adapter or base):
                    return base, adapter
        listed = _listed(list(self.group))
        raise Problem(404, f"no model {name[:100]!r} is served here: {listed}", "model", "model_not_found")

    def _names(self) -> Iterator[tuple[str, str | None]]:
        """Pairs of model and adapter: the models themselves first, then the adapters of each."""
        yield from ((base, None) for base in self.group)
        yield from ((base, adapter) for base in self.group for adapter in self.group.adapter_names(base))

    async def load_adapter(self, name: str, path: str, model: str | None, *, again: bool) -> None:
        """Load an adapter of `model`; None: of the only one that generates. `again`: its name may be taken by another.

        Raises `Problem` and `AdapterError`.
        """
        if name in self._aliases or name in self.group or (not again and name in [lora for _, lora in self._names()]):
            raise Problem(400, f"the name {name[:100]!r} is taken", "lora_name", "name_taken")
        await self.group.load_adapter(name, path, model=self._find(model, "generate")[0])

    async def unload_adapter(self, name: str, model: str | None) -> None:
        """Unload an adapter. Raises `Problem` and `AdapterError`."""
        bases = [base for base, adapter in self._names() if name == adapter and model in (None, base)]
        await self.group.unload_adapter(name, model=bases[0] if bases else self._find(model, "generate")[0])

    def listing(self) -> list[dict[str, Any]]:
        """Objects of OpenAI's /v1/models: models, loaded or not, then adapters with the model that is under them."""
        return [self._row(adapter or base, base, adapter) for base, adapter in self._names()]

    def described(self, name: str) -> dict[str, Any]:
        """The /v1/models object of a model, an adapter or an alias. Raises `Problem` 404 naming the models served."""
        return self._row(name, *self._find(name, "auto"))

    def _row(self, name: str, base: str, adapter: str | None) -> dict[str, Any]:
        if (engine := self.group.loaded.get(base)) is not None:
            self._abilities[base] = _abilities(engine)
        unknown = {"max_model_len": None, "task": self.group.task_of(base), "capabilities": None}
        return {
            "id": name, "object": "model", "created": self._created.get(base, self._begun), "owned_by": "asyncengine",
            "root": base, "parent": base if adapter else None, "loaded": engine is not None,
            "status": {"value": "unloaded" if engine is None else "loaded"},  # as llama.cpp's router has it
            **self._abilities.get(base, unknown),
        }  # fmt: skip


def _abilities(engine: AsyncEngine) -> dict[str, Any]:
    """The length of a model's context, its task, and its abilities, in Ollama's words where it has one."""
    info = engine.info
    generates, names = info.task == "generate", {"generate": "completion", "embed": "embedding"}
    able = {
        "chat": info.has_chat_template and generates, "tools": info.tool_format is not None,
        "structured_output": generates and engine.core.config.grammar_backend != "none",
        "thinking": info.reasons, "vision": info.no_images is None,
    }  # fmt: skip
    capabilities = [names.get(info.task, info.task), *[name for name, can in able.items() if can]]
    return {"max_model_len": info.max_model_len, "task": info.task, "capabilities": capabilities}


@dataclass(slots=True)
class Serving:
    """Models and settings of an app, which its endpoints share; `asyncengine.serve.app` says what each is."""

    models: Models
    keys: Sequence[Key] = ()
    strict: bool = False
    max_body: int = 32 << 20
    response_memory: int = 64 << 20
    allow_adapters: bool = False
    hosts: Collection[str] | None = None
    cors: Sequence[str] = ()
    telemetry: bool = False
    batch_dir: str | None = None
    requests: Requests = field(default_factory=Requests)

    @staticmethod
    def may_operate(scope: Mapping[str, Any]) -> bool:
        """Whether a request shows a key whose holder may do what stops or slows others."""
        return KEY in scope and scope[KEY].operator


def _listed(names: list[str]) -> str:
    shown = ", ".join(map(repr, names[:20]))
    return shown + (f" and {len(names) - 20} more" if len(names) > 20 else "") or "none"
