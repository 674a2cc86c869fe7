"""Validation of requests: a call becomes the `RequestSpec`s that are posted. Defaults are resolved, every limit is
checked, tickets are drawn.

Everything that can be refused is refused here, in the caller's own call, by name: the scheduler only ever sees
requests that can run. Registering and enqueueing is one synchronous stretch (vLLM #57061 leaked what an await between
the two let be cancelled).
"""

from __future__ import annotations

import itertools
import operator
import secrets
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from asyncengine.checks import as_integer, check_unicode
from asyncengine.config import RequestSettings
from asyncengine.engine.clock import Clock
from asyncengine.engine.delivery import OutputStream
from asyncengine.engine.mailbox import Mailbox
from asyncengine.errors import AdapterNotFound, ContextLengthExceeded, GrammarError, InvalidParameter
from asyncengine.images import ImageSpan, with_identity
from asyncengine.info import ModelInfo
from asyncengine.options import RequestOptions
from asyncengine.request_spec import Pooled, RequestSpec
from asyncengine.sampling_params import GREEDY_BELOW, READS_OUTPUT, SamplingParams, as_params
from asyncengine.seams import AdapterStore, GrammarCompiler
from asyncengine.text.stop_strings import StopAutomaton, StopStringMatcher
from asyncengine.text.tokenizer import TextTokenizer

if TYPE_CHECKING:
    from asyncengine.grammar.chat import ChatPlan
    from asyncengine.grammar.narrowing import BadWords

_NOT_SAMPLED = SamplingParams(temperature=0.0, top_p=1.0, top_k=0, repetition_penalty=1.0)


