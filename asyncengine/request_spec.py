"""The specification of one sample to generate, checked: the rest of the engine reads all parameters from it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

from asyncengine.images import ImageSpan, without_identity
from asyncengine.options import RequestOptions
from asyncengine.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class Pooled:
    """The pooling of a request that is asked for a vector of its hidden states, and for no token."""

    whole: bool = False
    """Its tokens see those behind them, too: all are computed in one step, and no keys and values are kept."""
    every: bool = False
    """The vector is made of all hidden states, not only of the last one: none may come from the prefix cache."""
    skip: int = 0
    """First positions that are no part of it (a prompt, where the model leaves it out)."""
    second: int = 0
    """Index of the second text's first token, for pairs and models with token types; 0: there is none."""


class Peer(NamedTuple):
    """Another engine, which has more of a request's prefix in its cache than the one that the request goes to."""

    name: str
    url: str
    """The address at which it answers."""
    key: bytes
    """Its public key."""
    pages: int = 0
    """The number of full pages of the prompt, from the first on, that it had a moment ago."""
    planned: bool = False
    """The peer has computed the pages for this request: they are pulled whatever that seems to cost."""


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class RequestSpec:
    """A request's specification: made once, when the request is checked, and never changed or copied again.

    The same object is posted to the engine, held by the scheduler's `Request` and the `Row`s of its steps, and read by
    its output stream and its consumer; compare by identity. Code that needs a parameter or an option
    of the request takes it from here, so that a new one concerns the file that declares it and the file that uses it.

    A request with n samples has n of these, of the same prompt.
    """

    ticket: int
    """Number of the request, never used again: its key everywhere."""
    prompt: tuple[int, ...]
    params: SamplingParams
    """With every `None` resolved except `max_tokens` and `grammar`: temperature, top_p, top_k, repetition_penalty are
    numbers (top_k 0 = all)."""
    max_total: int
    """Prompt plus output tokens, at most; fits the model and the KV cache."""
    options: RequestOptions = field(default_factory=RequestOptions)
    """The caller's options, checked. An adapter is named here; which content that is, `AdapterReady` says."""
    request_id: str = ""
    """The caller's label, or a fresh one."""
    seed: int = 0
    """Resolved, in [0, 2**64): what the sampler's random numbers are a function of, with position and token id."""
    stop_ids: tuple[int, ...] = ()
    """End-of-sequence ids (unless ignore_eos) and stop_token_ids: masked while fewer than `min_tokens` are out."""
    arrival: float = 0.0
    """Clock reading at submit."""
    index: int = 0
    """Index among the samples of its prompt."""
    group: int | None = None
    """Ticket of the first request of its group, if it is one of several."""
    members: int = 1
    """Number of requests in its group: samples of one prompt, or questions about one state."""
    deadline: float | None = None
    """Clock reading at which it ends with reason "timeout"."""
    waiting_deadline: float | None = None
    """The same if it has not started by then."""
    prediction: tuple[int, ...] = ()
    """The caller's guess of the output."""
    inter_token_timeout: float | None = None
    """Seconds between two of its tokens, at most."""
    one_by_one: bool = False
    """No step of it is launched before its last token is known, which some sampling parameter reads."""
    resumed: tuple[int, ...] = ()
    """Output it already has, from an engine that was lost: it goes on behind that, like one that was preempted."""
    resumed_steered: bool = False
    """Not all of that output is the model's own."""
    peer: Peer | None = None
    """An engine that may be asked for its prefix."""
    pooled: Pooled | None = None
    """Asked for a vector: `max_total` is the length of the prompt."""
    images: tuple[ImageSpan, ...] = ()
    """Pictures in the prompt, in order; `prompt` has their ids (`images.ImageSpan.ids`)."""

    @property
    def whole(self) -> bool:
        """All of it in one step, and nothing kept of it."""
        return self.pooled is not None and self.pooled.whole

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        """The prompt as the tokenizer gave it."""
        return without_identity(self.prompt, self.images) if self.images else self.prompt

    @property
    def is_question(self) -> bool:
        """One of several requests with prompts of their own, which are asked as one."""
        return self.members > self.params.n

    @property
    def prompt_len(self) -> int:
        return len(self.prompt)

    @property
    def start_by(self) -> float:
        """Clock reading at which it ends with reason "timeout" unless it has started; infinity: never."""
        return min(math.inf if at is None else at for at in (self.deadline, self.waiting_deadline))
