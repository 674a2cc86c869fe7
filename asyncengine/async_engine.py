"""`AsyncEngine`: the public face for asyncio programs."""

from __future__ import annotations

import os
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, Self, SupportsIndex, Unpack

import anyio.to_thread

from asyncengine import batches
from asyncengine.assembly.load_once import Build, LoadOnce, loader_of
from asyncengine.cache_news import PrefixCacheReset
from asyncengine.checks import as_seconds, check_patience
from asyncengine.config import EngineConfig
from asyncengine.engine.assembler import Assembler
from asyncengine.engine.decisions import DecisionCall
from asyncengine.engine.frontend import Frontend, Keep, Meanwhile
from asyncengine.engine.hosting import Host, OwnedHost, ThreadHost
from asyncengine.engine.prefix_files import HeldPrefix
from asyncengine.engine.process import LoadAttempt
from asyncengine.engine.threads import INLINE_CHARS, begun, finished, finished_blocking
from asyncengine.engine.validation import PreparedRequest, forked
from asyncengine.engine_base import EngineBase
from asyncengine.errors import EngineClosed, EngineDead, InvalidParameter, WrongLoop
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
    rough_size,
    split_chat,
    text_size,
)
from asyncengine.outputs import Classifications, Completion, Decision, Embeddings, Ranking
from asyncengine.progress import OnProgress
from asyncengine.sampling_params import SamplingParams
from asyncengine.scheduler.messages import PauseMode, UpdateMode
from asyncengine.stream import TokenStream


