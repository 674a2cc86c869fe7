"""`EngineGroup`: several models in one program, with one memory budget and one front door."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, Unpack

import anyio
import anyio.to_thread

from asyncengine.async_engine import AsyncEngine
from asyncengine.config import EngineConfig, parse_bytes
from asyncengine.errors import InvalidParameter
from asyncengine.options import ChatKeywords, ChatMessages, Prompt, RequestKeywords
from asyncengine.outputs import Classifications, Completion, Embeddings, Ranking
from asyncengine.sampling_params import SamplingParams
from asyncengine.stats import EngineStats
from asyncengine.stream import TokenStream

ModelSetup = str | os.PathLike[str] | Mapping[str, Any]
"""A model to load: a folder or hub id, or a mapping of "model" and settings of its engine."""


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
        if not engines:
            raise InvalidParameter("models", "must name at least one model")
        self._engines = dict(engines)

    @classmethod
    async def from_pretrained(
        cls,
        models: Mapping[str, ModelSetup],
        *,
        memory: int | str | None = None,
        hosted: bool = False,
        **settings: Any,
    ) -> Self:
        """Load `models`, a mapping of names to what they are, one after another, and start them.

        `memory`: bytes (or "8GiB") that weights, steps and caches of all of them take at most. What weights and steps
        leave is divided among the caches so that a model that needs little has it and the others share the rest; an
        engine with `kv_cache_memory` of its own keeps that. None: each takes what it would take alone, of what those
        before it have left. `settings` are fields of `EngineConfig` for all engines; those beside a model's name
        stand above them.

        Raises what loading any of them raises, `InvalidParameter` for a budget that is too small, naming what would be
        enough. Then none of them is left in memory.
        """
        setups = _setups(models, settings)
        budget = parse_bytes("memory", memory)
        if budget is not None:
            setups = await anyio.to_thread.run_sync(_divide, budget, setups)
        engines: dict[str, AsyncEngine] = {}
        try:
            for name, (model, config) in setups.items():
                engines[name] = await AsyncEngine.from_pretrained(model, config=config, hosted=hosted)
        except BaseException:
            with anyio.CancelScope(shield=True):
                await _close_all(engines)
            raise
        return cls(engines)

    # ---------------------------------------------------------------- engines by name

    def __getitem__(self, name: str) -> AsyncEngine:
        return self._engines[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._engines)

    def __len__(self) -> int:
        return len(self._engines)

    def engine_for(self, model: str | None, task: str = "generate") -> AsyncEngine:
        """The engine called `model`; None: the only one whose model does `task`.

        Raises `InvalidParameter` naming the models there are.
        """
        if model is not None:
            found = self._engines.get(model) if isinstance(model, str) else None
            if found is None:
                raise InvalidParameter("model", f"must be one of {_quoted(self._engines)}", model)
            return found
        able = [name for name, engine in self._engines.items() if engine.info.task == task]
        if len(able) == 1:
            return self._engines[able[0]]
        if not able:
            raise InvalidParameter("model", f"none of {_quoted(self._engines)} was made to {task}")
        raise InvalidParameter("model", f"must say which: {_quoted(able)} can {task}")

    # ---------------------------------------------------------------- life

    async def aclose(self, *, drain: bool = False, timeout: float | None = None) -> None:
        """Close every engine, all at once; as `AsyncEngine.aclose`. Raises the first error of any of them."""
        await _close_all(self._engines, drain=drain, timeout=timeout)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    # ---------------------------------------------------------------- requests

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        model: str | None = None,
        **options: Unpack[RequestKeywords],
    ) -> TokenStream:
        """`AsyncEngine.stream` of `model`; None: of the only one that generates."""
        return self.engine_for(model).stream(prompt, params, **options)

    def stream_chat(
        self,
        messages: ChatMessages,
        params: SamplingParams | None = None,
        *,
        model: str | None = None,
        **options: Unpack[ChatKeywords],
    ) -> TokenStream:
        """`AsyncEngine.stream_chat` of `model`; None: of the only one that generates."""
        return self.engine_for(model).stream_chat(messages, params, **options)

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        model: str | None = None,
        **options: Unpack[RequestKeywords],
    ) -> Completion:
        """`AsyncEngine.generate` of `model`; None: of the only one that generates."""
        return await self.engine_for(model).generate(prompt, params, **options)

    async def chat(
        self,
        messages: ChatMessages,
        params: SamplingParams | None = None,
        *,
        model: str | None = None,
        **options: Unpack[ChatKeywords],
    ) -> Completion:
        """`AsyncEngine.chat` of `model`; None: of the only one that generates."""
        return await self.engine_for(model).chat(messages, params, **options)

    async def embed(
        self, texts: str | Sequence[str | Sequence[int]], *, model: str | None = None, **options: Any
    ) -> Embeddings:
        """`AsyncEngine.embed` of `model`, with its keywords; None: of the only one that embeds."""
        return await self.engine_for(model, "embed").embed(texts, **options)

    async def rerank(
        self, query: str, documents: Sequence[str], *, model: str | None = None, **options: Any
    ) -> Ranking:
        """`AsyncEngine.rerank` of `model`, with its keywords; None: of the only one that reranks."""
        return await self.engine_for(model, "rerank").rerank(query, documents, **options)

    async def classify(
        self, texts: Sequence[str | tuple[str, str]], *, model: str | None = None, **options: Any
    ) -> Classifications:
        """`AsyncEngine.classify` of `model`, with its keywords; None: of the only one that classifies."""
        return await self.engine_for(model, "classify").classify(texts, **options)

    # ---------------------------------------------------------------- looking in

    @property
    def alive(self) -> bool:
        """True if every engine would take a request."""
        return all(engine.alive for engine in self._engines.values())

    def stats(self) -> dict[str, EngineStats]:
        """Statistics of each engine, by name. May be called from any thread."""
        return {name: engine.stats() for name, engine in self._engines.items()}

    def abort(self, request_id: str) -> bool:
        """Abort every unfinished request labelled `request_id`, of any engine. True if there was one."""
        return sum(engine.abort(request_id) for engine in self._engines.values()) > 0


Setups = dict[str, tuple[str | os.PathLike[str], EngineConfig]]


def _setups(models: Mapping[str, ModelSetup], settings: Mapping[str, Any]) -> Setups:
    """Every name's model and configuration. Raises `InvalidParameter` naming the model that is at fault."""
    if not isinstance(models, Mapping) or not models:
        raise InvalidParameter("models", "must map at least one name to a model", models)
    setups: Setups = {}
    for name, setup in models.items():
        if not isinstance(name, str) or not name:
            raise InvalidParameter("models", "must have names that are str", name)
        own = dict(setup) if isinstance(setup, Mapping) else {"model": setup}
        model = own.pop("model", None)
        if not isinstance(model, (str, os.PathLike)):
            raise InvalidParameter("models", f'{name!r} must be a folder, a hub id, or a mapping with "model"', setup)
        setups[name] = (model, EngineConfig.from_dict({**settings, **own}))
    return setups


def _divide(budget: int, setups: Setups) -> Setups:
    from asyncengine.engine.wiring import divide_memory

    configs = divide_memory(budget, setups)
    return {name: (model, configs[name]) for name, (model, _) in setups.items()}


async def _close_all(engines: Mapping[str, AsyncEngine], *, drain: bool = False, timeout: float | None = None) -> None:
    errors: list[BaseException] = []

    async def close(engine: AsyncEngine) -> None:
        try:
            await engine.aclose(drain=drain, timeout=timeout)
        except Exception as error:  # the others are closed all the same
            errors.append(error)

    async with anyio.create_task_group() as tasks:
        for engine in engines.values():
            tasks.start_soon(close, engine)
    if errors:
        raise errors[0]


def _quoted(names: Mapping[str, Any] | list[str]) -> str:
    return ", ".join(map(repr, names))