@dataclass(frozen=True, slots=True, eq=False)
class PreparedRequest:
    """A checked request, ready to be posted: its samples' streams, each with its specification, and the consumer's end
    of them."""

    streams: tuple[OutputStream, ...]
    mailbox: Mailbox
    plan: ChatPlan | None = None
    """The plan of a chat: its output is taken apart into answer, reasoning and tool calls."""
    check_text: Callable[[str], str | None] | None = None
    """Says where a finished text breaks its schema, if the grammar could not enforce all of it."""

    @property
    def spec(self) -> RequestSpec:
        """The specification of sample 0; the others differ in ticket, index and seed, and have no `prompt_logprobs`."""
        return self.streams[0].spec

    @property
    def specs(self) -> list[RequestSpec]:
        return [stream.spec for stream in self.streams]

    @property
    def tickets(self) -> list[int]:
        return [stream.spec.ticket for stream in self.streams]

    @property
    def receivers(self) -> dict[int, OutputStream]:
        """The receiver of the outputs of each ticket: its sample's stream."""
        return {stream.spec.ticket: stream for stream in self.streams}

    @property
    def samples(self) -> int:
        return len(self.streams)

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompts of all samples."""
        return sum(stream.spec.prompt_len for stream in self.streams)


class RequestValidator:
    """Checks requests against one engine's model and limits. Thread-safe: tickets come from one atomic counter."""

    def __init__(
        self, config: RequestSettings, info: ModelInfo, clock: Clock, tokenizer: TextTokenizer | None,
        grammars: GrammarCompiler | None = None, adapters: AdapterStore | None = None,
    ) -> None:  # fmt: skip
        self.config = config
        self.info = info
        self.clock = clock
        self.tokenizer = tokenizer
        self.grammars = grammars
        self.adapters = adapters
        reasons = dict.fromkeys(("return_hidden_states", "steering_vectors"), info.no_hidden_states)
        reasons |= {"return_routed_experts": info.no_routed_experts, "logits_processors": info.no_logits_processors}
        self._refused = {name: reason for name, reason in reasons.items() if reason is not None}
        self._served = set(info.sampling_parameters) - self._refused.keys()
        self._tickets = itertools.count(1)  # next() is atomic under the GIL; tickets are never reused

    def next_ticket(self) -> int:
        """A new request's number."""
        return next(self._tickets)

    def _deadlines(self, options: RequestOptions, arrival: float) -> dict[str, Any]:
        """Clock readings of `RequestSpec.deadline` and `waiting_deadline`."""
        timeout = options.timeout if options.timeout is not None else self.config.request_timeout
        waiting = self.config.waiting_timeout
        return {
            "deadline": None if timeout is None else arrival + timeout,
            "waiting_deadline": None if waiting is None else arrival + waiting,
        }

    def prepare_text(
        self, name: str, ids: list[int], options: RequestOptions, label: str, arrival: float, pooled: Pooled
    ) -> RequestSpec:
        """The request for a vector of one text, whose ids fit the model. Raises `InvalidParameter` for `name`."""
        vocab = self.info.vocab_size
        if not ids:
            raise InvalidParameter(name, "is empty, and this model's tokenizer adds nothing to it")
        if max(ids) >= vocab or min(ids) < 0:
            limit = f"must be token ids between 0 and {vocab - 1}: others are out of vocabulary"
            raise InvalidParameter(name, limit, next(token for token in ids if not 0 <= token < vocab))
        if pooled.skip >= len(ids):
            raise InvalidParameter(name, f"is all prompt ({pooled.skip} tokens), which this model leaves out")
        return RequestSpec(
            next(self._tickets), tuple(ids), _NOT_SAMPLED, len(ids), options, label,
            arrival=arrival, pooled=pooled, **self._deadlines(options, arrival),
        )  # fmt: skip

    def prepare(
        self, prompt: Sequence[int], params: SamplingParams | None, options: RequestOptions, arrival: float,
        plan: ChatPlan | None = None, images: tuple[ImageSpan, ...] = (), *, is_chat: bool = False,
    ) -> PreparedRequest:  # fmt: skip
        """Check everything and specify `n` samples. Raises `InvalidParameter` or a subclass of it.

        `arrival`: when it was submitted, by the engine's clock; deadlines count from there. `plan`: what a chat asks of
        its output, in place of the grammar in `params`. `images`: pictures in the prompt, which has placeholders there.
        `is_chat`: parameters that are left open are those of chats.

        Takes a while for long prompts and many stop strings; posts nothing, so it may run on any thread.
        """
        params = as_params(params)
        defaults = self.info.chat_defaults if is_chat else self.info.generation_defaults
        params = self._resolve(params if plan is None else plan.applied(params), defaults)
        tokens = self._check_prompt(prompt, images)
        self._check_limits(params, asked := params.asked())
        self.check_adapter(options.adapter)
        options = self._steered(params, options.checked())
        max_total = self._check_length(len(tokens), params, options.clip_max_tokens)
        for name in ("prompt_logprobs_start", "routed_experts_start", "hidden_states_start"):
            if (start := getattr(params, name)) > len(tokens):
                raise InvalidParameter(name, f"must not exceed the {len(tokens)} tokens of the prompt", start)
        if params.grammar is not None:
            if self.grammars is None:
                raise GrammarError(
                    "grammar", "this engine takes no grammars: its grammar_backend is none, or no tokenizer"
                )
            grammar = self.grammars.check(params.grammar, max_total - len(tokens), params.on_budget)
            params = params.replace(grammar=grammar)
        final = params.grammar if plan is None else plan.final
        # bad words go around the grammar, and the thinking budget around both: thoughts are not the grammar's
        if params.bad_words:
            params = params.replace(grammar=self._bad_words(params))
        if plan is not None and plan.thinking is not None:
            params = params.replace(grammar=replace(plan.thinking, grammar=params.grammar))
        if params.return_hidden_states:
            most, name = self.info.num_layers, "return_hidden_states"
            layers = (as_integer(name, layer, -most - 1, most) for layer in params.return_hidden_states)
            params = params.replace(return_hidden_states=tuple(layer % (most + 1) for layer in layers))
        reading = next((name for name, marks in asked.items() if READS_OUTPUT in marks), None)
        if reading is not None:
            if options.speculation or options.prediction is not None:
                limit = "cannot go with speculation or a prediction: guesses are checked many at a time"
                raise InvalidParameter(reading, limit)
            options = replace(options, speculation=False)
        mailbox = Mailbox()
        mailbox.is_chat = is_chat
        stops = StopAutomaton(params.stop) if params.stop else None
        prediction = self._check_prediction(options.prediction, params)
        if images:
            _check_images(params, images, len(tokens))
            tokens = with_identity(tokens, images)
        specs = self._specify(tokens, params, options, max_total, arrival, prediction, images, reading is not None)
        return PreparedRequest(
            streams=tuple(self._stream(spec, mailbox, stops) for spec in specs), mailbox=mailbox, plan=plan,
            check_text=None if final is None or self.grammars is None else self.grammars.text_check(final),
        )  # fmt: skip

    def _steered(self, params: SamplingParams, options: RequestOptions) -> RequestOptions:
        """The options of a request whose keys and values, if steered, are no other's. Raises `InvalidParameter`."""
        if not params.steering_vectors:
            return options
        name, digest = "steering_vectors", blake2b(digest_size=16)
        for layer, vector in sorted(params.steering_vectors.items()):
            as_integer(name, layer, 1, self.info.num_layers)
            if len(vector) != self.info.hidden_size:
                raise InvalidParameter(f"{name}[{layer}]", f"must have {self.info.hidden_size} numbers", len(vector))
            digest.update(b"%d:%b" % (layer, array("f", vector).tobytes()))
        return replace(options, cache_salt=f"{options.cache_salt or ''}\0{digest.hexdigest()}")

    def prepare_set(
        self, prompts: Sequence[tuple[Sequence[int], tuple[ImageSpan, ...], SamplingParams]], options: RequestOptions,
        arrival: float,
    ) -> PreparedRequest:  # fmt: skip
        """Specify one request of several prompts, each with its pictures and with parameters of its own that are whole
        and within limits: all of them start or none, and they end together. Raises as `prepare`."""
        self.check_adapter(options.adapter)
        options = options.checked()
        label, members = options.request_id or f"req-{secrets.token_hex(8)}", len(prompts)
        mailbox, group, streams = Mailbox(), next(self._tickets), list[OutputStream]()
        for index, (ids, images, params) in enumerate(prompts):
            tokens = self._check_prompt(ids, images)
            if images:
                _check_images(params, images, len(tokens))
                tokens = with_identity(tokens, images)
            spec = RequestSpec(
                next(self._tickets) if index else group, tokens, params, self._check_length(len(tokens), params, False),
                options, label, seed=sample_seed(params.seed, 0), arrival=arrival, index=index,
                group=None if members == 1 else group, members=members, images=images,
                **self._deadlines(options, arrival),
            )  # fmt: skip
            streams.append(self._stream(spec, mailbox, None))
        return PreparedRequest(tuple(streams), mailbox)

    def _specify(
        self, prompt: tuple[int, ...], params: SamplingParams, options: RequestOptions, max_total: int, arrival: float,
        prediction: tuple[int, ...], images: tuple[ImageSpan, ...], one_by_one: bool,
    ) -> Iterator[RequestSpec]:  # fmt: skip
        """The specifications of the `n` samples, in order. Draws their tickets."""
        ticket = next(self._tickets)
        eos = () if params.ignore_eos else self.info.eos_token_ids
        first = RequestSpec(
            ticket, prompt, params, max_total, options=options,
            request_id=options.request_id or f"req-{secrets.token_hex(8)}", seed=sample_seed(params.seed, 0),
            stop_ids=tuple(dict.fromkeys((*eos, *params.stop_token_ids))), arrival=arrival,
            group=None if params.n == 1 else ticket, members=params.n, prediction=prediction, images=images,
            inter_token_timeout=self.config.inter_token_timeout, one_by_one=one_by_one,
            **self._deadlines(options, arrival),
        )  # fmt: skip
        yield first
        if params.n > 1 and params.prompt_logprobs:
            # the same for all samples: computed once
            params = params.replace(prompt_logprobs=False, prompt_logprobs_start=0)
        if params.n > 1 and params.traced_from is not None:
            start = "routed_experts_start" if params.return_routed_experts else "hidden_states_start"
            params = params.replace(**{start: len(prompt) - 1})
        for index in range(1, params.n):
            seed = sample_seed(params.seed, index)
            yield replace(first, ticket=next(self._tickets), index=index, seed=seed, params=params)

    def _stream(self, spec: RequestSpec, mailbox: Mailbox, stops: StopAutomaton | None) -> OutputStream:
        params = spec.params
        stream = OutputStream(spec, mailbox)
        if self.tokenizer is not None:
            stream.detokenizer = self.tokenizer.table.stream(params.skip_special_tokens)
        if stops is not None:
            stream.stops = StopStringMatcher(stops, params.include_stop)
        return stream

    def reopen(self, spec: RequestSpec, mailbox: Mailbox) -> OutputStream:
        """The stream of a sample that another engine's validator specified, text and stop strings as far as the
        output it already has."""
        stops = StopAutomaton(spec.params.stop) if spec.params.stop else None
        stream = self._stream(spec, mailbox, stops)
        for token in spec.resumed:
            stream.advance(token, left_out=False)
        stream.last_token_at = self.clock.now()
        return stream

    def _resolve(self, params: SamplingParams, defaults: Mapping[str, Any]) -> SamplingParams:
        """Fill in parameters that the caller left open: from `defaults`, else with neutral values.

        As in Hugging Face `generate`, `do_sample: false` in `defaults` means greedy, whatever its temperature.
        """
        changes: dict[str, Any] = {}
        temperature = params.temperature
        if temperature is None:
            greedy = defaults.get("do_sample") is False
            temperature = 0.0 if greedy else defaults.get("temperature", 1.0)
        if temperature != params.temperature or temperature < GREEDY_BELOW:
            changes["temperature"] = 0.0 if temperature < GREEDY_BELOW else temperature
        for name, neutral in (("top_p", 1.0), ("min_p", 0.0), ("repetition_penalty", 1.0)):
            if getattr(params, name) is None:
                changes[name] = defaults.get(name, neutral)
        if params.top_k is None or params.top_k < 0:
            default = defaults.get("top_k", 0) if params.top_k is None else 0
            changes["top_k"] = max(0, default)
        textual = self.tokenizer is not None and params.grammar is None  # a grammar says itself where a text ends
        if "stop_strings" in defaults and not params.stop and textual and not params.ignore_eos:
            changes["stop"] = defaults["stop_strings"]
        return params.replace(**changes) if changes else params

    def _check_prompt(self, prompt: Sequence[int], images: tuple[ImageSpan, ...] = ()) -> tuple[int, ...]:
        if not prompt:
            raise InvalidParameter("prompt", "must not be empty")
        if len(prompt) > self.info.max_model_len:  # a longer one takes a while to look through
            raise self._too_long(len(prompt))
        vocab, placeholders = self.info.vocab_size, self.info.placeholders
        tokens = tuple(map(_plain_id, prompt))
        for position, token in enumerate(tokens):
            if type(token) is not int or not 0 <= token < vocab:
                limit = f"must be a token id between 0 and {vocab - 1}: others are out of vocabulary"
                raise InvalidParameter(f"prompt[{position}]", limit, token)
            if token in placeholders and not any(span.first <= position < span.end for span in images):
                served = "only the text of this model is served"
                if self.info.no_images is None:
                    served = "pictures are passed in the messages of a chat"
                limit = f"stands for {placeholders[token]}: {served}"
                raise InvalidParameter(f"prompt[{position}]", limit, token)
        return tokens

    def _check_prediction(self, prediction: Any, params: SamplingParams) -> tuple[int, ...]:
        """Token ids of what the caller expects. Raises `InvalidParameter`."""
        if prediction is None:
            return ()
        if params.n > 1:
            raise InvalidParameter("prediction", f"is of one output, and n is {params.n}")
        content = _predicted_content(prediction)
        if isinstance(content, str):
            if self.tokenizer is None:
                raise InvalidParameter("prediction", "must be token ids: this model has no tokenizer")
            check_unicode("prediction", content)
            tokens = tuple(self.tokenizer.encode(content, add_special_tokens=False))
        else:
            tokens = tuple(map(_plain_id, content))
            vocab = self.info.vocab_size
            if not all(type(token) is int and 0 <= token < vocab for token in tokens):
                raise InvalidParameter("prediction", f"must be a text or token ids below {vocab}", prediction)
        return tokens[: self.info.max_model_len]  # no answer is longer

    def _bad_words(self, params: SamplingParams) -> BadWords:
        """The tokens of `bad_words`, around any grammar."""
        from asyncengine.grammar.narrowing import BadWords

        if self.tokenizer is None or self.grammars is None:
            raise InvalidParameter("bad_words", "this engine takes no grammars, which would hold them off")
        texts = [blank + word.lstrip(" ") for word in params.bad_words for blank in ("", " ")]
        words = (tuple(self.tokenizer.encode(text, add_special_tokens=False)) for text in texts)
        return BadWords(words=tuple(filter(None, words)), grammar=params.grammar)

    def _check_length(self, prompt_len: int, params: SamplingParams, clip: bool) -> int:
        """Most tokens of prompt and output together. Raises `ContextLengthExceeded` for what can never fit."""
        limit = self.info.max_model_len
        if prompt_len >= limit and not (prompt_len == limit and params.max_tokens == 0):
            raise self._too_long(prompt_len)
        name, wanted, room = "max_tokens", params.max_tokens, limit - prompt_len
        if wanted is None or (clip and wanted > room):
            name, wanted = "min_tokens", params.min_tokens
        if wanted > room:
            raise ContextLengthExceeded(
                name, f"the context of {limit} leaves {room} after {prompt_len} prompt tokens", wanted
            )
        return limit if name == "min_tokens" else prompt_len + wanted

    def _too_long(self, prompt_len: int) -> ContextLengthExceeded:
        limit = self.info.max_model_len
        return ContextLengthExceeded(
            "prompt", f"has {prompt_len} tokens; the context of {limit} must hold it and at least one output token"
        )

    def _check_limits(self, params: SamplingParams, asked: Mapping[str, set[str]]) -> None:
        config, vocab = self.config, self.info.vocab_size
        sizes = (
            ("n", params.n, "max_n", config.max_n),
            ("stop", len(params.stop), "max_stop_strings", config.max_stop_strings),
            ("stop_token_ids", len(params.stop_token_ids), "max_stop_token_ids", config.max_stop_token_ids),
            ("top_logprobs", params.top_logprobs, "max_top_logprobs", config.max_top_logprobs),
            ("logprob_token_ids", len(params.logprob_token_ids), "max_top_logprobs", config.max_top_logprobs),
            ("logit_bias", len(params.logit_bias), "max_logit_bias", config.max_logit_bias),
        )
        for name, size, setting, limit in sizes:
            if size > limit:
                raise InvalidParameter(name, f"{size} exceeds the engine's {setting}={limit}")
        for stop in params.stop:
            if len(stop) > config.max_stop_string_length:
                limit = config.max_stop_string_length
                raise InvalidParameter("stop", f"{len(stop)} characters exceed max_stop_string_length={limit}")
        if unserved := sorted(asked.keys() - self._served):
            reason = self._refused.get(unserved[0]) or f"steps on {self.info.device} do not know it"
            raise InvalidParameter(unserved[0], f"cannot be had: {reason}")
        if params.stop and self.tokenizer is None:
            raise InvalidParameter("stop", "needs a tokenizer and this model has none; use stop_token_ids")
        for name in ("stop_token_ids", "logit_bias", "logprob_token_ids", "allowed_token_ids"):
            for token in getattr(params, name) or ():
                if token >= vocab:
                    raise InvalidParameter(name, f"must be token ids below {vocab} (the vocabulary)", token)

    def check_adapter(self, name: str | None) -> None:
        """Raises `AdapterNotFound`."""
        if name is None:
            return
        if self.adapters is None:
            raise AdapterNotFound("adapter", "this engine takes no adapters", name)
        self.adapters.find(name)


