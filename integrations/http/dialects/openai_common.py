"""Fields that OpenAI's chats and text completions share, with what vLLM and llama.cpp add to them, and their frames."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from asyncengine.checks import as_integer
from asyncengine.errors import GrammarError, InvalidParameter
from asyncengine.grammar import Grammar
from asyncengine.integrations.http.dialects import EVENT_STREAM
from asyncengine.integrations.http.dialects.openai_shape import openai_usage, timings_fields
from asyncengine.integrations.http.fields import TABLES, Fields, Values
from asyncengine.integrations.http.problems import Problem
from asyncengine.integrations.http.turn import ALL, Answered, Turn
from asyncengine.options import rough_size
from asyncengine.outputs import Completion, LogprobEntry, Usage
from asyncengine.step import TokenLogprob

MAX_GRAMMAR = 1 << 20
"""Most characters of a grammar, which are below every engine's own limit."""

Maker = Callable[[Any], Grammar | None]
GUIDES: Mapping[str, Maker] = {
    **dict.fromkeys(("guided_json", "json_schema", "structured_outputs.json"), Grammar.json_schema),
    **dict.fromkeys(("guided_regex", "regex", "structured_outputs.regex"), Grammar.regex),
    **dict.fromkeys(("guided_grammar", "grammar", "ebnf", "structured_outputs.grammar"), Grammar.ebnf),
    **dict.fromkeys(("guided_choice", "structured_outputs.choice"), Grammar.choice),
    "structured_outputs.json_object": lambda wanted: Grammar.json_object() if wanted is True else None,
}
"""vLLM's, llama.cpp's and SGLang's fields for a grammar, with functions that make it of the field's value."""


def read_common(fields: Fields, table: str) -> tuple[Turn, Values]:
    """The turn of the fields that chats and texts share, and all values. Raises `InvalidParameter` naming the field."""
    options = fields.peek("stream_options")
    values = fields.read(TABLES[table])
    turn, chooses = Turn.of(values), table == "completions"
    if options is not None and not turn.stream:
        raise InvalidParameter("stream_options", "is for streams: needs stream=true", options)
    for group, name in ((turn.params, "top_logprobs"), (turn.extra, "logprobs"), (turn.extra, "prompt_logprobs")):
        if group.get(name) == -1:
            group[name] = ALL
    if turn.params.get("stop") in ("", []):
        del turn.params["stop"]
    samples = turn.params.get("n", 1)
    if (best_of := values["own"].get("best_of", samples)) != samples:
        if not chooses or turn.stream or best_of < as_integer("n", samples, 1):
            raise InvalidParameter("best_of", f"must be n, which is {samples}, or more for texts in one piece", best_of)
        turn.params["n"], turn.extra["chosen"] = best_of, samples
    turn.grammar = grammar(values["guide"])
    return turn, values


def grammar(guides: dict[str, Any]) -> Callable[[], Grammar] | None:
    """A function that makes the grammar of a request, which takes a while for a long one; None if it has none."""
    if guides.get("structured_outputs.json_object") is False:
        del guides["structured_outputs.json_object"]
    if not guides:
        return None
    (name, value), *more = guides.items()
    for second, _ in more:
        raise InvalidParameter(second, f"cannot go with {name}: one grammar holds an answer")
    if rough_size(value, MAX_GRAMMAR) > MAX_GRAMMAR:
        raise InvalidParameter(name, f"has more than {MAX_GRAMMAR} characters")

    def make() -> Grammar:
        try:
            result = GUIDES[name](value)
        except GrammarError as error:
            raise GrammarError(name, error.limit, error.value) from None
        if result is None:
            raise InvalidParameter(name, "must be true", value)
        return result

    return make


def max_tokens(limits: Mapping[str, Any], default: int | None = None) -> dict[str, Any]:
    """The most tokens to write, as `SamplingParams` names it, from any of its names; -1 sets no limit."""
    (name, value), *repeated = [*limits.items()] or [("max_tokens", default)]
    for alias, again in repeated:
        if repr(again) != repr(value):
            raise InvalidParameter(alias, f"is given twice, as {name} too, with another value", again)
    return {} if value is None or (value == -1 and type(value) is int) else {"max_tokens": value}


# -------------------------------------------------------------------- answers