class AsyncEngine(EngineBase):
    """An inference engine in your process: continuous batching, paged KV cache, prefix cache, streaming.

        async with await AsyncEngine.from_pretrained("Qwen/Qwen3-0.6B") as engine:
            completion = await engine.chat([{"role": "user", "content": "Hello!"}])

    *Owned* (the default) it runs as a task on the loop that starts it; *hosted* it has a thread of its own and may be
    called from any loop and thread. Leaving a call (cancellation, `break`, a dropped stream) frees its compute before
    the next step. Constructing is cheap; `start` (or `async with`, or `from_pretrained`) loads.
    """

    def __init__(self, build: Build, *, hosted: bool = False, attempt: LoadAttempt | None = None) -> None:
        """`build` loads the parts, on a separate thread (see `assembly.wiring`); closing gives `attempt` up.
        For a model there is `from_pretrained`."""
        if not callable(build):
            raise InvalidParameter("build", "must be callable; a model: AsyncEngine.from_pretrained", build)
        self._load = LoadOnce(build, attempt)
        self._hosted = hosted
        self._core: Frontend | None = None
        self._host: Host | None = None
        self._serving = threading.Lock()

    @classmethod
    async def from_pretrained(
        cls, model: str | os.PathLike[str], *, config: EngineConfig | None = None, hosted: bool = False,
        on_progress: OnProgress | None = None, **settings: Any,
    ) -> Self:  # fmt: skip
        """Load a model folder or hub id and start. `settings` are fields of `EngineConfig`.

        Any number of loads may go on at once; cancelling one leaves at once. `on_progress(stage, done, total)` is
        called on the loading thread; whatever it raises gives the load up (`EngineClosed`). Raises `ModelNotFound`,
        `UnsupportedModel`, `OutOfMemory`, or `InvalidParameter` for an unknown setting.
        """
        engine = cls._unstarted(model, config, settings, hosted, on_progress)
        try:
            await engine.start()
        except BaseException:
            engine._stop_serving()  # the caller never gets the engine, and cannot close it
            raise
        return engine

    @classmethod
    def _unstarted(
        cls, model: str | os.PathLike[str], config: EngineConfig | None, settings: Mapping[str, Any], hosted: bool,
        on_progress: OnProgress | None = None,
    ) -> Self:  # fmt: skip
        if on_progress is not None and not callable(on_progress):
            raise InvalidParameter("on_progress", "must be callable", on_progress)
        attempt = LoadAttempt(str(model), on_progress)
        return cls(partial(cls._loader(model, config, settings), attempt), hosted=hosted, attempt=attempt)

    _loader = staticmethod(loader_of)

    # ---------------------------------------------------------------- life

    async def start(self) -> None:
        """Load, then serve. Does nothing if already started. Raises what loading raises.

        Cancelling it leaves at once; loading goes on for the next call of `start`, until the engine is closed.
        """
        self._load.check_process()
        if self._core is None or self._load.closed:
            self._serve(await finished(self._load.begin()))

    def start_blocking(self) -> None:
        """`start` for a plain thread; hosted engines only."""
        if not self._hosted:
            raise EngineClosed("only a hosted engine can be started without an event loop: pass hosted=True")
        self._load.check_process()
        if self._core is None or self._load.closed:
            self._serve(finished_blocking(self._load.begin()))

    def _serve(self, frontend: Frontend) -> None:
        with self._serving:
            if self._load.closed:
                frontend.discard()
                raise EngineClosed("the engine was closed while it loaded")
            if self._core is not None:
                return  # another start was faster
            loop = frontend.loop
            host = ThreadHost(loop, use_uvloop=frontend.config.uvloop) if self._hosted else OwnedHost(loop)
            host.start()
            self._core, self._host = frontend, host

    async def aclose(self, *, drain: bool = False, timeout: float | None = None) -> None:
        """Take no more requests, finish (`drain`, for at most `timeout` seconds) or abort those there are, and leave no
        task, thread or memory behind. Idempotent. An error that killed the engine is raised by its streams, not here.

        Raises `WrongLoop` for an owned engine from another loop, while its own stands still; `InvalidParameter` for a
        malformed timeout.
        """
        check_patience(timeout)
        frontend, host = self._stop_serving()
        if frontend is None or host is None:
            return
        frontend.client.start_closing(drain, timeout)
        # Leaving `async with` inside a cancelled scope must still close: aborting is quick, so shield it.
        with anyio.CancelScope(shield=not drain):
            await host.wait_ended()

    close = aclose

    def _stop_serving(self) -> tuple[Frontend | None, Host | None]:
        if self._load.is_elsewhere:
            return None, None  # the process it runs in closes it
        with self._serving:
            loaded = self._load.close()
            if loaded is not None and self._core is None:  # its starter was cancelled before it was served
                loaded.discard()
            return self._core, self._host

    def close_blocking(self, *, drain: bool = False, timeout: float | None = None) -> None:
        """`aclose` for a plain thread; hosted engines only.

        Raises `WrongLoop`, and changes nothing, for an owned engine and on the thread that the engine runs on.
        """
        check_patience(timeout)
        if not self._hosted:
            raise WrongLoop("an owned engine is closed on its own loop: await AsyncEngine.aclose() there")
        if self._host is not None and self._host.drives_this_thread():
            raise WrongLoop("the engine cannot wait for its own end: close it on another thread, or await aclose()")
        frontend, host = self._stop_serving()
        if frontend is not None and isinstance(host, ThreadHost):
            frontend.client.start_closing(drain, timeout)
            host.join()

    def __repr__(self) -> str:
        """The model, its state ("loading", "awake", "asleep", "closed", "dead", ...) and its dtype, in one line."""
        return f"<{type(self).__name__} {self._load.described(self._core)}>"

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        """Refuse copy, deepcopy and pickle, which is how an engine would get into a spawned process."""
        raise TypeError("an engine cannot be copied or pickled: share the one, or load one in each process")

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *raised: object) -> None:
        await self.aclose()

    # ---------------------------------------------------------------- requests

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, **options: Unpack[RequestKeywords]
    ) -> TokenStream:
        """Stream a completion of `prompt` (text or token ids); `options` as `RequestOptions`.

        Nothing runs before the first await. Awaiting it raises `InvalidParameter`, `ContextLengthExceeded`,
        `GrammarError`, `BudgetTooSmall`, `QueueFull`, `EngineClosed` or `EngineDead`.
        """
        frontend, wanted = self.core, RequestOptions.of(options)
        size = text_size(prompt, INLINE_CHARS)
        return self._stream(lambda at: frontend.prepare(prompt, params, wanted, at), size, params, wanted)

    def stream_chat(
        self, messages: ChatMessages, params: SamplingParams | None = None, **options: Unpack[ChatKeywords]
    ) -> TokenStream:
        """Stream the answer to a chat (OpenAI message shape), rendered by the model's template.

        `options` as `ChatRequest` and `RequestOptions`. Chunks carry the answer's text, the reasoning before it and
        the tool calls in it apart; an answer with calls ends with reason "tool_calls".
        """
        frontend = self.core
        chat, wanted = split_chat(messages, options)
        return self._stream(lambda at: frontend.prepare_chat(chat, params, wanted, at), chat.size, params, wanted)

    async def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, **options: Unpack[RequestKeywords]
    ) -> Completion:
        """The whole completion. Cancelling the call aborts it. Raises as `stream`, and `RequestFailed`.

        Raw: the prompt goes through no chat template, and what `params` leaves open where the model's files say nothing
        of sampling is the model's whole distribution (a chat takes `info.chat_defaults`)."""
        async with self.stream(prompt, params, **options) as stream:
            return await stream.result()

    async def chat(
        self, messages: ChatMessages, params: SamplingParams | None = None, **options: Unpack[ChatKeywords]
    ) -> Completion:
        """The whole answer to a chat; keywords as `stream_chat`. Raises as `generate`."""
        async with self.stream_chat(messages, params, **options) as stream:
            return await stream.result()

    async def decide(
        self, state: Any, questions: Mapping[str, Any], *, assets: Mapping[str, Any] | None = None,
        **options: Unpack[RequestKeywords],
    ) -> Decision:  # fmt: skip
        """Answer typed `questions` about a `state` (text or JSON data) with probabilities, in a forward pass of each.

        `questions` maps names to {"type": "noul" | "choice" | "score", "instructions": ..., "criteria": ...}, or to
        LangChain's objects of these shapes; `options` as `RequestOptions`. Where the model reads pictures, both may
        hold content parts of a chat, and texts may name `assets`, pictures by name. The state is computed once, all
        questions are one request, and an answer is the same to the bit in any company. Raises as `generate`.
        """
        wanted = RequestOptions.of(options)
        call = DecisionCall(self.core, state, questions, assets, wanted)
        # on a thread: the first call imports transformers, and each renders and encodes a prompt for every question
        async with self._stream(call.prepare, INLINE_CHARS + 1, None, wanted) as stream:
            return call.decision(await stream.result())

    def fork(
        self, prefix: Prompt | ChatMessages, n: int, params: SamplingParams | None = None, **options: Any
    ) -> list[TokenStream]:
        """`n` streams from one prefix, computed once: as `stream` of a prompt or `stream_chat` of a chat, each to be
        left by itself, at most `max_n`. A seed gives them what it gives the samples of `SamplingParams(n=...)`."""
        call: Any = self.stream_chat if is_chat(prefix) else self.stream
        return [call(prefix, sample_params, **options) for sample_params in forked(params, n, self.core.config.max_n)]

    batch = batches.batch

    def _stream(
        self, prepare: Callable[[float], PreparedRequest], size: int, params: SamplingParams | None,
        options: RequestOptions,
    ) -> TokenStream:  # fmt: skip
        frontend = self.core

        async def start() -> Assembler:
            self.host.check_awaitable()
            work, submitted = size + text_size(options.prediction, INLINE_CHARS), frontend.loop.clock.now()
            if isinstance(params, SamplingParams):
                work += sum(len(stop) for stop in params.stop) + rough_size(params.grammar)
            inline = work <= INLINE_CHARS
            prepared = prepare(submitted) if inline else await anyio.to_thread.run_sync(prepare, submitted)
            return frontend.post(prepared) if await frontend.client.enter(prepared) else frontend.expired(prepared)

        return TokenStream(start, frontend.client.abort_tickets)

    # ---------------------------------------------------------------- prefixes

    @asynccontextmanager
    async def pin(self, prefix: Prompt | ChatMessages, **options: Unpack[ChatKeywords]) -> AsyncIterator[int]:
        """Keep a prompt, or the beginning of a chat, in the prefix cache during `async with`, which gives the number
        of its tokens; keywords as `stream`, or `stream_chat`. Raises as `generate`, and `InvalidParameter` where pins
        would take over half of the cache (docs/howto/persistence.md)."""
        held = HeldPrefix(self._awaited, prefix, options)
        async with held.computed(self._stream(held.prepare, INLINE_CHARS + 1, None, RequestOptions())) as tokens:
            yield tokens

    async def export_prefix(
        self, prefix: Prompt | ChatMessages, file: str | os.PathLike[str], **options: Unpack[ChatKeywords]
    ) -> int:
        """Write the keys and values of a prompt, or of the beginning of a chat, to a `file` for `import_prefix`;
        returns the number of its tokens. Raises as `pin`, and `OSError`."""
        held = HeldPrefix(self._awaited, prefix, options, file)
        async with held.computed(self._stream(held.prepare, INLINE_CHARS + 1, None, RequestOptions())):
            return await anyio.to_thread.run_sync(held.write)

    async def import_prefix(
        self, file: str | os.PathLike[str], *, adapter: str | None = None, cache_salt: str | None = None
    ) -> int:
        """Put what `export_prefix` wrote into the prefix cache; returns the number of its tokens. Caches nothing and
        raises `InvalidParameter`, which names what differs, for another model, adapter, dtype, page size or version or
        a file that is not whole; `RequestFailed` where running requests leave no room."""
        frontend, left = self._awaited, threading.Event()
        try:
            work = partial(frontend.import_prefix, file, adapter, cache_salt, left)
            return await finished(begun(work, "asyncengine-import"))
        finally:
            left.set()

    async def reset_prefix_cache(self, namespace: str | None = None) -> PrefixCacheReset:
        """Drop all of the prefix cache that no request or pin holds, or of it what was computed with the `cache_salt`
        `namespace` ("": with none). Requests run on, and what `kv_cache_dir` has stored stays (docs/howto/sleep.md)."""
        return await finished(self._awaited.reset_prefix_cache(namespace))

    # ---------------------------------------------------------------- vectors

    async def embed(
        self, texts: str | Sequence[str | Sequence[int]], *, prompt_name: str | None = None, prompt: str | None = None,
        dimensions: int | None = None, normalize: bool | None = None, truncate: bool = True,
        show_progress: bool | None = None, **options: Unpack[VectorKeywords],
    ) -> Embeddings:  # fmt: skip
        """One vector for each text (or list of token ids); a single str gives one row.

        `prompt` is put before each text, or that of the model's prompts that `prompt_name` names; with neither, the
        model's default one, if it has one. `dimensions`: only the first of them, again of length one if the vectors
        are. `normalize`: whether they are of length one; None: as the model says. `truncate=False` refuses texts that
        are too long, which are cut and listed otherwise. An empty text has the vector of the model's special tokens.
        Leaving the call aborts it. Raises `InvalidParameter`, `QueueFull`, `RequestFailed`, `RequestTimeout`,
        `EngineClosed`, `EngineDead`.
        """
        vectors, wanted = self._awaited.vectors("embed"), RequestOptions.of_vectors(options)
        call = vectors.embed(texts, prompt_name, prompt, dimensions, normalize, truncate, show_progress, wanted)
        return await vectors.run(call)

    async def rerank(
        self, query: str, documents: Sequence[str], *, top_n: int | None = None, instruction: str | None = None,
        truncate: bool = True, activation: bool = True, **options: Unpack[VectorKeywords],
    ) -> Ranking:  # fmt: skip
        """`documents` by how well they answer `query`, the `top_n` best of them (None: all).

        `instruction`: what "well" means, for rerankers that read one (Qwen3-Reranker). `activation=False`: scores are
        the numbers before the model's activation. Raises as `embed`.
        """
        vectors, wanted = self._awaited.vectors("rerank"), RequestOptions.of_vectors(options)
        return await vectors.run(vectors.rerank(query, documents, top_n, instruction, truncate, activation, wanted))

    async def classify(
        self, texts: Sequence[str | tuple[str, str]], *, truncate: bool = True, activation: bool = True,
        **options: Unpack[VectorKeywords],
    ) -> Classifications:  # fmt: skip
        """Classify each text, or pair of texts, with the model's classification head. `activation` as in `rerank`.
        Raises as `embed`."""
        vectors, wanted = self._awaited.vectors("classify"), RequestOptions.of_vectors(options)
        return await vectors.run(vectors.classify(texts, truncate, activation, wanted))

    # ---------------------------------------------------------------- adapters

    async def load_adapter(
        self, name: str, path: str | os.PathLike[str] | None = None, *, tensors: Mapping[str, Any] | None = None,
        config: Any | None = None, pinned: bool = False,
    ) -> AdapterInfo:  # fmt: skip
        """Read the LoRA adapter in the folder `path` (PEFT format) and call it `name`. Serving goes on meanwhile.

        A name that is taken means the new content from then on; requests submitted before end on the old one.
        `pinned`: never dropped from memory to make room.
        `tensors` and `config` instead of a path: what the two files would hold, tensors by PEFT's names
        (`get_peft_model_state_dict`) and a mapping, or PEFT's `LoraConfig`. Equal content is one adapter, wherever it
        came from. Tensors are read during the call; what comes of them stays in memory while the name means it.
        Raises `AdapterError` for what cannot be loaded; everything is as it was then.
        """
        return await finished(self._awaited.load_adapter(name, path, tensors, config, pinned))

    async def unload_adapter(self, name: str, *, wait: bool = False) -> None:
        """Forget `name`; no later request can use it.
        Raises `AdapterNotFound`, and `AdapterInUse` while requests use it, unless `wait`: then they finish first.
        """
        await finished(self._awaited.unload_adapter(name, wait))

    # ---------------------------------------------------------------- weights, sleep

    async def update_weights(
        self, weights: WeightSource, *, mode: UpdateMode = "wait", partial: bool = False, version: int | None = None
    ) -> int:
        """Give the model other weights of the same shapes: those of a checkpoint (a folder, file or hub id), or tensors
        by the checkpoint's names, of any float type (a `state_dict`, or pairs of name and tensor).

        They are checked first, while serving goes on: `ModelNotFound` names a tensor that is missing, unknown,
        misshapen, or stored or configured otherwise than the model's, `InvalidParameter` a value that is no tensor or
        not finite, `UnsupportedModel` a model that runs through transformers; then nothing has changed. They are
        written between two steps, and the engine then answers to the bit as a new one would
        (docs/howto/weight_updates.md).

        `partial`: those that are not given stay. Of some that are packed into one matrix all must be given.

        `mode` "wait": requests submitted before end first, on the old weights. "recompute": they go on with the new
        ones after at most one more step, and keep their tokens. Requests that come later wait, and have the new alone.

        `version`: the number that these weights have in `Completion.weight_version` and `Sample.weight_versions`, such
        as the trainer's step; None: one more than that of the weights before, which began with 0. It is returned.

        Cancelling the call takes it back unless writing has begun. An error while writing (a file that vanishes) ends
        the engine, as its weights would be some of each: `EngineDead`.
        """
        return await finished(self._awaited.update_weights(weights, mode, partial, version))

    async def sleep(
        self, *, weights: Keep = "drop", cache: Keep = "drop", mode: PauseMode = "finish", requests: Meanwhile = "wait"
    ) -> None:
        """Run no step until `wake`, and give the memory of `weights` and `cache` (keys, values, states) back to the
        system. Adapters, tokenizer, kernels and what `kv_cache_dir` stores stay. Another sleep may drop more.

        `mode`: requests submitted before end first ("finish"), go on afterwards ("keep"), or are aborted ("abort").
        `requests` that come later "wait", with their timeouts running, or are told `EngineAsleep` ("refuse"). Closing
        aborts those that wait. Cancelling the call takes it back unless it has begun. Raises `InvalidParameter`, and
        `UnsupportedModel` for what cannot be dropped: on a GPU, or weights that `update_weights` could not write.
        """
        await finished(self._awaited.sleep(weights, cache, mode, requests))

    async def wake(self, weights: WeightSource | None = None, *, version: int | None = None) -> int:
        """End `sleep` or `pause`, if there is one. Weights that were dropped are read again from their files, which
        must be the same, or `weights` are taken as by `update_weights`. Returns the weights' version.

        Raises as `update_weights`, and `InvalidParameter` where those that were dropped came from tensors and none are
        given. Weights that cannot be read leave it asleep, to be woken again.
        """
        return await finished(self._awaited.wake(weights, version))

    async def pause(self, *, mode: PauseMode = "keep", requests: Meanwhile = "wait") -> None:
        """Run no step until `resume`: a `sleep` that drops nothing. `update_weights` has its turn at once meanwhile,
        whatever its mode: requests that were kept go on with the new weights."""
        await finished(self._awaited.sleep("keep", "keep", mode, requests))

    async def resume(self) -> None:
        """End `pause`: `wake` with nothing given."""
        await finished(self._awaited.wake())

    # ---------------------------------------------------------------- looking in

    @property
    def core(self) -> Frontend:
        if self._core is None:
            raise EngineClosed("the engine has not been started: use `async with`, or await start()")
        self._core.client.check_process()
        return self._core

    @property
    def _awaited(self) -> Frontend:
        """`core`, where its answer is awaited on the running loop."""
        self.host.check_awaitable()
        return self.core

    @property
    def host(self) -> Host:
        self.core.client.check_process()
        assert self._host is not None
        return self._host

    @property
    def hosted(self) -> bool:
        return self._hosted

    @property
    def alive(self) -> bool:
        """True if a request submitted now would be taken."""
        with suppress(EngineClosed, EngineDead):
            self.core.client.check_open()
            return True
        return False

    async def profile(self, folder: str | os.PathLike[str], steps: int = 50, *, timeout: float = 60.0) -> Path:
        """Record the engine's next `steps` steps, for at most `timeout` seconds and until it closes, and write what its
        loop, its threads and the device did into a file in `folder`, which Perfetto and chrome://tracing open. Returns
        its path. Raises `InvalidParameter`, also while another is recorded; `OSError` where it cannot be written.
        """
        timeout = as_seconds("timeout", timeout)
        return await self._awaited.profile(steps).run(folder, self.info.name, timeout)