def _check_images(params: SamplingParams, images: tuple[ImageSpan, ...], prompt_len: int) -> None:
    """Refuse options that are undefined for prompts with pictures. Raises `InvalidParameter`."""
    if params.prompt_logprobs:
        raise InvalidParameter("prompt_logprobs", "cannot be had of a prompt with pictures")
    if images[-1].end == prompt_len:
        raise InvalidParameter("messages", "must not end with a picture: the model's template puts nothing behind it")


_PREDICTION = 'must be a text, token ids, or {"type": "content", "content": a text or parts of type text}'


def _predicted_content(prediction: Any) -> str | Sequence[int]:
    """The text or the token ids of a `prediction`, which may come in OpenAI's form. Raises `InvalidParameter`."""
    content = prediction
    if isinstance(prediction, Mapping):
        content = prediction.get("content") if prediction.get("type") == "content" else None
    if isinstance(content, (list, tuple)) and content and all(isinstance(part, Mapping) for part in content):
        texts = [part.get("text") for part in content]
        content = "".join(texts) if all(isinstance(text, str) for text in texts) else None
    if isinstance(content, str) or (isinstance(content, Sequence) and not isinstance(content, (bytes, bytearray))):
        return content
    raise InvalidParameter("prediction", _PREDICTION, prediction)