def error(problem: Problem) -> dict[str, Any]:
    """OpenAI's error object."""
    types = {400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
    name = types.get(problem.status, "invalid_request_error" if problem.status < 500 else "server_error")
    return {"error": {"message": problem.message, "type": name, "param": problem.param, "code": problem.code}}


class Frames:
    """The frames of one answer, and the head of one that is sent whole."""

    media_type = EVENT_STREAM
    ping = ": still there\n\n"
    """A comment of the event stream, which clients ignore; it keeps proxies from closing the connection."""

    def __init__(self, prefix: str, type_name: str, turn: Turn, answered: Answered) -> None:
        """`prefix`: that of the answer's id. `type_name`: the field "object" of each frame."""
        extra = turn.extra
        self._usage, self._ids = bool(extra.get("usage")), bool(extra.get("return_ids"))
        self._usage_each, self._numbered = self._usage and bool(extra.get("usage_each")), bool(extra.get("numbered"))
        self._of_prompt: int | None = extra.get("prompt_logprobs")
        self._answered = answered
        self._id, self._type_name = prefix + answered.id, type_name
        # A frame is made for every token of every stream: all of it that stays the same is written once.
        self._before = "data: " + json.dumps(self.head(type_name), ensure_ascii=False)[:-1] + ', "choices": [{"index": '
        self._after = (', "usage": null' if self._usage else "") + "}\n\n"

    def head(self, type_name: str) -> dict[str, Any]:
        """The fields of an object of this type before its choices."""
        created, model = self._answered.created, self._answered.model
        return {"id": self._id, "object": type_name, "created": created, "model": model, "system_fingerprint": None}

    def frame(
        self, index: int, fields: str, token_ids: Sequence[int] = (), more: str = "", *, first: bool = False
    ) -> str:
        """The frame of a choice with these fields (JSON text without braces); `more` fields come behind the choices.
        `first`: the frame comes before the choice's first token."""
        ids = f', "token_ids": {list(token_ids)}' if self._ids else ""
        after = self._after
        if self._usage_each and (usage := self._answered.usage()) is not None:
            so_far = openai_usage(replace(usage, completion_tokens=0) if first else usage)
            after = f', "usage": {json.dumps(so_far)}}}\n\n'
        return f"{self._before}{index}, {fields}{ids}}}]{more}{after}"

    def measured(self, completion: Completion) -> dict[str, Any]:
        """The last fields of an answer that is sent whole."""
        usage = completion.usage
        return {"usage": openai_usage(usage), **timings_fields(usage, completion.timings)}

    def texts(self, ids: Sequence[int]) -> list[str]:
        """The tokens as texts, or as "token_id:7" (vLLM's `return_tokens_as_token_ids`)."""
        return [f"token_id:{token}" for token in ids] if self._numbered else self._answered.token_texts(ids)

    def labelled(self, entries: Sequence[LogprobEntry]) -> Sequence[LogprobEntry]:
        """Entries of log-probabilities whose tokens are such texts."""
        if not self._numbered:
            return entries
        return [replace(e, token=f"token_id:{e.token_id}", top=tuple(self.labelled(e.top))) for e in entries]

    def of_prompt(self, entries: Sequence[TokenLogprob | None]) -> list[dict[str, Any] | None] | None:
        """vLLM's form of a prompt's scores: by id, each token's own first; None where they are not asked for."""
        return None if self._of_prompt is None else [self._of_token(entry) for entry in entries]

    def _of_token(self, entry: TokenLogprob | None) -> dict[str, Any] | None:
        if entry is None:
            return None
        ranks: dict[int, tuple[int | None, float]] = {}
        ranks |= {token: (rank, logprob) for rank, (token, logprob) in enumerate(entry.top[: self._of_prompt], 1)}
        ranks = {entry.token_id: ranks.get(entry.token_id, (None, entry.logprob)), **ranks}
        texts = self._answered.token_texts(list(ranks))
        return {
            str(token): {"logprob": logprob, "rank": rank, "decoded_token": text}
            for (token, (rank, logprob)), text in zip(ranks.items(), texts, strict=True)
        }

    def end(self, usage: Usage) -> str:
        last = ""
        if self._usage:
            totals = {"choices": [], "usage": openai_usage(usage), **timings_fields(usage, self._answered.timings())}
            last = f"data: {json.dumps({**self.head(self._type_name), **totals})}\n\n"
        return last + "data: [DONE]\n\n"

    def failed(self, problem: Problem) -> str:
        return f"data: {json.dumps(error(problem))}\n\ndata: [DONE]\n\n"
