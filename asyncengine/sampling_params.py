"""Sampling parameters of one request. Plain, frozen, validated on construction.

Semantics follow the field (vLLM, SGLang, Hugging Face `generate`); where they differ the docstring says which.
Limits that depend on the engine (context, vocabulary, number of stop strings) are checked at submit.
"""

from __future__ import annotations

import functools
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Annotated, Any, Literal, get_args, get_type_hints

from asyncengine.checks import (
    MAX_COUNT,
    MIN_INT64,
    Count,
    Settings,
    as_integer,
    as_items,
    as_number,
    integer_in,
    number_in,
)
from asyncengine.errors import InvalidParameter

OnBudget = Literal["close", "offer", "truncate", "error"]
CLOSED: tuple[OnBudget, ...] = ("close", "offer")
"""The values with which the engine completes an output whose budget runs out."""

GREEDY_BELOW = 1e-5
"""A temperature below it is taken as 0 (as in vLLM): nothing but the likeliest token is ever drawn there."""
MAX_TEMPERATURE = 1e6
"""Any two tokens are equally likely long before it."""
REPETITION_PENALTY = 1e-3, 1e3
"""Logits times or divided by these, then by any temperature, stay far inside float32."""
MAX_PENALTY = 2.0
OPEN_PARAMETERS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Fields of `SamplingParams` that a request may leave open: the model has defaults of them."""
MAX_BIAS = 100.0
MAX_SEED = 2**64 - 1
LOOP = "loop"
"""Marks a parameter, in its field's type behind its check, that only the engine's loop reads. All others are part of
steps: where what computes these does not know one (`ModelInfo.sampling_parameters`), it is refused by name."""
READS_OUTPUT = "reads output"
"""Marks one that reads the tokens before: nothing is guessed ahead, and no step is launched before all are here."""
OFFERED = "offered"
"""Marks one for which the command has a flag of its name and, if it is part of steps, HTTP requests a field."""


def _texts(name: str, value: Any) -> tuple[str, ...]:
    """A check: a str is one text."""
    texts = (value,) if isinstance(value, str) else as_items(name, value)
    for item in texts:
        if not isinstance(item, str) or not item:
            noun = "stop string" if name == "stop" else "word"
            raise InvalidParameter(name, f"each {noun} must be a non-empty str", item)
    return texts


def _token_ids(name: str, value: Any) -> tuple[int, ...]:
    """A check of a sequence of token ids."""
    return tuple(as_integer(name, item, 0) for item in as_items(name, value))


def _layers(name: str, value: Any) -> tuple[int, ...]:
    """A check of layers by number; "last" is the last of them, None no layer."""
    named = (-1,) if isinstance(value, str) and value == "last" else () if value is None else value
    return tuple(as_integer(name, item, -MAX_COUNT) for item in as_items(name, named))


def _callables(name: str, value: Any) -> tuple[Any, ...]:
    """A check of functions; one alone is a sequence of one, and a class is none."""
    functions = tuple((value,) if callable(value) else as_items(name, value))
    for item in functions:
        if not callable(item) or isinstance(item, type):
            raise InvalidParameter(name, "must be functions of the prompt's ids, the output's ids and the logits", item)
    return functions


def _vectors(name: str, value: Any) -> dict[int, array[float]]:
    """A check of vectors by layer."""
    if not isinstance(value, Mapping):
        raise InvalidParameter(name, "must map layers to vectors", value)
    try:
        vectors = {as_integer(name, layer, 1): array("f", vector) for layer, vector in value.items()}
    except TypeError as error:
        raise InvalidParameter(name, f"must map layers to sequences of numbers ({error})") from None
    if not all(isfinite(sum(vector)) for vector in vectors.values()):
        raise InvalidParameter(name, "must have finite numbers")
    return vectors


def _bias(name: str, value: Any) -> dict[int, float]:
    """A check of what `logit_bias` maps; None: nothing."""
    mapping = {} if value is None else value
    if not isinstance(mapping, Mapping):
        raise InvalidParameter(name, "must map token ids to numbers", mapping)
    # JSON object keys are strings: "17" means 17
    texts = [key for key in mapping if isinstance(key, str)]
    if wrong := [key for key in texts if not (key.isascii() and key.isdigit() and len(key) < 20)]:
        raise InvalidParameter(name, "must have token ids as names", ", ".join(wrong))
    ids = {key: as_integer(name, int(key) if isinstance(key, str) else key, 0) for key in mapping}
    return {ids[key]: as_number(f"{name}[{ids[key]}]", added, -MAX_BIAS, MAX_BIAS) for key, added in mapping.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams(Settings):
    """Sampling parameters of one request.

    Defaults sample from the model's own distribution (`temperature=1`); `temperature=0` is greedy. A parameter left
    at `None` takes the engine's `sampling_defaults`, then the model's `generation_config`; where that says nothing of
    sampling either, a chat takes `ModelInfo.chat_defaults`, and a text (`generate`, `stream`) the neutral value.

    Raises `InvalidParameter` naming the field for anything malformed, non-finite or out of range.
    """

    max_tokens: Annotated[Count, LOOP, OFFERED] | None = None
    """Most tokens to generate (>= 1). `None`: up to the model's context length. 0 with `prompt_logprobs`: the prompt is
    scored and nothing generated."""
    min_tokens: Annotated[Count, OFFERED] = 0
    """End-of-sequence and stop ids are masked, stop strings ignored, before this many tokens."""
    temperature: Annotated[float, number_in(0.0, MAX_TEMPERATURE), OFFERED] | None = None
    """0 is greedy, and so is what lies below `GREEDY_BELOW`. Logits are divided by it; at most `MAX_TEMPERATURE`."""
    top_p: Annotated[float, number_in(0.0, 1.0, exclusive_low=True), OFFERED] | None = None
    """Nucleus: the smallest set of tokens whose probability reaches it, in (0, 1] (Holtzman et al. 2020)."""
    top_k: Annotated[int, integer_in(-1), OFFERED] | None = None
    """Keep the k likeliest tokens; 0 or -1 keeps all."""
    min_p: Annotated[float, number_in(0.0, 1.0), OFFERED] | None = None
    """Drop tokens less likely than `min_p` times the likeliest, in [0, 1]."""
    seed: Annotated[int, integer_in(MIN_INT64, MAX_SEED), OFFERED] | None = None
    """Same seed, same prompt, same parameters: same tokens in any batch. From -2**63 to 2**64-1; `None`: a fresh
    random one."""
    stop: Annotated[Sequence[str], _texts, LOOP, OFFERED] = ()
    """Strings that end the text; they are not part of it unless `include_stop`."""
    stop_token_ids: Annotated[Sequence[int], _token_ids, LOOP, OFFERED] = ()
    """Token ids that end the output, besides the model's end-of-sequence ids."""
    include_stop: Annotated[bool, LOOP] = False
    """Keep the stop string in the text."""
    ignore_eos: Annotated[bool, LOOP, OFFERED] = False
    """Generate on past end-of-sequence ids (for benchmarks)."""
    n: Annotated[int, integer_in(1), LOOP] = 1
    """Number of independent samples for the prompt; they share the prompt's pages. All or nothing at submit."""
    repetition_penalty: Annotated[float, number_in(*REPETITION_PENALTY), OFFERED] | None = None
    """Divides positive and multiplies negative logits of tokens seen in prompt or output (Keskar et al. 2019); in
    [0.001, 1000]."""
    presence_penalty: Annotated[float, number_in(-MAX_PENALTY, MAX_PENALTY), OFFERED] = 0.0
    """Subtracted once from the logits of tokens already in the output, in [-2, 2]."""
    frequency_penalty: Annotated[float, number_in(-MAX_PENALTY, MAX_PENALTY), OFFERED] = 0.0
    """Subtracted per occurrence in the output, in [-2, 2]."""
    logit_bias: Annotated[Mapping[int, float], _bias] = field(default_factory=dict)
    """Token id -> value added to its logit, in [-100, 100]."""
    allowed_token_ids: Annotated[Sequence[int], _token_ids, LOOP] | None = None
    """The only tokens that the output may have; end-of-sequence ids are none of them unless they are named. Cannot go
    with a grammar (vLLM's parameter of this name)."""
    bad_words: Annotated[Sequence[str], _texts, LOOP] = ()
    """Texts whose tokens the output may not complete, with a blank before them or without (vLLM's parameter of this
    name). What a grammar leaves no choice about comes all the same. Cannot go with `allowed_token_ids`."""
    logits_processors: Annotated[Sequence[Any], _callables, READS_OUTPUT] = ()
    """Functions of (prompt ids, output ids, logits float32 [vocab]) that return the logits to draw from, called one
    after the other on the engine's thread before each token, behind penalties and bias and before masks. On a CPU, and
    nothing is guessed ahead. One that raises ends its request (vLLM's parameter of this name)."""
    logprobs: bool = False
    """Return the log-probability of each output token under the model's own distribution
    (before penalties, bias, temperature and truncation; vLLM's `raw_logprobs`)."""
    top_logprobs: Count = 0
    """Also return the k likeliest alternatives at each position; implies `logprobs`."""
    logprob_token_ids: Annotated[Sequence[int], _token_ids] = ()
    """Return those of these tokens at each position of the output, in this order, in the place of the likeliest;
    implies `logprobs` (vLLM's parameter of this name). As many as `top_logprobs` may be."""
    logprobs_of: Literal["model", "sampled"] = "model"
    """The distribution of `logprobs`: the model's own, or the one that tokens were drawn from (after penalties, bias,
    masks, temperature and truncation; implies `logprobs`). A greedy choice has 0 in the latter. Prompts are scored by
    the model's own."""
    prompt_logprobs: bool = False
    """Return the log-probability of each prompt token but the first (the prompt is computed without cache hits as far
    as it is scored)."""
    prompt_logprobs_start: Count = 0
    """Score only prompt tokens from this position on, so that what lies before may come from the prefix cache; implies
    `prompt_logprobs`. At most the number of prompt tokens."""
    return_routed_experts: bool = False
    """Return the experts that each token went to in each layer of a mixture, for routing replay in a trainer. The
    prompt is computed without cache hits, as tokens that come from the cache went through no router."""
    routed_experts_start: Count = 0
    """Return them only from this position on, so that what lies before may come from the prefix cache; implies
    `return_routed_experts`. At most the number of prompt tokens."""
    return_hidden_states: Annotated[Sequence[int], _layers] = ()
    """Return what these layers make of each token, on a CPU: 0 is what the first layer reads, 1 what it gives, and -1,
    or "last" for it alone, what the output layer reads. The prompt is computed without cache hits."""
    hidden_states_start: Count = 0
    """Return them only from this position on, so that what lies before may come from the prefix cache. At most the
    number of prompt tokens."""
    steering_vectors: Annotated[Mapping[int, Sequence[float]], _vectors] = field(default_factory=dict)
    """Layer -> numbers [width] added to what it gives for each token of prompt and output, on a CPU; layers count from
    1, as the hidden states of transformers do (activation addition, Turner et al. 2023)."""
    grammar: Annotated[Any, LOOP] = None
    """A grammar from `asyncengine.grammar` that the output must match."""
    on_budget: Annotated[OnBudget, LOOP] = "close"
    """The way in which a constrained output ends when its budget runs out. "close": the engine closes it and says from
    where on; a tool call that it closed is a broken one. "offer": it closes it and offers that as the model's own.
    "truncate": it is cut. "error": the request fails."""
    skip_special_tokens: Annotated[bool, LOOP] = True
    """Leave special tokens out of the text."""

    def __post_init__(self) -> None:
        scored = self.prompt_logprobs is not False or as_integer("prompt_logprobs_start", self.prompt_logprobs_start, 0)
        if self.max_tokens is not None and not scored:
            as_integer("max_tokens", self.max_tokens, 1)
        Settings.__post_init__(self)  # `super()` does not find its class in a dataclass with slots
        if self.top_logprobs or self.logprob_token_ids or self.logprobs_of == "sampled":
            object.__setattr__(self, "logprobs", True)
        if self.prompt_logprobs_start:
            object.__setattr__(self, "prompt_logprobs", True)
        if self.routed_experts_start:
            object.__setattr__(self, "return_routed_experts", True)
        if self.return_routed_experts and self.return_hidden_states:
            raise InvalidParameter("return_hidden_states", "cannot go with return_routed_experts")
        if self.max_tokens == 0 and self.n != 1:
            raise InvalidParameter("n", "must be 1 where max_tokens is 0: there is nothing to sample", self.n)
        if self.max_tokens == 0 and self.grammar is not None:
            raise InvalidParameter("grammar", "has nothing to constrain where max_tokens is 0")
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise InvalidParameter("allowed_token_ids", "must name a token, or be None")
        if self.allowed_token_ids and (self.grammar is not None or self.bad_words):
            raise InvalidParameter("allowed_token_ids", "cannot go with a grammar or bad_words")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidParameter("min_tokens", f"must not exceed max_tokens={self.max_tokens}", self.min_tokens)

    @classmethod
    @functools.cache
    def declared(cls) -> dict[str, set[str]]:
        """Name -> the marks of that parameter (`LOOP`, `READS_OUTPUT`, `OFFERED`)."""
        declared_marks = {}
        for name, hint in get_type_hints(cls, include_extras=True).items():
            marks = {mark for annotation in (hint, *get_args(hint)) for mark in getattr(annotation, "__metadata__", ())}
            declared_marks[name] = marks & {LOOP, READS_OUTPUT, OFFERED}
        return declared_marks

    @classmethod
    @functools.cache
    def _of_steps(cls) -> list[tuple[str, Any, set[str]]]:
        default = cls()
        return [(name, getattr(default, name), marks) for name, marks in cls.declared().items() if LOOP not in marks]

    def asked(self) -> dict[str, set[str]]:
        """Marks of the parameters of steps that differ from their defaults, by name."""
        return {name: marks for name, default, marks in self._of_steps() if getattr(self, name) != default}

    @property
    def traced_from(self) -> int | None:
        """First position whose experts or hidden states are asked for; None: neither are."""
        experts = self.routed_experts_start if self.return_routed_experts else None
        return self.hidden_states_start if self.return_hidden_states else experts


def as_params(value: object) -> SamplingParams:
    """A request's sampling parameters; the defaults for None. Raises `InvalidParameter` for anything else."""
    if value is None:
        return SamplingParams()
    if not isinstance(value, SamplingParams):
        raise InvalidParameter("params", "must be a SamplingParams", value)
    return value
