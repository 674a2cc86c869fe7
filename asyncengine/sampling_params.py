"""Sampling parameters of one request. Plain, frozen, validated on construction.

Semantics follow the field (vLLM, SGLang, Hugging Face `generate`); where they differ the docstring says which.
Limits that depend on the engine (context, vocabulary, number of stop strings) are checked at submit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from asyncengine.checks import MAX_COUNT, MIN_INT64, as_integer, as_items, as_number, check_known, knows_its_fields
from asyncengine.errors import InvalidParameter

OnBudget = Literal["close", "truncate", "error"]

GREEDY_BELOW = 1e-5
"""A temperature below it is taken as 0 (as in vLLM): nothing but the likeliest token is ever drawn there."""
MAX_TEMPERATURE = 1e6
"""Any two tokens are equally likely long before it."""
MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 1e-3, 1e3
"""Logits times or divided by these, then by any temperature, stay far inside float32."""
MAX_PENALTY = 2.0
MAX_BIAS = 100.0
MAX_SEED = 2**64 - 1


@knows_its_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling parameters of one request.

    Defaults sample from the model's own distribution (`temperature=1`); `temperature=0` is greedy. A parameter left
    at `None` takes the model's `generation_config` default where it has one, else the neutral value.

    Raises `InvalidParameter` naming the field for anything malformed, non-finite or out of range.
    """

    max_tokens: int | None = None
    """Most tokens to generate (>= 1). `None`: up to the model's context length. 0 with `prompt_logprobs`: the prompt is
    scored and nothing generated."""
    min_tokens: int = 0
    """End-of-sequence and stop ids are masked, stop strings ignored, before this many tokens."""
    temperature: float | None = None
    """0 is greedy, and so is what lies below `GREEDY_BELOW`. Logits are divided by it; at most `MAX_TEMPERATURE`."""
    top_p: float | None = None
    """Nucleus: the smallest set of tokens whose probability reaches it, in (0, 1] (Holtzman et al. 2020)."""
    top_k: int | None = None
    """Keep the k likeliest tokens; 0 or -1 keeps all."""
    min_p: float = 0.0
    """Drop tokens less likely than `min_p` times the likeliest, in [0, 1]."""
    seed: int | None = None
    """Same seed, same prompt, same parameters: same tokens in any batch. From -2**63 to 2**64-1; `None`: a fresh
    random one."""
    stop: Sequence[str] = ()
    """Strings that end the text; they are not part of it unless `include_stop`."""
    stop_token_ids: Sequence[int] = ()
    """Token ids that end the output, besides the model's end-of-sequence ids."""
    include_stop: bool = False
    """Keep the stop string in the text."""
    ignore_eos: bool = False
    """Generate on past end-of-sequence ids (for benchmarks)."""
    n: int = 1
    """Number of independent samples for the prompt; they share the prompt's pages. All or nothing at submit."""
    repetition_penalty: float | None = None
    """Divides positive and multiplies negative logits of tokens seen in prompt or output (Keskar et al. 2019); in
    [0.001, 1000]."""
    presence_penalty: float = 0.0
    """Subtracted once from the logits of tokens already in the output, in [-2, 2]."""
    frequency_penalty: float = 0.0
    """Subtracted per occurrence in the output, in [-2, 2]."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Token id -> value added to its logit, in [-100, 100]."""
    logprobs: bool = False
    """Return the log-probability of each output token under the model's own distribution
    (before penalties, bias, temperature and truncation; vLLM's `raw_logprobs`)."""
    top_logprobs: int = 0
    """Also return the k likeliest alternatives at each position; implies `logprobs`."""
    prompt_logprobs: bool = False
    """Return the log-probability of each prompt token but the first (the prompt is computed without cache hits)."""
    grammar: Any = None
    """A grammar from `asyncengine.grammar` that the output must match."""
    on_budget: OnBudget = "close"
    """The way in which a constrained output ends when its budget runs out."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""

    def __post_init__(self) -> None:
        self._check_integers()
        self._check_numbers()
        self._check_stops()
        self._check_logit_bias()
        for name in ("include_stop", "ignore_eos", "logprobs", "prompt_logprobs", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidParameter(name, "must be True or False", getattr(self, name))
        if not isinstance(self.on_budget, str) or self.on_budget not in ("close", "truncate", "error"):
            raise InvalidParameter("on_budget", "must be 'close', 'truncate' or 'error'", self.on_budget)
        if self.top_logprobs and not self.logprobs:
            self._set("logprobs", True)
        if self.max_tokens == 0 and self.n != 1:
            raise InvalidParameter("n", "must be 1 where max_tokens is 0: there is nothing to sample", self.n)
        if self.max_tokens == 0 and self.grammar is not None:
            raise InvalidParameter("grammar", "has nothing to constrain where max_tokens is 0")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidParameter("min_tokens", f"must not exceed max_tokens={self.max_tokens}", self.min_tokens)

    def _check_integers(self) -> None:
        least = 0 if self.prompt_logprobs is True else 1
        ranges = (
            ("max_tokens", least, MAX_COUNT), ("min_tokens", 0, MAX_COUNT), ("top_k", -1, MAX_COUNT),
            ("seed", MIN_INT64, MAX_SEED), ("n", 1, MAX_COUNT), ("top_logprobs", 0, MAX_COUNT),
        )  # fmt: skip
        for name, low, high in ranges:
            value = getattr(self, name)
            if value is not None or name not in _OPTIONAL:
                self._set(name, as_integer(name, value, low, high))

    def _check_numbers(self) -> None:
        ranges = (
            ("temperature", 0.0, MAX_TEMPERATURE), ("top_p", 0.0, 1.0), ("min_p", 0.0, 1.0),
            ("repetition_penalty", MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY),
            ("presence_penalty", -MAX_PENALTY, MAX_PENALTY), ("frequency_penalty", -MAX_PENALTY, MAX_PENALTY),
        )  # fmt: skip
        for name, low, high in ranges:
            value = getattr(self, name)
            if value is not None or name not in _OPTIONAL:
                self._set(name, as_number(name, value, low, high, exclusive_low=name == "top_p"))

    def _check_stops(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else as_items("stop", self.stop)
        for item in stop:
            if not isinstance(item, str) or not item:
                raise InvalidParameter("stop", "each stop string must be a non-empty str", item)
        self._set("stop", stop)
        ids = as_items("stop_token_ids", self.stop_token_ids)
        self._set("stop_token_ids", tuple(as_integer("stop_token_ids", item, 0) for item in ids))

    def _check_logit_bias(self) -> None:
        given = {} if self.logit_bias is None else self.logit_bias
        if not isinstance(given, Mapping):
            raise InvalidParameter("logit_bias", "must map token ids to numbers", given)
        bias: dict[int, float] = {}
        for key, value in given.items():
            token_id = as_integer("logit_bias", _json_key(key), 0)
            bias[token_id] = as_number(f"logit_bias[{token_id}]", value, -MAX_BIAS, MAX_BIAS)
        self._set("logit_bias", bias)

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SamplingParams:
        """Build from loose keywords; an unknown name is refused with the nearest known one."""
        check_known(values, [f.name for f in fields(cls)])
        return cls(**values)

    def replace(self, **changes: Any) -> SamplingParams:
        """A copy with some fields changed, validated like a new one."""
        return replace(self, **changes)


def as_params(value: object) -> SamplingParams:
    """A request's sampling parameters; the defaults for None. Raises `InvalidParameter` for anything else."""
    if value is None:
        return SamplingParams()
    if not isinstance(value, SamplingParams):
        raise InvalidParameter("params", "must be a SamplingParams", value)
    return value


_OPTIONAL = ("max_tokens", "top_k", "seed", "temperature", "top_p", "repetition_penalty")


def _json_key(key: Any) -> Any:
    """JSON object keys are strings: "17" means 17."""
    return int(key) if isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 20 else key
