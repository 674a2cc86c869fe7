"""Results that callers receive: stream chunks, completions, usage, timings. Plain frozen data, no behaviour."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from asyncengine.step import TokenLogprob

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

FinishReason = Literal["stop", "length", "tool_calls", "abort", "timeout", "error", "engine_dead"]
"""The closed set. Every stream ends exactly once with one of these; only its last chunk carries it."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one request (all its samples together)."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    """Prompt tokens whose keys and values came from the prefix cache."""
    reasoning_tokens: int = 0
    """The part of `completion_tokens` that a thinking model spent before its answer (chats only)."""
    accepted_prediction_tokens: int = 0
    """The part of `completion_tokens` that `prediction` foretold and that was computed several at a time."""
    rejected_prediction_tokens: int = 0
    """Tokens of `prediction` that were computed and did not come true. They are in no other count."""
    restored_tokens: int = 0
    """The part of `cached_tokens` that was read from a disk for this request (`kv_cache_dir`)."""

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds. `None` where the request ended before that point."""

    queued: float | None
    """Submit to first step."""
    first_token: float | None
    """Submit to first token."""
    total: float
    """Submit to end."""
    prepared: float | None = None
    """Submit to its grammar and its adapter being there; None if it waited for neither."""


@dataclass(frozen=True, slots=True)
class LogprobEntry:
    """One position's log-probabilities with the tokens' texts and bytes (OpenAI's `logprobs.content` shape)."""

    token_id: int
    token: str
    logprob: float
    bytes: bytes
    top: tuple[LogprobEntry, ...] = ()
    ends: bool = False
    """The token ended the output, and is no part of its text."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One finished call of a tool, as the model wrote it."""

    id: str
    name: str
    arguments: str
    """JSON text of an object; valid against the tool's schema."""
    steered_from: int | None = None
    """Number of characters of the arguments that are the model's own, where the engine closed them; else None."""


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A piece of one call, in OpenAI's streaming shape: `id` and `name` come with the first delta of a call only."""

    index: int
    id: str | None
    name: str | None
    arguments: str
    """The next piece of the arguments' JSON text."""


@dataclass(slots=True, eq=False, repr=False)
class Chunk:
    """One delivery to one stream: everything new since the last one (a slow reader gets merged chunks).

    `index` is the sample (0 unless `n` > 1); `finish_reason` is None on all but a sample's last chunk; `usage` is set
    on the last chunk of the stream; `error` says what went wrong where the reason is "error" or "engine_dead", and
    why where the engine aborted it; `stop` is the stop string that ended the sample, on its last chunk, if one did.
    In a chat `text` is the answer without the `reasoning` before it and the `tool_calls` in it. `steered_from` is
    `Sample.steered_from`, from the chunk on in which the engine began to close the output.
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    index: int = 0
    logprobs: list[LogprobEntry] | None = None
    error: str | None = None
    usage: Usage | None = None
    tool_calls: list[ToolCallDelta] | None = None
    reasoning: str = ""
    stop: str | None = None
    steered_from: int | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the arguments alone: half of the time and bytes of a state by name, and fleets send one per token."""
        return Chunk, (
            self.text, self.token_ids, self.finish_reason, self.index, self.logprobs, self.error, self.usage,
            self.tool_calls, self.reasoning, self.stop, self.steered_from,
        )  # fmt: skip

    def __repr__(self) -> str:
        return f"Chunk({self.text!r}, {self.token_ids}, {self.finish_reason!r}, index={self.index})"


@dataclass(frozen=True, slots=True)
class Sample:
    """One finished sample of a request."""

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    logprobs: list[LogprobEntry] | None = None
    error: str | None = None
    """An error in words, or why the engine aborted it ("the engine was put to sleep or paused"); None: it was not."""
    tool_calls: list[ToolCall] = field(default_factory=list)
    reasoning: str = ""
    schema_error: str | None = None
    """The violation of the schema that a check at the end found, with `unsupported="validate"`."""
    broken_calls: list[ToolCall] = field(default_factory=list)
    """Begun and never finished, with the arguments so far: a stop string, an abort, a deadline or the end of the budget
    came first."""
    stop: str | None = None
    """The stop string that ended the text; None: something else did."""
    steered_from: int | None = None
    """Number of characters of `text` that are the model's own, where the engine closed the output as its budget ended;
    None: all are. What the engine wrote in place of a call or of thoughts is there or nowhere."""
    weight_versions: tuple[tuple[int, int], ...] = ((0, 0),)
    """(version of the weights, number of tokens) of each run of tokens that the same weights gave, in order; one of no
    token where there is none. `update_weights` with mode "recompute" makes several."""

    routed_experts: NDArray[np.integer] | None = field(default=None, compare=False)
    """Experts that each token of prompt and output went to, best first, [positions, layers with experts, experts of a
    token]: uint8, or int16 of more than 256 experts. Positions are those from `routed_experts_start` to the one before
    the last token, which went through no layer yet. None: they were not asked for, or the prompt was not computed."""
    hidden_states: NDArray[np.float32] | None = field(default=None, compare=False)
    """Hidden states of each token of prompt and output, float32 [positions, layers, width], in the order of
    `return_hidden_states`. Positions and None as above, from `hidden_states_start` on."""

    @property
    def weight_version(self) -> int:
        """Version of the weights that gave the last token: 0 until `update_weights` gives another."""
        return self.weight_versions[-1][0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion(Sample):
    """A finished request. What a `Sample` has is that of sample 0."""

    usage: Usage
    timings: Timings
    request_id: str
    prompt_logprobs: list[TokenLogprob | None] | None = None
    """Per prompt position; None at the first."""
    samples: list[Sample] = field(default_factory=list)
    """All samples, `n` of them, sample 0 first."""


@dataclass(frozen=True, slots=True, eq=False)
class Embeddings:
    """Vectors of texts, in the order of the texts."""

    vectors: NDArray[np.float32]
    """[texts, dimensions]"""
    usage: Usage
    truncated: tuple[int, ...] = ()
    """Indices of the texts that were longer than the model takes, and were cut."""


@dataclass(frozen=True, slots=True)
class Ranked:
    """A document with its rank and score."""

    index: int
    """In the list that was given."""
    score: float
    document: str


@dataclass(frozen=True, slots=True)
class Ranking:
    """Documents by how well they answer a query."""

    results: list[Ranked]
    """Best first; equal ones in the order they were given in."""
    usage: Usage
    truncated: tuple[int, ...] = ()
    """Indices of documents that were cut, with the query, to the length the model takes."""


@dataclass(frozen=True, slots=True)
class Classification:
    """A classifier's result for one text."""

    label: str
    """The likeliest."""
    score: float
    scores: dict[str, float]
    """Scores of all labels, in the model's order."""


@dataclass(frozen=True, slots=True)
class Classifications:
    """A classifier's results for texts, in their order."""

    results: list[Classification]
    usage: Usage
    truncated: tuple[int, ...] = ()
    """Indices of texts that were cut."""


@dataclass(frozen=True, slots=True)
class DecisionAnswer:
    """The answer to one question of a decision."""

    type: Literal["noul", "choice", "score"]
    value: float
    """Probability of yes (noul) or of the likeliest option (choice), or the expected level (score)."""
    choice: str
    """The likeliest option; of a score the likeliest level, of a noul "true" or "false"."""
    probabilities: dict[str, float]
    """Option -> its probability; together they make 1."""
    details: dict[str, Any]
    """The answer in the form of transformers' decision pipeline, which defines confidence and score."""

    @property
    def confidence(self) -> float:
        """From 0, where all options are alike, to 1."""
        return float(self.details.get("confidence", abs(2 * self.value - 1)))


@dataclass(frozen=True, slots=True)
class Decision:
    """The answers to all questions of one call."""

    answers: dict[str, DecisionAnswer]
    """Name of a question -> its answer, in the order of the questions."""
    usage: Usage
    """Tokens of the prompts of all questions, and of these the ones that came from the cache."""
    timings: Timings
    request_id: str

    def __getitem__(self, name: str) -> DecisionAnswer:
        return self.answers[name]
