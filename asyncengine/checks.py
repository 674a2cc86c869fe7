"""Checks of what a caller passes in: each returns the value in plain Python's type, or refuses it by name.

Whatever counts as a number is taken (numpy's too) and made an `int` or `float`: what is kept is what was checked. Every
number has a range, so that nothing later meets one that float32, int64 or a timer cannot hold.
"""

from __future__ import annotations

import difflib
import math
import numbers
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from asyncengine.errors import InvalidParameter

MAX_COUNT = 2**31 - 1
"""Largest number of anything, and largest token id: what an int32 holds."""
MAX_SECONDS = 1e9
"""Longest time limit, some 30 years: timers of every platform hold it."""
MAX_BYTES = 2**63 - 1
MIN_INT64, MAX_INT64 = -(2**63), 2**63 - 1

_ELSEWHERE = {
    "max_completion_tokens": "max_tokens", "max_new_tokens": "max_tokens", "max_output_tokens": "max_tokens",
    "num_predict": "max_tokens", "n_predict": "max_tokens", "min_new_tokens": "min_tokens",
    "do_sample": "temperature", "num_return_sequences": "n", "stop_sequences": "stop", "stop_strings": "stop",
    "eos_token_id": "stop_token_ids", "repeat_penalty": "repetition_penalty", "random_seed": "seed",
    "include_stop_str_in_output": "include_stop", "response_format": "grammar", "structured_outputs": "grammar",
    "chat_template_kwargs": "template_kwargs", "lora_request": "adapter", "torch_dtype": "dtype",
    "gpu_memory_utilization": "kv_cache_memory", "n_ctx": "max_model_len", "max_seq_len": "max_model_len",
    "context_length": "max_model_len", "n_threads": "num_threads", "enable_prefix_caching": "prefix_caching",
}  # fmt: skip
"""What transformers, vLLM, llama.cpp and OpenAI call things that have another name here."""
_LONGEST_GUESS = 64
"""Characters; a longer unknown name is no misspelling, and comparing it takes long."""


def check_unicode(name: str, text: str) -> None:
    """Refuse a text that UTF-8 cannot hold: one with lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidParameter(name, f"is not valid Unicode: {error.reason} at {error.start}") from error


def check_known(values: Mapping[str, Any], known: Sequence[str], elsewhere: Mapping[str, str] | None = None) -> None:
    """Refuse the first name in `values` that is not in `known`, suggesting the one that was meant. `elsewhere`: names
    that belong somewhere else, and what is to be said of them."""
    for name in values:
        if not isinstance(name, str):
            raise InvalidParameter("parameters", "must have names that are str", name)
        if name not in known:
            meant = _ELSEWHERE.get(name)
            if elsewhere is not None and (meant or name) in elsewhere:
                raise InvalidParameter(name, elsewhere[meant or name])
            near = difflib.get_close_matches(name, known, n=1) if len(name) <= _LONGEST_GUESS else []
            guess = meant if meant in known else next(iter(near), None)
            raise InvalidParameter(name, "unknown parameter" + (f"; did you mean {guess!r}?" if guess else ""))


def as_integer(name: str, value: object, low: int, high: int = MAX_COUNT) -> int:
    """An integer of any kind between `low` and `high`. Raises `InvalidParameter`."""
    number: int | None = _plain(value, numbers.Integral, int)
    if number is None:
        raise InvalidParameter(name, "must be an integer", value)
    if not low <= number <= high:
        bound = f"an integer >= {low}" if number < low and high >= MAX_COUNT else f"between {low} and {high}"
        raise InvalidParameter(name, f"must be {bound}", value)
    return number


def as_number(name: str, value: object, low: float, high: float, *, exclusive_low: bool = False) -> float:
    """A number of any kind in [low, high], or in (low, high]. Raises `InvalidParameter`."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise InvalidParameter(name, "must be a number", value)
    number: float | None = _plain(value, numbers.Real, float)
    if number is None or not math.isfinite(number):
        raise InvalidParameter(name, "must be finite", value)
    too_low = number <= low if exclusive_low else number < low
    if too_low or number > high:
        raise InvalidParameter(name, f"must be {'>' if exclusive_low else '>='} {low:g} and <= {high:g}", value)
    return number


def as_seconds(name: str, value: object) -> float:
    """A time limit in seconds, in (0, MAX_SECONDS]. Raises `InvalidParameter`."""
    number: float | None = _plain(value, numbers.Real, float)
    if number is None or not 0 < number <= MAX_SECONDS:
        raise InvalidParameter(name, f"must be a positive, finite number of seconds, at most {MAX_SECONDS:g}", value)
    return number


def as_items(name: str, value: object) -> tuple[Any, ...]:
    """The items of a sequence; none of None. Raises `InvalidParameter`."""
    if value is None:
        return ()
    if isinstance(value, Iterable) and not isinstance(value, Mapping):
        try:
            return tuple(value)
        except TypeError:  # an array of no dimension says it is iterable
            pass
    raise InvalidParameter(name, "must be a sequence", value)


def _plain(value: object, kind: type, convert: Any) -> Any:
    """`value` as `convert` makes it; None for what is not of this kind of number, or beyond what it can hold."""
    if isinstance(value, bool) or not isinstance(value, kind):
        return None
    try:
        return convert(value)
    except (ArithmeticError, ValueError, TypeError):
        return None
