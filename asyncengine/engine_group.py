"""`EngineGroup`: several models in one program, with one memory budget and one front door."""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Self, Unpack

import anyio
import anyio.to_thread

from asyncengine.async_engine import AsyncEngine
from asyncengine.cache_news import PrefixCacheReset
from asyncengine.checks import parse_bytes
from asyncengine.config import EngineConfig, parse_keep_alive
from asyncengine.engine.on_demand import OnDemand, OnDemandModel
from asyncengine.errors import AdapterNotFound, EngineClosed, InvalidParameter
from asyncengine.lora.adapter import AdapterInfo
from asyncengine.options import ChatKeywords, ChatMessages, Prompt, RequestKeywords
from asyncengine.outputs import Classifications, Completion, Decision, Embeddings, Ranking
from asyncengine.sampling_params import SamplingParams
from asyncengine.session import Session
from asyncengine.stats import EngineStats
from asyncengine.stream import TokenStream

ModelSetup = str | os.PathLike[str] | Mapping[str, Any]
"""A model to load: a folder or hub id, or a mapping of "model" and settings of its engine, and its "keep_alive"."""


class EngineGroup(Mapping[str, AsyncEngine]):
    """Engines by name, started and closed together: a chat model, an embedder and a reranker for one program.

        models = {"chat": "Qwen/Qwen3-0.6B", "embed": "BAAI/bge-small-en-v1.5"}
        async with await EngineGroup.from_pretrained(models, memory="8GiB") as group:
            vectors = await group.embed(["..."])
            completion = await group.chat([...], model="chat")

    Each engine is an actor of its own with its own batches; `group["chat"]` is an ordinary `AsyncEngine`. What they
    share is the memory, divided when they are loaded (`models.memory`), and the processors: an engine that
    works through ten thousand documents leaves half of the cores to one that answers a chat (`device.cores`).
    """

    def __init__(self, engines: Mapping[str, AsyncEngine]) -> None:
        """Group engines that exist already; the group closes them."""
        if not engines or not all(isinstance(engine, AsyncEngine) for engine in engines.values()):
            raise InvalidParameter("engines", "must map names to AsyncEngines; for models: from_pretrained", engines)
        self._names = tuple(engines)
        self._loaded = dict(engines)
        self._on_demand: OnDemand | None = None
        self._setups: Setups = {}

    @classmethod
    async def from_pretrained(
        cls, models: Mapping[str, ModelSetup], *, memory: int | str | None = None,
        keep_alive: float | str | None = None, hosted: bool = False, **settings: Any,
    ) -> Self:  # fmt: skip
        """Load `models`, a mapping of names to models, one after another, and start them.

        `memory`: bytes (or "8GiB") that weights, steps and caches of all of them take at most. What weights and steps
        leave is divided among the caches so that a model that needs little has it and the others share the rest; an
        engine with `kv_cache_memory` of its own keeps that. None: each takes what it would take alone, of what those
        before it have left. `settings` are fields of `EngineConfig` for all engines; those beside a model's name
        stand above them.

        `keep_alive`: load nothing now, but each model at its first use, and close it after `keep_alive` seconds without
        one (or "5m"; -1: never), or earlier if another needs its memory: the budget must have room for the largest, not
        for all. A model may have a "keep_alive" of its own beside its name. None: all are loaded now, and stay.

        Raises what loading any of them raises, `InvalidParameter` for a budget that is too small, naming what would be
        enough. Then none of them is left in memory.
        """
        keywords = {"keep_alive": keep_alive, **settings} if keep_alive is not None else settings
        setups, patience = _setups(models, keywords)
        budget = parse_bytes("memory", memory)
        sizes: dict[str, int] = {}
        if budget is not None:
            setups, sizes = await anyio.to_thread.run_sync(_divide, budget, setups, bool(patience))
        if patience:
            return cls._of_unloaded(setups, sizes, patience, budget, hosted)
        engines: dict[str, AsyncEngine] = {}
        try:
            for name, (model, config) in setups.items():
                engines[name] = await AsyncEngine.from_pretrained(model, config=config, hosted=hosted)
        except BaseException:
            with anyio.CancelScope(shield=True):
                await _close_all(engines)
            raise
        return cls(engines)

    @classmethod
    def _of_unloaded(
        cls, setups: Setups, sizes: Mapping[str, int], patience: Mapping[str, float], budget: int | None, hosted: bool
    ) -> Self:
        """A group that loads its models when they are used."""
        group = cls.__new__(cls)
        group._names, group._loaded, group._setups = tuple(setups), {}, setups

        async def load(name: str) -> AsyncEngine:
            model, config = group._setups[name]  # with the adapters that were loaded meanwhile
            return await AsyncEngine.from_pretrained(model, config=config, hosted=hosted)

        models = [
            OnDemandModel(name, partial(load, name), patience[name], config.task, sizes.get(name, 0))
            for name, (_, config) in setups.items()
        ]
        group._on_demand = OnDemand(models, budget)
        return group

    # ---------------------------------------------------------------- engines by name

    @property
    def loaded(self) -> Mapping[str, AsyncEngine]:
        """Engines that are in memory now, by name."""
        return self._loaded if self._on_demand is None else self._on_demand.loaded

    def __getitem__(self, name: str) -> AsyncEngine:
        """The engine. Raises `KeyError`, and `EngineClosed` for a model that is not loaded now (see `using`)."""
        if name in self._names and name not in self.loaded:
            raise EngineClosed(
                f"{name!r} is not loaded now: use it within `async with group.using({name!r}) as engine`"
            )
        return self.loaded[name]

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    @asynccontextmanager
    async def using(self, model: str | None, task: str = "generate") -> AsyncIterator[AsyncEngine]:
        """The engine called `model`, as `engine_for`, loaded if need be, and not closed within the block.

        Raises what loading raises; the next use tries again. One who uses a model while another waits for room, in
        the same task, waits for ever where the budget has none for both.
        """
        name = self._name_for(model, task)
        engine = await self.acquire(name)
        try:
            yield engine
        finally:
            self.release(name)

    async def acquire(self, model: str) -> AsyncEngine:
        """The engine, loaded if need be, which is not closed before `release`; `using` does both. Raises alike."""
        return self._loaded[model] if self._on_demand is None else await self._on_demand.acquire(model)

    def release(self, model: str) -> None:
        """End one use of `acquire`."""
        if self._on_demand is not None:
            self._on_demand.release(model)

    def keep(self, model: str, seconds: float) -> None:
        """Have a model stay for `seconds` without a use until it is closed. One that was loaded at the start stays."""
        if self._on_demand is not None:
            self._on_demand.models[model].asked = seconds

    def closes_in(self, model: str) -> float | None:
        """Seconds until a model is closed unless it is used before; None if it is in use, or stays."""
        timer = None if self._on_demand is None else self._on_demand.models[model].timer
        return None if timer is None else max(0.0, timer.when() - asyncio.get_running_loop().time())

    async def unload(self, model: str) -> None:
        """Close a model when those who use it are done; its next use loads it again. Does nothing to one that is not
        loaded. Raises `InvalidParameter` for a name that is none, and in a group whose models stay."""
        name = self._name_for(model, "")
        if self._on_demand is None:
            raise InvalidParameter("model", "stays loaded: only models with a keep_alive are unloaded", model)
        await self._on_demand.unload(name)

    def engine_for(self, model: str | None, task: str = "generate") -> AsyncEngine:
        """The engine called `model`; None: the only one whose model does `task`.

        Raises `InvalidParameter` naming the models there are, and `EngineClosed` for one that is not loaded now.
        """
        return self[self._name_for(model, task)]

    def task_of(self, name: str) -> str:
        """The task of a model ("generate", "embed", "rerank", "classify"); "auto": not known before its first load."""
        return self._loaded[name].info.task if self._on_demand is None else self._on_demand.models[name].task

    def _name_for(self, model: str | None, task: str) -> str:
        if model is not None:
            if model not in self._names:
                raise InvalidParameter("model", f"must be one of {_quoted(self._names)}", model)
            return model
        able = [name for name in self._names if self.task_of(name) in (task, "auto")]
        if len(able) == 1:
            return able[0]
        if not able:
            raise InvalidParameter("model", f"none of {_quoted(self._names)} was made to {task}")
        raise InvalidParameter("model", f"must say which: {_quoted(able)} can {task}")

    # ---------------------------------------------------------------- adapters

    async def load_adapter(
        self, name: str, path: str | os.PathLike[str], *, model: str | None = None, pinned: bool = False
    ) -> AdapterInfo:
        """`AsyncEngine.load_adapter` of `model`; None: of the only one that generates. It is there again after a model
        was closed for want of use and is loaded anew."""
        base = self._name_for(model, "generate")
        async with self.using(base) as engine:
            info = await engine.load_adapter(name, path, pinned=pinned)
            self._remember_adapters(base, {name: os.fspath(path)})
        return info

    async def unload_adapter(self, name: str, *, model: str | None = None, wait: bool = False) -> None:
        """`AsyncEngine.unload_adapter` of `model`; None: of the only one that generates."""
        base = self._name_for(model, "generate")
        if base in self.loaded:
            async with self.using(base) as engine:
                await engine.unload_adapter(name, wait=wait)
        elif name not in self.adapter_names(base):
            raise AdapterNotFound("adapter", f"is not loaded on {base!r}", name)
        self._remember_adapters(base, {}, without=name)

    def adapter_names(self, model: str) -> list[str]:
        """Names of the adapters of a model: those that are loaded, or those that will be once it is."""
        if model in self.loaded:
            return [adapter.name for adapter in self.loaded[model].adapters()]
        return list(dict(self._setups[model][1].adapters))

    def _remember_adapters(self, model: str, more: Mapping[str, str], without: str | None = None) -> None:
        if self._on_demand is not None:
            path, config = self._setups[model]
            adapters = {**dict(config.adapters), **more}
            self._setups[model] = path, config.replace(adapters={k: v for k, v in adapters.items() if k != without})

    # ---------------------------------------------------------------- sleep

    async def sleep(self, model: str | None = None, **how: Any) -> None:
        """`AsyncEngine.sleep` of `model`, with its keywords; None: of all that are loaded, side by side."""
        await self._call_each(model, lambda engine: engine.sleep(**how))

    async def wake(self, model: str | None = None, **weights: Any) -> None:
        """`AsyncEngine.wake` of `model`, with its keywords; None: of all that are loaded."""
        await self._call_each(model, lambda engine: engine.wake(**weights))

    async def pause(self, model: str | None = None, **how: Any) -> None:
        """`AsyncEngine.pause` of `model`, with its keywords; None: of all that are loaded. `wake` ends it, too."""
        await self._call_each(model, lambda engine: engine.pause(**how))

    async def reset_prefix_cache(
        self, namespace: str | None = None, *, model: str | None = None
    ) -> dict[str, PrefixCacheReset]:
        """`AsyncEngine.reset_prefix_cache` of `model`, or of all that are loaded; by name."""
        resets = {}
        for name in self._meant(model):
            resets[name] = await self[name].reset_prefix_cache(namespace)
        return resets

    async def _call_each(self, model: str | None, call: Callable[[AsyncEngine], Awaitable[object]]) -> None:
        """Call for one engine or for all; the first error is raised when the last call has ended."""
        await _all_of([partial(call, self[name]) for name in self._meant(model)])

    def _meant(self, model: str | None) -> list[str]:
        return list(self.loaded) if model is None else [self._name_for(model, "generate")]

    # ---------------------------------------------------------------- life

    async def aclose(self, *, drain: bool = False, timeout: float | None = None) -> None:
        """Close every engine, all at once; as `AsyncEngine.aclose`. Raises the first error of any of them."""
        engines = self._loaded if self._on_demand is None else await self._on_demand.aclose()
        await _close_all(engines, drain=drain, timeout=timeout)

    close = aclose

    def __repr__(self) -> str:
        engines = ", ".join(f"{name}={self.loaded.get(name, 'not loaded')!r}" for name in self)
        return f"<{type(self).__name__} {engines}>"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *raised: object) -> None:
        await self.aclose()

    # ---------------------------------------------------------------- requests

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, model: str | None = None,
        **options: Unpack[RequestKeywords],
    ) -> TokenStream:  # fmt: skip
        """`AsyncEngine.stream` of `model`; None: of the only one that generates. It must be loaded (see `using`)."""
        return self.engine_for(model).stream(prompt, params, **options)

    def stream_chat(
        self, messages: ChatMessages, params: SamplingParams | None = None, *, model: str | None = None,
        **options: Unpack[ChatKeywords],
    ) -> TokenStream:  # fmt: skip
        """`AsyncEngine.stream_chat`, as `stream`."""
        return self.engine_for(model).stream_chat(messages, params, **options)

    async def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, *, model: str | None = None,
        **options: Unpack[RequestKeywords],
    ) -> Completion:  # fmt: skip
        """`AsyncEngine.generate` of `model`; None: of the only one that generates."""
        async with self.using(model) as engine:
            return await engine.generate(prompt, params, **options)

    async def chat(
        self, messages: ChatMessages, params: SamplingParams | None = None, *, model: str | None = None,
        **options: Unpack[ChatKeywords],
    ) -> Completion:  # fmt: skip
        """`AsyncEngine.chat` of `model`; None: of the only one that generates."""
        async with self.using(model) as engine:
            return await engine.chat(messages, params, **options)

    async def decide(
        self, state: Any, questions: Mapping[str, Any], *, model: str | None = None,
        assets: Mapping[str, Any] | None = None, **options: Unpack[RequestKeywords],
    ) -> Decision:  # fmt: skip
        """`AsyncEngine.decide` of `model`; None: of the only one that generates."""
        async with self.using(model) as engine:
            return await engine.decide(state, questions, assets=assets, **options)

    def session(self, name: str | None = None, *, ttl: float | None = None, model: str | None = None) -> Session:
        """`AsyncEngine.session` of `model`; None: of the only one that generates. It must be loaded (see `using`)."""
        return self.engine_for(model).session(name, ttl=ttl)

    @asynccontextmanager
    async def pin(
        self, prefix: Prompt | ChatMessages, *, model: str | None = None, **options: Unpack[ChatKeywords]
    ) -> AsyncIterator[int]:
        """`AsyncEngine.pin` of `model`, which is not closed within the block; None: of the only one that generates."""
        async with self.using(model) as engine, engine.pin(prefix, **options) as tokens:
            yield tokens

    async def embed(
        self, texts: str | Sequence[str | Sequence[int]], *, model: str | None = None, **options: Any
    ) -> Embeddings:
        """`AsyncEngine.embed` of `model`, with its keywords; None: of the only one that embeds."""
        async with self.using(model, "embed") as engine:
            return await engine.embed(texts, **options)

    async def rerank(
        self, query: str, documents: Sequence[str], *, model: str | None = None, **options: Any
    ) -> Ranking:
        """`AsyncEngine.rerank` of `model`, with its keywords; None: of the only one that reranks."""
        async with self.using(model, "rerank") as engine:
            return await engine.rerank(query, documents, **options)

    async def classify(
        self, texts: Sequence[str | tuple[str, str]], *, model: str | None = None, **options: Any
    ) -> Classifications:
        """`AsyncEngine.classify` of `model`, with its keywords; None: of the only one that classifies."""
        async with self.using(model, "classify") as engine:
            return await engine.classify(texts, **options)

    # ---------------------------------------------------------------- looking in

    @property
    def alive(self) -> bool:
        """True if every engine that is loaded would take a request."""
        return all(engine.alive for engine in self.loaded.values())

    def stats(self) -> dict[str, EngineStats]:
        """Statistics of each engine, by name. May be called from any thread."""
        return {name: engine.stats() for name, engine in self.loaded.items()}

    def abort(self, request_id: str) -> bool:
        """Abort every unfinished request labelled `request_id`, of any engine. True if there was one."""
        return sum(engine.abort(request_id) for engine in self.loaded.values()) > 0


