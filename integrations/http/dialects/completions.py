"""OpenAI's text completions: /v1/completions. Prompts and answers may be token ids, and prompts can be scored."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from math import inf
from statistics import fmean
from typing import Any

from asyncengine.checks import as_number
from asyncengine.errors import InvalidParameter
from asyncengine.integrations.http.dialects.openai_common import Frames, max_tokens, read_common
from asyncengine.integrations.http.events import End, Event, Text
from asyncengine.integrations.http.fields import Fields, Values
from asyncengine.integrations.http.turn import Answered, Turn
from asyncengine.outputs import Completion, LogprobEntry, Sample, Usage
from asyncengine.step import TokenLogprob

MAX_TOKENS = 16
"""Tokens to write where the request does not say, as OpenAI has it."""
MAX_SAMPLES = 2048
Scored = tuple[str, float | None, Mapping[str, float] | None]
"""A token's text and log-probability, and the log-probabilities of the likeliest texts and of itself; the first token
of a prompt has none."""


def read(fields: Fields) -> Turn:
    """The turn that a body asks for. Raises `InvalidParameter` naming the field."""
    turn, values = read_common(fields, "completions")
    turn.prompts = read_prompts(values["own"]["prompt"])
    samples = turn.params.get("n", 1)
    if isinstance(samples, int) and samples * len(turn.prompts) > MAX_SAMPLES:
        raise InvalidParameter("prompt", f"asks for more than {MAX_SAMPLES} samples: n of each prompt")
    turn.params |= max_tokens(values["limit"], MAX_TOKENS)
    top, of_prompt = turn.extra.get("logprobs"), turn.extra.get("prompt_logprobs")
    if named := turn.params.get("logprob_token_ids"):
        turn.extra["logprobs"] = max(top or 0, len(named))
    of_echo = bool(turn.extra.get("echo")) and (top is not None or turn.params.get("max_tokens") == 0)
    if of_prompt is not None and turn.stream:
        raise InvalidParameter("prompt_logprobs", "are not served in a stream")
    turn.params |= {
        "logprobs": "logprobs" in turn.extra or "chosen" in turn.extra,
        "top_logprobs": max(top or 0, of_prompt or 0),
        "prompt_logprobs": of_prompt is not None or of_echo,
    }
    fields.names["top_logprobs"] = "prompt_logprobs" if (of_prompt or 0) > (top or 0) else "logprobs"
    if values["own"].get("use_beam_search"):
        _read_beams(values, turn)
    elif "length_penalty" in values["own"]:
        fields.skip("length_penalty")
    return turn


def _read_beams(values: Values, turn: Turn) -> None:
    """Read the parameters of a beam search. Raises `InvalidParameter` for those that it does not heed."""
    parameters = {**turn.params, **values["guide"], "timeout": turn.options.get("timeout"), "stream": turn.stream}
    parameters |= {"best_of": "chosen" in turn.extra, "prediction": turn.options.get("prediction")}
    for name, value in parameters.items():
        if value and name not in ("n", "max_tokens") and (name, value) != ("temperature", 1):
            raise InvalidParameter(name, "cannot go with use_beam_search", value)
    turn.length_penalty = as_number("length_penalty", values["own"].get("length_penalty", 1.0), -99, 99)


def read_prompts(value: Any) -> list[str | list[int]]:
    """The prompts of a text, token ids, or a list of either. Raises `InvalidParameter`."""
    if isinstance(value, str) or (isinstance(value, list) and value and all(type(prompt) is int for prompt in value)):
        return [value]
    if not isinstance(value, list) or not value:
        raise InvalidParameter("prompt", "must be a text, token ids, or a list of either", value)
    for index, prompt in enumerate(value):
        if not isinstance(prompt, str) and not (isinstance(prompt, list) and all(type(item) is int for item in prompt)):
            raise InvalidParameter(f"prompt[{index}]", "must be a text or token ids", prompt)
    return value


class Writer(Frames):
    """Writes one answer: as a stream's frames, or whole."""

    def __init__(self, turn: Turn, answered: Answered) -> None:
        super().__init__("cmpl-", "text_completion", turn, answered)
        self._prompts, self._samples, self._cut = turn.prompts, turn.params.get("n", 1), turn.prompt_limit
        self._chosen = turn.extra.get("chosen", self._samples)
        self._echo, self._top = turn.extra.get("echo"), turn.extra.get("logprobs")
        self._offsets: dict[int, int] = {}
        """Characters of each choice whose logprobs were sent: the next token's `text_offset`."""
        self._begun: set[int] = set()
        """Choices whose prompt was sent, if prompts are asked for (`echo`, `return_token_ids`)."""

    def begin(self, _usage: Usage, samples: int = 1) -> str:
        """No frame yet: a prompt goes before its choice's first event, when its scores are known."""
        return ""

    def write(self, event: Event) -> str:
        before = ""
        if (self._echo or self._ids) and event.index not in self._begun:
            self._begun.add(event.index)
            # the prompt is a part of the text, or its ids are wanted
            of_prompt = self._answered.prompt_logprobs()[event.index // self._samples] if self._top is not None else ()
            scored = self._scored_prompt(event.index, of_prompt)
            before = self._choice_frame(event.index, self._prompt(event.index), scored, first=True)
        match event:
            case Text():
                scored = self._scored(event.logprobs)
                return before + self._choice_frame(event.index, event.text, scored, event.token_ids)
            case End():
                reason = "length" if event.reason == "timeout" else event.reason
                return before + self._choice_frame(event.index, "", reason=reason)
        return before

    def _choice_frame(
        self, index: int, text: str, scored: Sequence[Scored] = (), token_ids: Sequence[int] = (),
        reason: str | None = None, first: bool = False,
    ) -> str:  # fmt: skip
        logprobs = self._logprobs(index, scored) if scored else None
        fields = (
            f'"text": {json.dumps(text)}, "logprobs": {json.dumps(logprobs)}, "finish_reason": {json.dumps(reason)}'
        )
        if first and self._ids:
            fields += f', "prompt_token_ids": {list(self._prompt_ids(index))}'
        return self.frame(index, fields, token_ids, first=first)

    def whole(self, completion: Completion) -> dict[str, Any]:
        of_prompts, entries = list[list[TokenLogprob | None]](), completion.prompt_logprobs or []
        for ids in self._answered.prompts():
            of_prompts.append(entries[: len(ids)])
            entries = entries[len(ids) :]
        choices = [
            self._choice(index, sample, of_prompts[index // self._samples])
            for first in range(0, len(completion.samples), self._samples)
            for index, sample in self._best(completion.samples, first)
        ]
        numbered = [choice | {"index": number} for number, choice in enumerate(choices)]
        return {**self.head("text_completion"), "choices": numbered, **self.measured(completion)}

    def _best(self, samples: Sequence[Sample], first: int) -> list[tuple[int, Sample]]:
        """The (number, sample) pairs of one prompt that are returned: all, or the best by mean log-probability."""
        ranked = list(enumerate(samples[first : first + self._samples], first))
        if self._chosen < self._samples:
            ranked.sort(key=lambda numbered: -fmean([entry.logprob for entry in numbered[1].logprobs or ()] or [-inf]))
        return ranked[: self._chosen]

    def _choice(self, index: int, sample: Sample, of_prompt: list[TokenLogprob | None]) -> dict[str, Any]:
        logprobs = None
        if self._top is not None:
            before = self._scored_prompt(index, of_prompt)
            logprobs = self._logprobs(index, [*before, *self._scored(sample.logprobs or ())])
        reason = "length" if sample.finish_reason == "timeout" else sample.finish_reason
        text = self._prompt(index) + sample.text if self._echo else sample.text
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}
        ids = (list(self._prompt_ids(index)), list(sample.token_ids)) if self._ids else (None, None)
        choice |= {"prompt_logprobs": self.of_prompt(of_prompt), "prompt_token_ids": ids[0], "token_ids": ids[1]}
        return choice

    # ---------------------------------------------------------------- prompts

    def _prompt_ids(self, index: int) -> Sequence[int]:
        return self._answered.prompts()[index // self._samples]

    def _prompt(self, index: int) -> str:
        """The text of a choice's prompt, if the choice is to repeat it; else an empty one."""
        if not self._echo:
            return ""
        prompt = self._prompts[index // self._samples]
        return prompt if isinstance(prompt, str) and not self._cut else self._answered.text_of(self._prompt_ids(index))

    def _scored_prompt(self, index: int, entries: Sequence[TokenLogprob | None]) -> list[Scored]:
        if not self._echo or not entries:
            return []
        texts, scored = self.texts(self._prompt_ids(index)), list[Scored]()
        for text, entry in zip(texts, entries, strict=True):
            if entry is None:
                scored.append((text, None, None))
                continue
            alternatives = self.texts([token for token, _ in entry.top[: self._top]])
            pairs = zip(alternatives, [logprob for _, logprob in entry.top], strict=False)
            scored.append((text, entry.logprob, _by_text([*pairs, (text, entry.logprob)])))
        return scored

    def _scored(self, entries: Sequence[LogprobEntry]) -> list[Scored]:
        return [
            (entry.token, entry.logprob, _by_text([(e.token, e.logprob) for e in (*entry.top[: self._top], entry)]))
            for entry in self.labelled(entries)
        ]

    def _logprobs(self, index: int, scored: Sequence[Scored]) -> dict[str, Any]:
        """OpenAI's `logprobs` object of the next tokens of a choice."""
        tokens = [text for text, _, _ in scored]
        *offsets, self._offsets[index] = accumulate(map(len, tokens), initial=self._offsets.get(index, 0))
        logprobs, tops = [logprob for _, logprob, _ in scored], [top for _, _, top in scored]
        return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": offsets}


def _by_text(pairs: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Log-probabilities by text; of tokens with the same text, the likeliest."""
    best: dict[str, float] = {}
    for text, logprob in pairs:
        best[text] = max(logprob, best.get(text, logprob))
    return best
