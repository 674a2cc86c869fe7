"""Fields that OpenAI's chats and text completions share, with what vLLM and llama.cpp add to them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from asyncengine.errors import GrammarError, InvalidParameter
from asyncengine.grammar import Grammar
from asyncengine.options import rough_size
from asyncengine.serve.fields import Fields
from asyncengine.serve.turn import Turn

SAMPLING = {
    name: name
    for name in (
        "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "n", "min_tokens",
        "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "ignore_eos",
        "skip_special_tokens",
    )
} | {"include_stop_str_in_output": "include_stop"}  # fmt: skip
"""Fields that mean to the engine what they mean here; those that OpenAI lacks have vLLM's names."""
OPTIONS = ("priority", "prediction", "timeout", "cache_salt")
WITHOUT_MEANING = (
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
    "prompt_cache_options", "verbosity", "web_search_options", "moderation", "request_id", "cache_prompt", "id_slot",
    "guided_decoding_backend", "spaces_between_special_tokens",
)  # fmt: skip
"""Fields on which nothing here depends."""
REFUSED: Mapping[str, tuple[str, tuple[object, ...]]] = {
    "use_beam_search": ("beams are not searched here", (False,)),
    "length_penalty": ("belongs to beam search, which is not done here", (1,)),
    "early_stopping": ("belongs to beam search, which is not done here", (False,)),
    "truncate_prompt_tokens": ("prompts are never cut: send fewer tokens", ()),
    "allowed_token_ids": ("tokens are allowed by a grammar: guided_regex or guided_choice", ()),
    "bad_words": ("words are forbidden by logit_bias, token by token", ([],)),
    "logits_processors": ("code is not taken from requests", ([],)),
    "chat_template": ("comes with the model, never with a request", ()),
    "guided_whitespace_pattern": ("blanks in JSON are as the grammar has them", ()),
}
"""Fields that are known and not served, why, and the values that mean what is done anyway."""
MAX_GRAMMAR = 1 << 20
"""Characters of a grammar; so many lie below every engine's own limit."""

Maker = Callable[[Any], Grammar | None]
STRUCTURED: Mapping[str, Maker] = {
    "json": Grammar.json_schema,
    "regex": Grammar.regex,
    "choice": Grammar.choice,
    "grammar": Grammar.ebnf,
    "json_object": lambda wanted: Grammar.json_object() if wanted is True else None,
}
"""Parts of vLLM's `structured_outputs`."""
GUIDES: Mapping[str, Maker] = {
    "guided_json": Grammar.json_schema,
    "guided_regex": Grammar.regex,
    "guided_choice": Grammar.choice,
    "guided_grammar": Grammar.ebnf,
    "json_schema": Grammar.json_schema,
    "grammar": Grammar.ebnf,
}
"""vLLM's older names, then llama.cpp's."""


def read_common(fields: Fields, turn: Turn) -> None:
    """Read into `turn` what both kinds of completions have. Raises `InvalidParameter` naming the field."""
    turn.params |= fields.some(SAMPLING)
    turn.options |= fields.some(OPTIONS)
    turn.grammar = grammar(fields)
    read_stream_options(fields, turn)
    turn.extra["return_ids"] = fields.switch("return_token_ids")
    turn.extra["token_ids"] = turn.extra["return_ids"]
    for name, (why, neutral) in REFUSED.items():
        value = fields.take(name)
        if value is not None and value not in neutral:
            raise InvalidParameter(name, f"is not served: {why}", value)
    fields.ignore(*WITHOUT_MEANING)


def grammar(fields: Fields) -> Callable[[], Grammar] | None:
    """The maker of the grammar that a request asks for: making a long one takes a while. None: none is asked for."""
    given = {name: (make, value) for name, make in GUIDES.items() if (value := fields.take(name)) is not None}
    structured = fields.inner("structured_outputs")
    for name, make in STRUCTURED.items():
        if value := structured.take(name):
            given[f"structured_outputs.{name}"] = (make, value)
    structured.ignore("disable_fallback", "disable_any_whitespace", "disable_additional_properties")
    structured.end()
    if not given:
        return None
    if len(given) > 1:
        first, second = list(given)[:2]
        raise InvalidParameter(second, f"cannot go with {first}: one grammar holds an answer")
    ((name, (make, value)),) = given.items()
    if rough_size(value, MAX_GRAMMAR) > MAX_GRAMMAR:
        raise InvalidParameter(name, f"has more than {MAX_GRAMMAR} characters")

    def made() -> Grammar:
        try:
            found = make(value)
        except GrammarError as error:
            raise GrammarError(name, error.limit, error.value) from None
        if found is None:
            raise InvalidParameter(name, "must be true", value)
        return found

    return made


def read_stream_options(fields: Fields, turn: Turn) -> None:
    """Whether a stream tells its usage at its end (`stream_options`)."""
    inner = fields.inner("stream_options")
    turn.extra["usage"] = inner.switch("include_usage")
    inner.ignore("include_obfuscation", "continuous_usage_stats")
    inner.end()