def sample_seed(seed: int | None, index: int) -> int:
    """Seed of sample `index`: the caller's for sample 0, a mix of it and the index for the others."""
    if seed is None:
        return secrets.randbits(64)
    # 2**64 over the golden ratio: multiples lie far apart (Fibonacci hashing, Knuth 1973)
    mixed = (seed & (2**64 - 1)) ^ (index * 0x9E3779B97F4A7C15)
    return mixed & (2**64 - 1)


def forked(params: SamplingParams | None, n: int, limit: int) -> list[SamplingParams]:
    """Parameters of `n` requests, at most `limit`, that are sampled as `n` samples of one would be. Raises
    `InvalidParameter`."""
    params, count = as_params(params), as_integer("n", n, 1)
    if count > limit:
        raise InvalidParameter("n", f"{count} exceeds the engine's max_n={limit}")
    if params.seed is None:
        return [params] * count
    return [params.replace(seed=sample_seed(params.seed, index)) for index in range(count)]


def _plain_id(token: Any) -> Any:
    """A token id of any integer type (numpy's, torch's) as an `int`; any other value unchanged."""
    if type(token) is int or isinstance(token, bool):
        return token
    try:
        return operator.index(token)
    except (TypeError, ValueError, RuntimeError):  # torch raises RuntimeError for tensors of several elements
        return token