Setups = dict[str, tuple[str | os.PathLike[str], EngineConfig]]


def _setups(models: Mapping[str, ModelSetup], settings: Mapping[str, Any]) -> tuple[Setups, dict[str, float]]:
    """Every name's model and configuration, and the seconds for which each is kept; none of these where all models are
    loaded at once. Raises `InvalidParameter` naming the model that is at fault."""
    if not isinstance(models, Mapping) or not models:
        raise InvalidParameter("models", "must map at least one name to a model", models)
    setups: Setups = {}
    patience: dict[str, float] = {}
    for name, setup in models.items():
        if not isinstance(name, str) or not name:
            raise InvalidParameter("models", "must have names that are str", name)
        keywords = {**settings, **(setup if isinstance(setup, Mapping) else {"model": setup})}
        model = keywords.pop("model", None)
        if not isinstance(model, (str, os.PathLike)):
            raise InvalidParameter("models", f'{name!r} must be a folder, a hub id, or a mapping with "model"', setup)
        if (keep := keywords.pop("keep_alive", None)) is not None:
            patience[name] = parse_keep_alive("keep_alive", keep)
        setups[name] = (model, EngineConfig.from_dict(keywords))
    if patience:
        patience = {name: patience.get(name, math.inf) for name in setups}
    return setups, patience


def _divide(budget: int, setups: Setups, in_turns: bool) -> tuple[Setups, dict[str, int]]:
    from asyncengine.assembly.wiring import divide_memory

    divided = divide_memory(budget, setups, in_turns=in_turns)
    configured = {name: (model, divided[name][0]) for name, (model, _) in setups.items()}
    return configured, {name: size for name, (_, size) in divided.items()}


async def _close_all(engines: Mapping[str, AsyncEngine], *, drain: bool = False, timeout: float | None = None) -> None:
    await _all_of([partial(engine.aclose, drain=drain, timeout=timeout) for engine in engines.values()])


async def _all_of(calls: Sequence[Callable[[], Awaitable[object]]]) -> None:
    ended = await asyncio.gather(*(call() for call in calls), return_exceptions=True)  # one that fails ends no other
    for outcome in ended:
        if isinstance(outcome, BaseException):
            raise outcome


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names))
