"""A launched step: what was asked, and what the device computes for it, until the results are on the host."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch

from asyncengine import step
from asyncengine.execution.device.memory import is_out_of_memory, release_cached
from asyncengine.execution.device.transfer import Readback, upload
from asyncengine.execution.layers.step import Traces
from asyncengine.execution.pooling.pool import Pooler, Span
from asyncengine.execution.sampling.logprobs import LogprobTensors, named_by, num_listed, token_logprobs
from asyncengine.execution.sampling.masks import AwaitedToken, FilledMasks, grammar_failed
from asyncengine.execution.sampling.sampler import (
    AGAIN_FLAG,
    NON_FINITE,
    Sampled,
    Sampler,
    gumbel,
    kept_threshold,
    noise_keys,
)
from asyncengine.request_spec import RequestSpec
from asyncengine.seams import StepHandle

logger = logging.getLogger("asyncengine")

# The tokens that a matcher may take in the place of one that was drawn: its output would not end within its budget.

MOST = 64
"""Tokens that are offered."""


def drawn_again(logits: torch.Tensor, spec: RequestSpec, position: int) -> list[int]:
    """The likeliest tokens, `MOST` at most, in the order in which they are to be tried at `position` of a request: as
    further draws without replacement would give them, behind these the ones that truncation leaves out, likeliest
    first; of a greedy request all likeliest first.

    logits float32 [vocab] as the first token was drawn from them (penalties and the grammar's mask applied), on the
    host. A function of its arguments alone: the random numbers are those of (seed, position, token id).
    """
    params = spec.params
    temperature = 1.0 if params.temperature is None else params.temperature
    found = logits.topk(min(MOST, len(logits)))
    pairs = zip((-found.values).tolist(), found.indices.tolist(), strict=True)
    ids = [token for value, token in sorted(pairs) if value < float("inf")]
    if not temperature or not ids:
        return ids
    scaled = logits[None].float() / temperature
    least = float(scaled.max()) + (float(np.log(params.min_p)) if params.min_p else -float("inf"))
    top_k, top_p = params.top_k or 0, 1.0 if params.top_p is None else params.top_p
    if top_p < 1 or 0 < top_k < len(logits):
        limit = kept_threshold(scaled, np.array([top_k if top_k < len(logits) else 0]), torch.tensor([top_p]))
        least = max(least, float(limit))
    keys = noise_keys(*(np.array([part]) for part in (spec.seed & 0xFFFFFFFF, spec.seed >> 32 & 0xFFFFFFFF, position)))
    where = torch.tensor([ids])
    own = scaled[0, where[0]]
    noisy = own + gumbel(torch.from_numpy(keys), where | AGAIN_FLAG)[0]
    scores = zip(noisy.tolist(), (own >= least).tolist(), strict=True)
    ranks = [(0, -score) if kept else (1, place) for place, (score, kept) in enumerate(scores)]
    return [ids[place] for place in sorted(range(len(ids)), key=ranks.__getitem__)]


@dataclass(slots=True, eq=False)
class PendingStep:
    """A `step.StepHandle`. Its tensors are host tensors that hold their values once `readback` has arrived."""

    batch: step.Batch
    readback: Readback
    jump: bool
    """Whether matchers may force tokens."""
    sampling: Sequence[int] = ()
    """Batch index of the row of each sampled token. A range: each row computed one token and sampled one."""
    places: Sequence[step.Row] = ()
    """These rows, each as one that samples this token alone."""
    sampled: Sampled | None = None
    filled: FilledMasks = field(default_factory=FilledMasks.none)
    logprobs: tuple[list[int], LogprobTensors] | None = None
    """Indices of sampled tokens whose log-probabilities are wanted, and these."""
    steerable: dict[int, torch.Tensor] = field(default_factory=dict)
    """Logits [vocab] at places of constrained rows that want log-probabilities: their matchers may put in other tokens.
    """
    choices: dict[int, torch.Tensor] = field(default_factory=dict)
    """Logits float32 [vocab], as tokens are drawn from them, at places of rows whose matchers may want another token.
    """
    prompts: list[tuple[int, torch.Tensor, LogprobTensors]] = field(default_factory=list)
    """(batch index, whether all its logits are finite, log-probabilities) of scored prompt chunks."""
    pooling: tuple[Pooler, list[Span], torch.Tensor] | None = None
    """The pooler of requests for vectors, with the spans of hidden states that it pools."""
    traces: Traces | None = None
    """Experts and hidden states of the step's tokens; None: no row asks."""
    failed: dict[int, str] = field(default_factory=dict)
    """Row -> why this one request failed before anything of it was computed."""
    awaited: dict[int, AwaitedToken] = field(default_factory=dict)
    """Place among the sampled tokens -> what later rows of the same request wait for."""
    rest: Callable[[], None] | None = None
    """The rest of the step, to be computed on any thread once other processes have computed their part."""
    following: Callable[[], None] | None = None
    """Work on the step after this one that needs this one's tokens: done when they have been read, by whoever does."""
    failure: BaseException | None = None
    """The error of such work on this step."""
    began: float = field(default_factory=time.perf_counter)
    _result: step.StepResult | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def ready(self) -> bool:
        return self.rest is None and self.readback.ready

    def block(self) -> None:
        self.readback.wait()
        if self.pooling is not None or self.rest is not None:  # which takes long: not for the thread of an event loop
            self.wait()

    def wait(self) -> step.StepResult:
        """On any thread, any number of times. Here matchers are told what was sampled, and whoever fills the masks of
        the next step wants that before whoever delivers this one comes for it."""
        with self._lock:
            if self.failure is not None:
                raise self.failure
            if self._result is None:
                try:
                    if self.rest is not None:
                        self.rest()
                finally:
                    self.rest = None
                self.readback.wait()
                self._result = self._read()
                for token in self.awaited.values():
                    token.step = None  # which would keep this step alive as long as its slots
                if self.following is not None:
                    self.following()
                self.following = None
            return self._result

    def then(self, work: Callable[[], None]) -> None:
        """Do `work` once the result has been read: now, or as `following`."""
        with self._lock:
            if self._result is None:
                self.following = work
                return
        work()

    def score(self, places: list[int], logits: torch.Tensor, sampled: Sampled, sampler: Sampler) -> None:
        """Have log-probabilities computed of the tokens at `places` that `sampler` has drawn from `logits`."""
        if not places:
            return
        rows = [self.places[place] for place in places]
        index = upload(np.array(places, dtype=np.int64), logits.device)
        own = sampler.scored_logits(self.places, places, logits, sampled)
        params = [row.spec.params for row in rows]
        width = max(map(num_listed, params))
        found = token_logprobs(own, sampled.tokens[index], width, named_by(params, width, own.device))
        self.logprobs = places, found.fetch(self.readback)
        for number, (place, row) in enumerate(zip(places, rows, strict=True)):
            if row.grammar is not None:
                self.steerable[place] = self.readback.fetch(own[number].clone())

    def keep_choices(self, sampled: Sampled) -> None:
        """Keep the logits from which tokens were drawn, on the device, for matchers that may refuse them."""
        for number, place in enumerate(sampled.processed):
            row = self.places[place]
            if row.grammar is not None and row.grammar.may_refuse(len(row.drafts)):
                assert sampled.changed is not None
                self.choices[place] = self.readback.fetch(sampled.changed[number].clone())

    def score_prompt(self, index: int, logits: torch.Tensor) -> None:
        """The same of the prompt tokens that follow those of the row at `index`."""
        row = self.batch.rows[index]
        finite = torch.isfinite(logits.amax(dim=-1)).all()
        following = row.tokens[step.first_scored(row) :][: logits.shape[0]]
        targets = upload(np.array(following, dtype=np.int64), logits.device)
        found = token_logprobs(logits, targets, row.spec.params.top_logprobs)
        self.prompts.append((index, self.readback.fetch(finite), found.fetch(self.readback)))

    def _read(self) -> step.StepResult:
        result = step.StepResult(self.batch.step, [-1] * len(self.batch.rows))
        if self.sampled is not None:
            self._read_tokens(self.sampled, result)
        for index, finite, scored in self.prompts:
            if index in result.errors:
                continue
            if not bool(finite):
                result.tokens[index] = -1
                result.errors[index] = NON_FINITE
            else:
                result.prompt_logprobs[index] = scored.entries()
        if self.pooling is not None:
            pooler, spans, hidden = self.pooling
            pooler.read(self.batch.rows, spans, hidden, result)
        if self.traces is not None:
            first = 0
            for index, row in enumerate(self.batch.rows):
                if row.spec.params.traced_from is not None:
                    sound = row.num_scheduled - len(row.drafts) + result.accepted.get(index, 0)
                    result.traces[index] = self.traces.of(row.spec.params, first, first + sound).numpy()
                first += row.num_scheduled
        for index, message in self.failed.items():
            result.tokens[index], result.errors[index] = -1, message
        self.readback.release()
        result.seconds = time.perf_counter() - self.began
        return result

    def _read_tokens(self, sampled: Sampled, result: step.StepResult) -> None:
        tokens = sampled.tokens.tolist()
        errors = {**sampled.errors, **self.filled.errors}
        masked = dict.fromkeys(self.filled.places)
        if not (errors or masked or self.logprobs):
            self._read_plain(tokens, result)
            return
        scored: dict[int, step.TokenLogprob] = {}
        if self.logprobs is not None:
            places, tensors = self.logprobs
            scored = dict(zip(places, tensors.entries(), strict=True))
        first = 0
        while first < len(tokens):
            index = self.sampling[first]
            row = self.batch.rows[index]
            beyond = first + 1 + len(row.drafts)
            if first in errors:
                result.errors[index] = errors[first]
            else:
                # behind an error there is nothing: the next step will meet it where the output then ends
                sound = next((place for place in range(first, beyond) if place in errors), beyond)
                if row.grammar is None or first not in masked:
                    produced = _accepted(row.drafts, tokens[first:sound])
                    used = [(first + count, token) for count, token in enumerate(produced)]
                else:
                    produced, used = self._constrained(row, first, tokens[first:sound], index, result)
                if produced:  # else its matcher failed
                    result.put(index, row, produced)
                if scored and used and used[0][0] in scored:
                    result.logprobs[index] = [self._logprob(scored[place], place, token) for place, token in used]
            first = beyond

    def _read_plain(self, tokens: list[int], result: step.StepResult) -> None:
        """The same where nothing but tokens was asked for, and nothing failed."""
        if isinstance(self.sampling, range):  # each row sampled one
            result.tokens = tokens
            return
        first = 0
        while first < len(tokens):
            index = self.sampling[first]
            row = self.batch.rows[index]
            beyond = first + 1 + len(row.drafts)
            result.put(index, row, _accepted(row.drafts, tokens[first:beyond]) if row.drafts else [tokens[first]])
            first = beyond

    def _logprob(self, found: step.TokenLogprob, place: int, token: int) -> step.TokenLogprob:
        entry, params = found, self.places[place].spec.params
        if found.token_id != token:  # it was put in the place of the sampled one
            logits, put = self.steerable[place][None], torch.tensor([token])
            (entry,) = token_logprobs(
                logits, put, len(found.top), named_by([params], len(found.top), put.device)
            ).entries()
        top = entry.top[: num_listed(params)]
        if params.logprobs_of == "sampled":  # what cannot be drawn is no alternative
            top = tuple(each for each in top if each[1] > -math.inf)
        return entry._replace(top=top)

    def _constrained(
        self, row: step.Row, first: int, sampled: Sequence[int], index: int, result: step.StepResult
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """Hand a row's matcher its sampled tokens, as far as the drafts are what it makes of them. Returns the row's
        tokens, and of those that were sampled (place, token); none if the matcher fails."""
        grammar = row.grammar
        assert grammar is not None
        produced: list[int] = []
        used: list[tuple[int, int]] = []
        made = step.ConstrainedToken(False, False, None)
        # the log-probability of a token that was not sampled would be missing, and so would the traces of those that
        # a grammar forces at the end of an output, which are never computed: no jumps then
        jump = self.jump and not (row.spec.params.logprobs or row.spec.params.traced_from is not None)
        while len(produced) < len(sampled) and list(row.drafts[: len(produced)]) == produced:
            place = len(produced)
            here, logits = self.places[first + place], self.choices.get(first + place)
            others = logits is not None and partial(drawn_again, logits, row.spec, here.start + here.num_scheduled)
            try:
                taken, *forced = grammar.accept(sampled[place], jump, others or None)
                made = step.ConstrainedToken(
                    taken != sampled[place], grammar.is_terminated(), grammar.steered_from, made.forced + len(forced)
                )
            except Exception as error:  # a foreign matcher may raise anything; it ends its own request only
                result.errors[index] = grammar_failed(error)
                return [], []
            used.append((first + place, taken))
            produced += [taken, *forced]
            if made.complete:
                break
        result.constrained[index] = made
        self.awaited[first].confirmed = not (made.replaced or made.complete or len(produced) > 1)
        return produced, used


def _accepted(drafts: Sequence[int], sampled: Sequence[int]) -> list[int]:
    """The tokens that stand: each was sampled behind drafts that equal those before it."""
    return list(sampled[: step.num_agreed(drafts, sampled) + 1])


def every_place(batch: step.Batch, sampling: Sequence[int]) -> list[step.Row]:
    """The row of each sampled token, as one that samples this token alone."""
    rows = batch.rows
    if len(set(sampling)) == len(sampling):
        return [rows[index] for index in sampling]
    return [place for index in dict.fromkeys(sampling) for place in step.sampling_places(rows[index])]


# A step that does not fit in memory is launched in parts, one after the other, and its results are put together.

OUT_OF_MEMORY = "the device has not enough memory for this request's step"
_BY_ROW = (
    "further", "accepted", "drafted", "constrained", "logprobs", "prompt_logprobs", "traces", "vectors", "errors",
)  # fmt: skip
"""Fields of a result that are kept by row."""


def launch_in_parts(batch: step.Batch, launch: Callable[[step.Batch], StepHandle], device: torch.device) -> StepHandle:
    """`launch(batch)`; where that runs out of memory, the same of its halves, and of theirs.

    A row that does not fit alone ends with an error. One whose state was to be moved where it lies is `lost`: half the
    layers may have done so. Raises what `launch` raises for any other reason.
    """
    try:
        return launch(batch)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
    release_cached(device)  # not above: the error's traceback would hold what the step had taken
    rows = batch.rows
    if len(rows) == 1:
        return step.FinishedStep(step.StepResult(batch.step, [-1], errors={0: OUT_OF_MEMORY}))
    intact = [index for index, row in enumerate(rows) if not row.moves_state]
    if len(intact) < len(rows):
        logger.warning("step %d does not fit in memory: some of its rows start again", batch.step)
        places: list[Sequence[int]] = [intact] if intact else []
    else:
        logger.warning("step %d does not fit in memory: its %d rows are halved", batch.step, len(rows))
        places = [range(len(rows) // 2), range(len(rows) // 2, len(rows))]
    parts: list[tuple[Sequence[int], StepHandle]] = []
    for part in places:
        own = step.Batch(batch.step, tuple(rows[index] for index in part))
        parts.append((part, launch_in_parts(own, launch, device)))
    return JoinedStep(batch, parts)


@dataclass(frozen=True, slots=True)
class JoinedStep:
    """A `step.StepHandle` of a step that was launched in parts, one after the other."""

    batch: step.Batch
    parts: Sequence[tuple[Sequence[int], StepHandle]]
    """Each part, with the rows of `batch` that it computes. Rows of no part are lost."""

    @property
    def ready(self) -> bool:
        return all(part.ready for _, part in self.parts)

    def block(self) -> None:
        for _, part in self.parts:
            part.block()

    def wait(self) -> step.StepResult:
        whole = step.StepResult(self.batch.step, [-1] * len(self.batch.rows))
        lost = dict.fromkeys(range(len(whole.tokens)))
        for rows, part in self.parts:
            result = part.wait()
            whole.seconds += result.seconds
            for place, index in enumerate(rows):
                whole.tokens[index] = result.tokens[place]
                if place not in result.lost:
                    del lost[index]
            for name in _BY_ROW:
                getattr(whole, name).update({rows[place]: value for place, value in getattr(result, name).items()})
        whole.lost = list(lost)
        return whole
