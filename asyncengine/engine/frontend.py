"""The front end that the asynchronous and the synchronous engine share: thread-safe access to one running loop."""

from __future__ import annotations

import os
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence, Set
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from itertools import count, islice
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

from asyncengine.cache_news import KVEventBatch, PrefixCacheReset
from asyncengine.checks import as_choice, as_integer, as_items, as_switch
from asyncengine.config import EngineConfig
from asyncengine.engine.assembler import Assembler
from asyncengine.engine.cache_feed import CacheFeed
from asyncengine.engine.decisions import DecisionPrompts
from asyncengine.engine.image_prompts import ImagePrompts
from asyncengine.engine.loop import EngineLoop
from asyncengine.engine.loop_client import LoopClient
from asyncengine.engine.prefix_files import Prefixes, path_of
from asyncengine.engine.profiling import MOST_STEPS, Profile
from asyncengine.engine.sessions import ToolWaits
from asyncengine.engine.snapshot import snapshot
from asyncengine.engine.threads import begun
from asyncengine.engine.turns import Sleep, WeightUpdate
from asyncengine.engine.validation import PreparedRequest, RequestValidator
from asyncengine.engine.vectors.service import VectorModel, VectorService
from asyncengine.errors import AdapterError, ContextLengthExceeded, InvalidParameter, UnsupportedModel
from asyncengine.images import ImageSpan
from asyncengine.info import ModelInfo
from asyncengine.kvcache.store.record import Identity
from asyncengine.options import (
    ChatMessages,
    ChatRequest,
    Prompt,
    RequestOptions,
    ToolSpecs,
    WeightSource,
    is_chat,
    split_chat,
    template_variables,
)
from asyncengine.outputs import Chunk
from asyncengine.sampling_params import SamplingParams, as_params
from asyncengine.scheduler.messages import Message, Pause, PauseMode, UpdateMode, UpdateWeights, WithdrawUpdate
from asyncengine.stats import EngineStats
from asyncengine.text.chat_messages import template_tools
from asyncengine.text.tokenizer import TextTokenizer

if TYPE_CHECKING:
    from asyncengine.grammar.chat import ChatPlan, ChatPlanner
    from asyncengine.lora.adapter import AdapterInfo
    from asyncengine.lora.registry import AdapterRegistry

Keep = Literal["keep", "drop"]
Meanwhile = Literal["wait", "refuse"]
PROMPT_TAIL = 512
"""Characters of a rendered prompt that tell whether the model begins inside its reasoning."""
_ITEMS = 4
"""Messages or tools of a chat for each token of the context: few templates make less than a token of one."""
_NO_TOKENS = (bytes, bytearray, memoryview, Mapping, Set)
"""Can be iterated over, and are no sequences of token ids."""
_TASKS = {
    "generate": ("a text generator", ("generate", "chat", "decide")), "embed": ("an embedding model", ("embed",)),
    "rerank": ("a reranker", ("rerank", "classify")), "classify": ("a classifier", ("classify",)),
    "decide": ("a decision model", ("decide",)),
}  # fmt: skip
"""Models of each task: a description, and the calls that they serve."""


