"""What a caller may ask of one request's sampling. Plain, frozen, validated on construction.

Semantics follow the field (vLLM, SGLang, Hugging Face `generate`); where they differ the docstring says which.
Limits that depend on the engine (context, vocabulary, number of stop strings) are checked at submit.
"""

from __future__ import annotations

import difflib
import math
import numbers
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from asyncengine.errors import InvalidParameter

OnBudget = Literal["close", "truncate", "error"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling parameters of one request.

    Defaults sample from the model's own distribution (`temperature=1`); `temperature=0` is greedy. A parameter left
    at `None` takes the model's `generation_config` default where it has one, else the neutral value.

    Raises `InvalidParameter` naming the field for anything malformed, non-finite or out of range.
    """

    max_tokens: int | None = None
    """Most tokens to generate (>= 1). `None`: up to the model's context length."""
    min_tokens: int = 0
    """End-of-sequence and stop ids are masked, stop strings ignored, before this many tokens."""
    temperature: float | None = None
    """0 is greedy. Logits are divided by it."""
    top_p: float | None = None
    """Nucleus: the smallest set of tokens whose probability reaches it, in (0, 1] (Holtzman et al. 2020)."""
    top_k: int | None = None
    """Keep the k likeliest tokens; 0 or -1 keeps all."""
    min_p: float = 0.0
    """Drop tokens less likely than `min_p` times the likeliest, in [0, 1]."""
    seed: int | None = None
    """Same seed, same prompt, same parameters: same tokens in any batch. `None`: a fresh random seed."""
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
    """> 0; divides positive and multiplies negative logits of tokens seen in prompt or output (Keskar et al. 2019)."""
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
    """What a constrained output does when its budget runs out."""
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
        if self.on_budget not in ("close", "truncate", "error"):
            raise InvalidParameter("on_budget", "must be 'close', 'truncate' or 'error'", self.on_budget)
        if self.top_logprobs and not self.logprobs:
            object.__setattr__(self, "logprobs", True)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidParameter("min_tokens", f"must not exceed max_tokens={self.max_tokens}", self.min_tokens)

    def _check_integers(self) -> None:
        _integer("max_tokens", self.max_tokens, 1, None, optional=True)
        _integer("min_tokens", self.min_tokens, 0, None)
        _integer("top_k", self.top_k, -1, None, optional=True)
        _integer("seed", self.seed, -(2**63), 2**64 - 1, optional=True)
        _integer("n", self.n, 1, None)
        _integer("top_logprobs", self.top_logprobs, 0, None)

    def _check_numbers(self) -> None:
        _number("temperature", self.temperature, 0.0, None, optional=True)
        _number("top_p", self.top_p, 0.0, 1.0, optional=True, exclusive_low=True)
        _number("min_p", self.min_p, 0.0, 1.0)
        _number("repetition_penalty", self.repetition_penalty, 0.0, None, optional=True, exclusive_low=True)
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)

    def _check_stops(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else _items("stop", self.stop)
        for item in stop:
            if not isinstance(item, str) or not item:
                raise InvalidParameter("stop", "each stop string must be a non-empty str", item)
        object.__setattr__(self, "stop", stop)
        ids = _items("stop_token_ids", self.stop_token_ids)
        for item in ids:
            _integer("stop_token_ids", item, 0, None)
        object.__setattr__(self, "stop_token_ids", ids)

    def _check_logit_bias(self) -> None:
        if not isinstance(self.logit_bias or {}, Mapping):
            raise InvalidParameter("logit_bias", "must map token ids to numbers", self.logit_bias)
        bias: dict[int, float] = {}
        for key, value in (self.logit_bias or {}).items():
            token_id = _json_key(key)
            _integer("logit_bias", token_id, 0, None)
            _number(f"logit_bias[{token_id}]", value, -100.0, 100.0)
            bias[token_id] = float(value)
        object.__setattr__(self, "logit_bias", bias)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SamplingParams:
        """Build from loose keywords; an unknown name is refused with the nearest known one."""
        check_known(values, [f.name for f in fields(cls)])
        return cls(**values)

    def replace(self, **changes: Any) -> SamplingParams:
        """A copy with some fields changed, validated like a new one."""
        check_known(changes, [f.name for f in fields(self)])
        return replace(self, **changes)


def check_known(values: Mapping[str, Any], known: Sequence[str]) -> None:
    """Refuse the first name in `values` that is not in `known`, suggesting the nearest one."""
    for name in values:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise InvalidParameter(name, f"unknown parameter{hint}")


def _json_key(key: Any) -> Any:
    """JSON object keys are strings: "17" means 17."""
    return int(key) if isinstance(key, str) and key.isdigit() else key


def _items(name: str, value: object) -> tuple[Any, ...]:
    if value is None:
        return ()
    if not isinstance(value, Iterable) or isinstance(value, Mapping):
        raise InvalidParameter(name, "must be a sequence", value)
    return tuple(value)


def _integer(name: str, value: object, low: int, high: int | None, *, optional: bool = False) -> None:
    if value is None and optional:
        return
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise InvalidParameter(name, "must be an integer" + (" or None" if optional else ""), value)
    if int(value) < low or (high is not None and int(value) > high):
        bound = f">= {low}" if high is None else f"between {low} and {high}"
        raise InvalidParameter(name, f"must be {bound}", value)


def _number(
    name: str,
    value: object,
    low: float,
    high: float | None,
    *,
    optional: bool = False,
    exclusive_low: bool = False,
) -> None:
    if value is None and optional:
        return
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise InvalidParameter(name, "must be a number" + (" or None" if optional else ""), value)
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise InvalidParameter(name, "must be finite", value)
    too_low = number <= low if exclusive_low else number < low
    if too_low or (high is not None and number > high):
        above = f"> {low:g}" if exclusive_low else f">= {low:g}"
        raise InvalidParameter(name, f"must be {above}" + ("" if high is None else f" and <= {high:g}"), value)
