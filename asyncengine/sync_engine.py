"""`Engine`: the same engine for code without an event loop. Safe from any thread; many threads share one batch."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Self, Unpack

from anyio.from_thread import start_blocking_portal

from asyncengine import batches
from asyncengine.async_engine import AsyncEngine
from asyncengine.cache_news import PrefixCacheReset
from asyncengine.checks import as_items, as_seconds
from asyncengine.engine.decisions import DecisionCall
from asyncengine.engine.frontend import Frontend, Keep, Meanwhile
from asyncengine.engine.prefix_files import HeldPrefix
from asyncengine.engine.threads import finished_blocking
from asyncengine.engine.validation import PreparedRequest, forked
from asyncengine.engine_base import EngineBase
from asyncengine.errors import InvalidParameter, WrongLoop, naming
from asyncengine.lora.adapter import AdapterInfo
from asyncengine.options import (
    ChatKeywords,
    ChatMessages,
    Prompt,
    RequestKeywords,
    RequestOptions,
    VectorKeywords,
    WeightSource,
    is_chat,
    split_chat,
)
from asyncengine.outputs import Classifications, Completion, Decision, Embeddings, Ranking
from asyncengine.progress import OnProgress, counted
from asyncengine.sampling_params import SamplingParams
from asyncengine.scheduler.messages import PauseMode, UpdateMode
from asyncengine.stream import SyncTokenStream

Progress = Callable[[int, int], object] | bool | None


class Engine(EngineBase):
    """The synchronous twin of `AsyncEngine`: same names, blocking calls.

        with Engine.from_pretrained("Qwen/Qwen3-0.6B") as engine:
            print(engine.chat([{"role": "user", "content": "Hello!"}]).text)

    It drives a hosted engine (its own thread and loop), so a blocking call never stops the engine, even from inside a
    coroutine (it does block that coroutine's loop: prefer `AsyncEngine` there).
    """

    def __init__(self, engine: AsyncEngine) -> None:
        """Blocking access to `engine`, which stays its owner's to close unless you call `close` here."""
        if not isinstance(engine, AsyncEngine):
            raise InvalidParameter("engine", "must be an AsyncEngine; a model: Engine.from_pretrained", engine)
        self.aengine = engine

    @property
    def core(self) -> Frontend:
        return self.aengine.core

    @classmethod
    def from_pretrained(
        cls, model: str | os.PathLike[str], *, on_progress: OnProgress | None = None, **settings: Any
    ) -> Self:
        """Load a model folder or hub id. `settings` are `config=` and fields of `EngineConfig`.

        Raises as `AsyncEngine.from_pretrained`.
        """
        engine = AsyncEngine._unstarted(model, settings.pop("config", None), settings, True, on_progress)
        try:
            engine.start_blocking()
        except BaseException:
            engine.close_blocking()  # the caller never gets it
            raise
        return cls(engine)

    def close(self, *, drain: bool = False, timeout: float | None = None) -> None:
        """Close the engine, as `AsyncEngine.aclose`. Raises `WrongLoop` for an owned engine: its own loop must close
        it."""
        self.aengine.close_blocking(drain=drain, timeout=timeout)

    async def aclose(self, *, drain: bool = False, timeout: float | None = None) -> None:
        """`close` for a coroutine: its loop goes on meanwhile, and may be that of an owned engine."""
        await self.aengine.aclose(drain=drain, timeout=timeout)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.aengine!r}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    # ---------------------------------------------------------------- requests

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, **options: Unpack[RequestKeywords]
    ) -> SyncTokenStream:
        """Stream a completion of `prompt`: submitted now, and computed up to 1,024 tokens ahead of what you read. As
        `AsyncEngine.stream`, whose errors are raised here."""
        wanted = RequestOptions.of(options)
        return self._stream(lambda: self.core.prepare(prompt, params, wanted))

    def stream_chat(
        self, messages: ChatMessages, params: SamplingParams | None = None, **options: Unpack[ChatKeywords]
    ) -> SyncTokenStream:
        """Stream the answer to a chat. As `AsyncEngine.stream_chat`."""
        chat, wanted = split_chat(messages, options)
        return self._stream(lambda: self.core.prepare_chat(chat, params, wanted))

    def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, **options: Unpack[RequestKeywords]
    ) -> Completion:
        """The whole completion; keywords as `stream`. Raises as `AsyncEngine.generate`."""
        with self.stream(prompt, params, **options) as stream:
            return stream.result()

    def chat(
        self, messages: ChatMessages, params: SamplingParams | None = None, **options: Unpack[ChatKeywords]
    ) -> Completion:
        """The whole answer to a chat; keywords as `stream_chat`."""
        with self.stream_chat(messages, params, **options) as stream:
            return stream.result()

    def decide(
        self, state: Any, questions: Mapping[str, Any], *, assets: Mapping[str, Any] | None = None,
        **options: Unpack[RequestKeywords],
    ) -> Decision:  # fmt: skip
        """Answers to typed questions about a state, with probabilities. As `AsyncEngine.decide`."""
        call = DecisionCall(self.core, state, questions, assets, RequestOptions.of(options))
        with self._stream(call.prepare) as stream:
            return call.decision(stream.result())

    def generate_many(
        self, prompts: Sequence[Prompt], params: SamplingParams | None = None, *, progress: Progress = None,
        **options: Unpack[RequestKeywords],
    ) -> list[Completion]:  # fmt: skip
        """Completions of all prompts, in order, computed in shared batches: all are submitted before any is awaited.

        `progress`: called with how many are done, in that order, and how many there are; True: a bar on stderr, or
        lines where it is no terminal. If one is refused or fails, the others are aborted and its error is raised.
        """
        return self._many("prompt", prompts, lambda prompt: self.stream(prompt, params, **options), progress)

    def chat_many(
        self, chats: Sequence[ChatMessages], params: SamplingParams | None = None, *, progress: Progress = None,
        **options: Unpack[ChatKeywords],
    ) -> list[Completion]:  # fmt: skip
        """Answers to all chats; keywords as `stream_chat`, all else as `generate_many`."""
        return self._many("chat", chats, lambda chat: self.stream_chat(chat, params, **options), progress)

    def _many(
        self, name: str, items: Any, start: Callable[[Any], SyncTokenStream], progress: Progress
    ) -> list[Completion]:
        if items is None or isinstance(items, str):
            raise InvalidParameter(f"{name}s", "must be a sequence, not one str", items)
        if not (callable(progress) or progress in (True, False, None)):
            raise InvalidParameter("progress", "must be a function of two numbers, True or None", progress)
        streams, done = list[SyncTokenStream](), list[Completion]()
        try:
            for index, item in enumerate(as_items(f"{name}s", items)):
                with naming(dict.fromkeys(("prompt", "messages"), f"{name}s[{index}]")):
                    streams.append(start(item))
            with counted("answering", len(streams)) if progress is True else nullcontext(lambda _: None) as advance:
                for stream in streams:
                    done.append(stream.result())
                    advance(1)
                    if callable(progress):
                        progress(len(done), len(streams))
            return done
        finally:
            for stream in streams:
                stream.close()

    def fork(
        self, prefix: Prompt | ChatMessages, n: int, params: SamplingParams | None = None, **options: Any
    ) -> list[SyncTokenStream]:
        """Go on from one prefix `n` times, as `AsyncEngine.fork`."""
        call: Any = self.stream_chat if is_chat(prefix) else self.stream
        return [call(prefix, sample_params, **options) for sample_params in forked(params, n, self.core.config.max_n)]

    def batch(
        self, rows: Iterable[Mapping[str, Any]], *, in_flight: int | None = None
    ) -> Iterator[tuple[int, Completion | Exception]]:
        """Answer many `rows` in order of completion, as `AsyncEngine.batch`. They are taken on a thread of its own."""
        self._check_thread()
        answers = batches.batch(self.aengine, rows, in_flight=in_flight)
        with start_blocking_portal() as portal:  # leaving it ends what still runs on its event loop
            while (answer := portal.call(anext, answers, None)) is not None:
                yield answer

    # ---------------------------------------------------------------- prefixes

    @contextmanager
    def pin(self, prefix: Prompt | ChatMessages, **options: Unpack[ChatKeywords]) -> Iterator[int]:
        """Keep a prefix in the cache during `with`, as `AsyncEngine.pin`."""
        with self._hold(HeldPrefix(self.core, prefix, options)) as tokens:
            yield tokens

    def export_prefix(
        self, prefix: Prompt | ChatMessages, file: str | os.PathLike[str], **options: Unpack[ChatKeywords]
    ) -> int:
        """Write a prefix to a file, as `AsyncEngine.export_prefix`."""
        held = HeldPrefix(self.core, prefix, options, file)
        with self._hold(held):
            return held.write()

    def import_prefix(
        self, file: str | os.PathLike[str], *, adapter: str | None = None, cache_salt: str | None = None
    ) -> int:
        """Read a prefix from a file, as `AsyncEngine.import_prefix`."""
        return self._unblocked.import_prefix(file, adapter, cache_salt)

    @contextmanager
    def _hold(self, held: HeldPrefix) -> Iterator[int]:
        try:
            with self._stream(held.prepare) as stream:
                tokens = held.finish(stream.result())
            yield tokens
        finally:
            held.release()

    # ---------------------------------------------------------------- vectors

    def embed(
        self, texts: str | Sequence[str | Sequence[int]], *, prompt_name: str | None = None, prompt: str | None = None,
        dimensions: int | None = None, normalize: bool | None = None, truncate: bool = True,
        show_progress: bool | None = None, **options: Unpack[VectorKeywords],
    ) -> Embeddings:  # fmt: skip
        """Embed texts, as `AsyncEngine.embed`."""
        vectors, wanted = self._unblocked.vectors("embed"), RequestOptions.of_vectors(options)
        call = vectors.embed(texts, prompt_name, prompt, dimensions, normalize, truncate, show_progress, wanted)
        return vectors.run_blocking(call)

    def rerank(
        self, query: str, documents: Sequence[str], *, top_n: int | None = None, instruction: str | None = None,
        truncate: bool = True, activation: bool = True, **options: Unpack[VectorKeywords],
    ) -> Ranking:  # fmt: skip
        """Order documents by relevance, as `AsyncEngine.rerank`."""
        vectors, wanted = self._unblocked.vectors("rerank"), RequestOptions.of_vectors(options)
        return vectors.run_blocking(vectors.rerank(query, documents, top_n, instruction, truncate, activation, wanted))

    def classify(
        self, texts: Sequence[str | tuple[str, str]], *, truncate: bool = True, activation: bool = True,
        **options: Unpack[VectorKeywords],
    ) -> Classifications:  # fmt: skip
        """Classify texts, as `AsyncEngine.classify`."""
        vectors, wanted = self._unblocked.vectors("classify"), RequestOptions.of_vectors(options)
        return vectors.run_blocking(vectors.classify(texts, truncate, activation, wanted))

    # ---------------------------------------------------------------- text

    @property
    def _unblocked(self) -> Frontend:
        """`core`, where waiting for it does not stop it. Raises `WrongLoop` on the thread that drives the engine."""
        self._check_thread()
        return self.core

    def _check_thread(self) -> None:
        if self.aengine.host.drives_this_thread():
            raise WrongLoop(
                "a blocking call on the thread that drives the engine would wait for itself for ever: "
                "await AsyncEngine's methods here, or load the engine with hosted=True"
            )

    def _stream(self, prepare: Callable[[], PreparedRequest]) -> SyncTokenStream:
        core, prepared = self._unblocked, prepare()
        assembler = core.post(prepared) if core.client.enter_blocking(prepared) else core.expired(prepared)
        return SyncTokenStream(assembler, core.client.abort_tickets, self._check_thread)

    # ---------------------------------------------------------------- adapters

    def load_adapter(
        self, name: str, path: str | os.PathLike[str] | None = None, *, tensors: Mapping[str, Any] | None = None,
        config: Any | None = None, pinned: bool = False,
    ) -> AdapterInfo:  # fmt: skip
        """Load an adapter, as `AsyncEngine.load_adapter`."""
        return finished_blocking(self.core.load_adapter(name, path, tensors, config, pinned))

    def unload_adapter(self, name: str, *, wait: bool = False) -> None:
        """Unload an adapter, as `AsyncEngine.unload_adapter`."""
        core = self._unblocked if wait else self.core
        finished_blocking(core.unload_adapter(name, wait))

    def update_weights(
        self, weights: WeightSource, *, mode: UpdateMode = "wait", partial: bool = False, version: int | None = None
    ) -> int:
        """Replace the model's weights, as `AsyncEngine.update_weights`."""
        return finished_blocking(self._unblocked.update_weights(weights, mode, partial, version))

    def sleep(
        self, *, weights: Keep = "drop", cache: Keep = "drop", mode: PauseMode = "finish", requests: Meanwhile = "wait"
    ) -> None:
        """Give memory back until `wake`, as `AsyncEngine.sleep`."""
        finished_blocking(self._unblocked.sleep(weights, cache, mode, requests))

    def wake(self, weights: WeightSource | None = None, *, version: int | None = None) -> int:
        """End the sleep, as `AsyncEngine.wake`."""
        return finished_blocking(self._unblocked.wake(weights, version))

    def pause(self, *, mode: PauseMode = "keep", requests: Meanwhile = "wait") -> None:
        """Run no step until `resume`, as `AsyncEngine.pause`."""
        self.sleep(weights="keep", cache="keep", mode=mode, requests=requests)

    def resume(self) -> None:
        """End the pause, as `AsyncEngine.resume`."""
        self.wake()

    def reset_prefix_cache(self, namespace: str | None = None) -> PrefixCacheReset:
        """Drop what no request holds of the prefix cache, as `AsyncEngine.reset_prefix_cache`."""
        return finished_blocking(self._unblocked.reset_prefix_cache(namespace))

    # ---------------------------------------------------------------- looking in

    def profile(self, folder: str | os.PathLike[str], steps: int = 50, *, timeout: float = 60.0) -> Path:
        """Record the next steps of what other threads ask for, as `AsyncEngine.profile`."""
        timeout = as_seconds("timeout", timeout)
        return self._unblocked.profile(steps).run_blocking(folder, self.info.name, timeout)