class Frontend:
    """The front end of an engine: text and requests in, streams out. Everything here may be called from any thread."""

    def __init__(
        self, loop: EngineLoop, validator: RequestValidator, tokenizer: TextTokenizer | None, info: ModelInfo,
        planner: ChatPlanner | None = None, adapters: AdapterRegistry | None = None,
        adapter_folder: Callable[[str | os.PathLike[str]], str] = os.path.abspath,
        vector_model: VectorModel | None = None, images: ImagePrompts | None = None,
        identify: Callable[[], Identity] | None = None,
    ) -> None:  # fmt: skip
        """`adapter_folder`: the folder that the path of an adapter means. `vector_model`: None: the model writes text.
        `images`: None: it reads no pictures. `identify`: of `Prefixes`."""
        self.loop = loop
        self.client = LoopClient(loop, adapters)
        self.validator = validator
        self.tokenizer = tokenizer
        self.info = info
        self.planner = planner
        self.adapters = adapters
        self.prefixes = Prefixes(loop, identify)
        """Pins, and prefixes in files."""
        self._adapter_folder = adapter_folder
        self.image_prompts = images
        self.tool_waits = ToolWaits(loop)
        self._decisions: DecisionPrompts | None = None
        self._update_numbers = count(1)
        self._profiling = threading.Lock()
        self.started_at = loop.clock.now()
        self._vectors = None if vector_model is None else VectorService(self.client, validator, tokenizer, vector_model)

    @property
    def config(self) -> EngineConfig:
        return self.loop.config

    # ---------------------------------------------------------------- text in

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt. Raises `InvalidParameter`."""
        if not isinstance(prompt, str):
            if isinstance(prompt, _NO_TOKENS) or not isinstance(prompt, Iterable):
                raise InvalidParameter("prompt", "must be a str or a sequence of token ids", prompt)
            return list(as_items("prompt", prompt))
        tokenizer = self._tokenizer("prompt")
        tokenizer.check_fits("prompt", prompt, self.info.max_model_len)
        return tokenizer.encode(prompt)

    def tokens(
        self, text: str | ChatMessages, tools: ToolSpecs | None = None,
        template_kwargs: Mapping[str, Any] | None = None, add_special_tokens: bool | None = None,
    ) -> list[int]:  # fmt: skip
        """See `AsyncEngine.tokenize`."""
        if add_special_tokens is not None:
            as_switch("add_special_tokens", add_special_tokens)
        if isinstance(text, str):
            return self._tokenizer("prompt").encode(text, add_special_tokens is not False)
        tokenizer, variables = self._tokenizer("messages"), template_variables(template_kwargs)
        _, ids, _ = self._chat(tokenizer, text, template_tools(tools), variables, add_special_tokens is True, False)
        return ids

    def _chat(
        self, tokenizer: TextTokenizer, messages: ChatMessages, tools: list[Any] | None, variables: Mapping[str, Any],
        add_special_tokens: bool = False, to_answer: bool = True,
    ) -> tuple[str, list[int], tuple[ImageSpan, ...]]:  # fmt: skip
        """A chat as the model's template renders it, its token ids, and the pictures among these. `to_answer`: raises
        `ContextLengthExceeded` for one that is far too long, without encoding it."""
        most = _ITEMS * self.info.max_model_len
        for name, items in (("messages", messages), ("tools", tools)):
            if to_answer and isinstance(items, Sequence) and len(items) > most:
                raise ContextLengthExceeded(name, f"must be at most {most}", len(items))
        images = None if self.image_prompts is None else self.image_prompts.parts()
        rewrite = None if self.planner is None else self.planner.rewrite
        text = tokenizer.render_chat(messages, tools, images=images, rewrite=rewrite, **variables)
        if to_answer:
            tokenizer.check_fits("messages", text, self.info.max_model_len)
        if self.image_prompts is None or images is None or not images.parts:
            return text, tokenizer.encode(text, add_special_tokens), ()
        return text, *self.image_prompts.encode(text, images.parts)

    def tokenizer_of(self, token_ids: Iterable[int]) -> tuple[TextTokenizer, list[int]]:
        """The tokenizer, and ids that it or the model has. Raises `InvalidParameter`, also for ids beyond these."""
        tokenizer = self._tokenizer("token_ids")
        highest = max(self.info.vocab_size, tokenizer.table.size) - 1
        return tokenizer, [as_integer("token_ids", token, 0, highest) for token in as_items("token_ids", token_ids)]

    def _tokenizer(self, field: str) -> TextTokenizer:
        if self.tokenizer is None:
            raise InvalidParameter(field, f"{self.info.name} has no tokenizer: pass a sequence of token ids as prompt")
        return self.tokenizer

    # ---------------------------------------------------------------- requests in

    def prepare(
        self, prompt: Prompt, params: SamplingParams | None, options: RequestOptions, arrival: float | None = None
    ) -> PreparedRequest:
        """Tokenize and check a request, submitted at `arrival` (by the engine's clock; None: now). Raises
        `InvalidParameter`, `EngineClosed`, `EngineDead`."""
        self._check_serves("generate")
        arrival = self.loop.clock.now() if arrival is None else arrival
        if isinstance(prompt, str) and not prompt:
            raise InvalidParameter("prompt", "must not be empty")
        if isinstance(prompt, Iterator):  # it may have no end
            limit = self.info.max_model_len
            prompt = list(islice(cast("Iterator[int]", prompt), limit + 1))
            if len(prompt) > limit:
                raise ContextLengthExceeded("prompt", f"has more tokens than the context of {limit} can hold")
        return self.validator.prepare(self.encode(prompt), params, options, arrival)

    def prepare_prefix(
        self, prefix: Prompt | ChatMessages, keywords: Mapping[str, Any], arrival: float | None = None
    ) -> PreparedRequest:
        """A request of one token that computes a prompt, or a chat without what the template writes before an answer.
        `keywords` as those of `stream` or `stream_chat`. Raises as `prepare`."""
        params = SamplingParams(max_tokens=1)
        if not is_chat(prefix):
            return self.prepare(cast(Prompt, prefix), params, RequestOptions.of(keywords), arrival)
        self._check_serves("chat")
        chat, options = split_chat(prefix, keywords)
        variables = {"add_generation_prompt": False, **chat.variables}
        _, prompt, images = self._chat(
            self._tokenizer("messages"), chat.messages, template_tools(chat.tools), variables
        )
        arrival = self.loop.clock.now() if arrival is None else arrival
        return self.validator.prepare(prompt, params, options, arrival, images=images)

    def import_prefix(
        self, file: object, adapter: str | None, cache_salt: str | None, left: threading.Event | None = None
    ) -> int:
        """See `AsyncEngine.import_prefix`; blocks. `left`: set when the caller waits for it no more."""
        self._check_serves("generate")
        self.prefixes.check("import_prefix", copies=True)
        path = path_of(file)
        self.validator.check_adapter(adapter)
        options = RequestOptions(adapter=adapter, cache_salt=cache_salt).checked()
        digest = next((info.digest for info in self.list_adapters() if info.name == adapter), "")
        number = self.validator.next_ticket()
        return self.prefixes.read(path, digest, options.cache_salt or "", number, left)

    def prepare_chat(
        self, chat: ChatRequest, params: SamplingParams | None, options: RequestOptions, arrival: float | None = None
    ) -> PreparedRequest:
        """Render, tokenize and check a chat, and settle what its answer must match. Raises as `prepare`."""
        self._check_serves("chat")
        arrival = self.loop.clock.now() if arrival is None else arrival
        tokenizer = self._tokenizer("messages")
        if options.prediction is not None and chat.tools and chat.tool_choice not in (None, "auto", "none"):
            raise InvalidParameter("prediction", "is of a text, and tool_choice asks for a call", chat.tool_choice)
        tools = template_tools(chat.tools)
        text, prompt, images = self._chat(tokenizer, chat.messages, tools, chat.variables)
        params = as_params(params)
        plan = self._plan(chat, params, text)
        return self.validator.prepare(prompt, params, options, arrival, plan, images, is_chat=True)

    def decision_prompts(self) -> DecisionPrompts:
        """The maker of prompts for decisions. Raises as `prepare`."""
        self._check_serves("decide")
        if self._decisions is None:
            self._decisions = DecisionPrompts(self._tokenizer("state"), self.info.max_model_len, self.image_prompts)
        return self._decisions

    def _plan(self, chat: ChatRequest, params: SamplingParams, text: str) -> ChatPlan | None:
        """Plan of a chat. `params.grammar` constrains the answer, after any reasoning, as `response_format` does."""
        wanted = chat.response_format if params.grammar is None else params.grammar
        if params.grammar is not None and chat.response_format is not None:
            raise InvalidParameter("response_format", "cannot go with a grammar in the sampling parameters")
        if self.planner is None:
            if chat.tools or wanted is not None or chat.max_thinking_tokens is not None:
                field = "tools" if chat.tools else "max_thinking_tokens" if wanted is None else "response_format"
                raise InvalidParameter(field, "this engine takes no grammars")
            return None
        return self.planner.plan(
            text[-PROMPT_TAIL:], tools=chat.tools, tool_choice="auto" if chat.tool_choice is None else chat.tool_choice,
            parallel_tool_calls=chat.parallel_tool_calls, response_format=wanted,
            after_results=chat.messages[-1].get("role") == "tool", max_thinking_tokens=chat.max_thinking_tokens,
        )  # fmt: skip

    def expired(self, prepared: PreparedRequest) -> Assembler:
        """The assembler of a request whose deadline came before it had a place in the queue."""
        for index in range(len(prepared.streams)):
            prepared.mailbox.put(Chunk("", [], "timeout", index))
        return Assembler(prepared, self.loop.clock.now)

    def post(self, prepared: PreparedRequest) -> Assembler:
        """Post a request that has its places in the queue, and return its assembler. Raises as `LoopClient.post`."""
        assembler = self.tool_waits.assembler(prepared)
        self.client.post(prepared)
        return assembler

    def _check_serves(self, call: str) -> None:
        """Raises `InvalidParameter` where the model's task allows no call of this name, and as `check_open`."""
        self.client.check_open()
        noun, served = _TASKS[self.info.task]
        if call in served:
            return
        limit = f"is not served: {self.info.name} is {noun}: it serves {' and '.join(f'{name}()' for name in served)}"
        if self.info.task == "generate" and call == "embed":
            limit += '. Its files say nothing of pooling; pooling="last" or pooling="mean" loads it to embed with it'
        elif self.info.task == "generate":
            limit += f'. Load it with task="{call}" if it was trained for that'
        raise InvalidParameter(call, limit)

    @property
    def vector_model(self) -> VectorModel | None:
        return None if self._vectors is None else self._vectors.model

    def vectors(self, call: str) -> VectorService:
        """The service of calls for vectors and scores. Raises as `prepare` where the model serves no `call`."""
        self._check_serves(call)
        assert self._vectors is not None
        return self._vectors

    # ---------------------------------------------------------------- adapters

    def load_adapter(
        self, name: str, path: str | os.PathLike[str] | None, tensors: object, config: object, pinned: bool
    ) -> Future[AdapterInfo]:
        """See `AdapterRegistry.load`, and `take` where there are tensors or a config. Raises `EngineClosed`,
        `EngineDead`, `AdapterError`."""
        registry = self._registry()
        if tensors is not None or config is not None:
            if path is not None:
                raise AdapterError("path", "cannot go with tensors and config")
            return registry.take(name, tensors, config)
        try:
            folder = self._adapter_folder(path)  # type: ignore[arg-type]
        except TypeError:
            raise AdapterError("path", "must be the path of an adapter's folder", path) from None
        return registry.load(name, folder, pinned=pinned)

    def unload_adapter(self, name: str, wait: bool) -> Future[None]:
        """See `AdapterRegistry.unload`."""
        return self._registry().unload(name, wait=wait)

    def list_adapters(self) -> tuple[AdapterInfo, ...]:
        return () if self.adapters is None else self.adapters.list()

    def _registry(self) -> AdapterRegistry:
        self.client.check_open()
        if self.adapters is None:
            raise AdapterError("adapter", "this engine takes no adapters")
        return self.adapters

    # ---------------------------------------------------------------- other weights

    def update_weights(
        self, weights: WeightSource, mode: UpdateMode, partial: bool, version: int | None
    ) -> Future[int]:
        """See `AsyncEngine.update_weights`. Cancelling the future takes it back, as long as nothing was written."""
        self.client.check_open()
        as_choice("mode", mode, get_args(UpdateMode))
        as_switch("partial", partial)
        if weights is None:
            raise InvalidParameter("weights", "must be a path, or tensors by name", weights)
        return self._write(weights, mode, partial, version, wakes=False)

    def _write(
        self, weights: WeightSource, mode: UpdateMode, partial: bool, version: int | None, *, wakes: bool
    ) -> Future[int]:
        if version is not None:
            version = as_integer("version", version, 0)
        if not isinstance(loop := self.loop, EngineLoop):
            raise UnsupportedModel("this engine's weights cannot be exchanged")
        prepare, number = loop.runner.executor.prepare_update, next(self._update_numbers)
        done: Future[int] = Future()

        def work() -> None:
            from_files = isinstance(weights, (str, os.PathLike)) and not partial
            again = (lambda: loop.write_from(weights)) if from_files else None
            try:
                write = prepare(weights, self.config, partial)
            except BaseException as error:
                with suppress(InvalidStateError):  # its owner cancelled it
                    done.set_exception(error)
                return
            update = WeightUpdate(write, done, version, again, partial, wakes)
            self._await_turn(number, update, UpdateWeights(number, mode))

        begun(work, "asyncengine-weights")
        return done

    def _await_turn(self, number: int, turn: WeightUpdate | Sleep, message: Message) -> None:
        self.loop.updates[number] = turn
        if self.loop.inbox.post(message):
            withdraw = WithdrawUpdate(number)
            turn.done.add_done_callback(lambda ended: self.loop.inbox.post(withdraw) if ended.cancelled() else None)
        else:
            self.loop.fail_update(number)

    # ---------------------------------------------------------------- sleep

    def sleep(self, weights: Keep, cache: Keep, mode: PauseMode, requests: Meanwhile) -> Future[None]:
        """See `AsyncEngine.sleep`. Cancelling the future takes it back, as long as it has not begun."""
        self.client.check_open()
        for name, value in (("weights", weights), ("cache", cache)):
            as_choice(name, value, get_args(Keep))
        as_choice("mode", mode, get_args(PauseMode))
        as_choice("requests", requests, get_args(Meanwhile))
        if not isinstance(self.loop, EngineLoop):
            raise UnsupportedModel("a fleet of several engines does not sleep: give its replicas back instead")
        drops = weights == "drop", cache == "drop"
        release = self.loop.runner.executor.prepare_release(*drops) if any(drops) else None
        number, done = next(self._update_numbers), Future[None]()
        self._await_turn(number, Sleep(done, release, *drops, requests == "refuse"), Pause(number, mode))
        return done

    def wake(self, weights: WeightSource | None = None, version: int | None = None) -> Future[int]:
        """See `AsyncEngine.wake`."""
        self.client.check_open()
        if weights is not None:
            return self._write(weights, "recompute", False, version, wakes=True)
        if version is not None:
            raise InvalidParameter("version", "is of weights, and none are given", version)
        number, done = next(self._update_numbers), Future[int]()
        self._await_turn(number, WeightUpdate(None, done, wakes=True), UpdateWeights(number, "recompute"))
        return done

    def reset_prefix_cache(self, namespace: str | None) -> Future[PrefixCacheReset]:
        """See `AsyncEngine.reset_prefix_cache`."""
        return self.prefixes.reset(namespace, next(self._update_numbers))

    def discard(self) -> None:
        """Free the resources of an engine that was loaded and will not serve. Idempotent."""
        for service in (self.adapters, self.loop.grammars):
            if service is not None:
                service.close()
        self.loop.sources.close()
        self.loop.runner.close_soon()

    # ---------------------------------------------------------------- looking in

    def cache_events(self, most: int) -> AsyncIterator[KVEventBatch]:
        """See `AsyncEngine.cache_events`."""
        self.client.check_open()
        if not (isinstance(self.loop, EngineLoop) and self.config.prefix_caching):
            raise InvalidParameter("cache_events", "are of one engine that keeps a prefix cache")
        medium = "CPU" if self.info.device == "cpu" else "GPU"
        most = as_integer("buffer", most, 1)
        return CacheFeed(self.loop, medium, lambda: {a.digest: a.name for a in self.list_adapters()}, most).read()

    def profile(self, steps: int) -> Profile:
        """A profile of the engine's next steps, to be started and stopped. Raises `InvalidParameter` if there is one
        already, and of a fleet."""
        self.client.check_open()
        steps = as_integer("steps", steps, 1, MOST_STEPS)
        if not isinstance(self.loop, EngineLoop):
            raise InvalidParameter("profile", "is of one engine, and this is a fleet of several")
        if not self._profiling.acquire(blocking=False):
            raise InvalidParameter("profile", "is being made already; there can be one at a time")
        return Profile(self.loop, steps, self._profiling.release)

    def stats(self) -> EngineStats:
        """A snapshot, from any thread. Counts of a running engine may be a step apart from each other."""
        return snapshot(self.loop, self.adapters, self.started_at)
