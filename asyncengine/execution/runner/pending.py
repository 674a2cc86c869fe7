"""A launched step: its batch, and the results that the device computes, until they have been read on the host."""

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
from asyncengine.execution.sampling.sampler import NON_FINITE, Sampled, Sampler, drawn_again
from asyncengine.seams import StepHandle

logger = logging.getLogger("asyncengine")


@dataclass(slots=True, eq=False)
class PendingStep:
    """A `seams.StepHandle`. Its tensors are host tensors that hold their values once `readback` has arrived."""

    batch: step.Batch
    readback: Readback
    jump: bool
    """Whether matchers may force tokens."""
    sampling: Sequence[int] = ()
    """[S] batch index of the row of each sampled token. A range: each row computed one token and sampled one."""
    sample_rows: Sequence[step.Row] = ()
    """[S] row of each sampled token: the batch's row as if it sampled this token alone."""
    sampled: Sampled | None = None
    filled: FilledMasks = field(default_factory=FilledMasks.none)
    logprobs: tuple[list[int], LogprobTensors] | None = None
    """Indices of sampled tokens whose log-probabilities are wanted, and these log-probabilities."""
    steerable: dict[int, torch.Tensor] = field(default_factory=dict)
    """Index of a sampled token -> logits [vocab], for constrained rows that want log-probabilities: their matchers may
    replace the token."""
    choices: dict[int, torch.Tensor] = field(default_factory=dict)
    """Index of a sampled token -> logits float32 [vocab] that it was drawn from, if its matcher may refuse it."""
    prompts: list[tuple[int, torch.Tensor, LogprobTensors]] = field(default_factory=list)
    """(batch index, whether all its logits are finite, log-probabilities) of scored prompt chunks."""
    pooling: tuple[Pooler, list[Span], torch.Tensor] | None = None
    """The pooler of requests for vectors, with the spans of hidden states that it pools."""
    traces: Traces | None = None
    """Experts and hidden states of the step's tokens; None: no row asks for them."""
    failed: dict[int, str] = field(default_factory=dict)
    """Batch index -> why this one request failed before anything of it was computed."""
    awaited: dict[int, AwaitedToken] = field(default_factory=dict)
    """Index of a sampled token -> the note by which later rows of its request wait for the matcher."""
    rest: Callable[[], None] | None = None
    """The rest of the step, to be run on any thread; it waits for the other stages' processes."""
    following: Callable[[], None] | None = None
    """Work on the next step that needs this step's tokens; run by the thread that reads them."""
    failure: BaseException | None = None
    """The error of such work on this step, if it failed."""
    began: float = field(default_factory=time.perf_counter)
    _result: step.StepResult | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def ready(self) -> bool:
        return self.rest is None and self.readback.ready

    def block(self) -> None:
        self.readback.wait()
        if self.pooling is not None or self.rest is not None:  # too long for the event loop, which calls `wait` next
            self.wait()

    def wait(self) -> step.StepResult:
        """The step's result. On any thread, any number of times; the first call tells matchers what was sampled. That
        may be the thread that fills the next step's masks, which needs it before this step is delivered."""
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
                    token.step = None  # the runner keeps the note by slot, and would keep this step's memory with it
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

    def score(self, indices: list[int], logits: torch.Tensor, sampled: Sampled, sampler: Sampler) -> None:
        """Compute log-probabilities of the sampled tokens `indices`, which `sampler` has drawn from `logits`."""
        if not indices:
            return
        params = [self.sample_rows[index].spec.params for index in indices]
        width = max(map(num_listed, params))
        on_device = upload(np.array(indices, dtype=np.int64), logits.device)
        scored = sampler.scored_logits(self.sample_rows, indices, logits, sampled)
        named = named_by(params, width, scored.device)
        self.logprobs = indices, token_logprobs(scored, sampled.tokens[on_device], width, named).fetch(self.readback)
        for number, index in enumerate(indices):
            if self.sample_rows[index].grammar is not None:
                self.steerable[index] = self.readback.fetch(scored[number].clone())

    def keep_choices(self, sampled: Sampled) -> None:
        """Begin to read the logits from which tokens were drawn, for matchers that may refuse the tokens."""
        for number, index in enumerate(sampled.processed):
            row = self.sample_rows[index]
            if row.grammar is not None and row.grammar.may_refuse(len(row.drafts)):
                assert sampled.changed is not None
                self.choices[index] = self.readback.fetch(sampled.changed[number].clone())

    def score_prompt(self, index: int, logits: torch.Tensor) -> None:
        """Compute log-probabilities of the prompt tokens that the row at batch index `index` predicts, from their
        `logits` [tokens, vocab]."""
        row = self.batch.rows[index]
        finite = torch.isfinite(logits.amax(dim=-1)).all()
        following = row.tokens[step.first_scored(row) :][: logits.shape[0]]
        targets = upload(np.array(following, dtype=np.int64), logits.device)
        logprobs = token_logprobs(logits, targets, row.spec.params.top_logprobs)
        self.prompts.append((index, self.readback.fetch(finite), logprobs.fetch(self.readback)))

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
        masked = dict.fromkeys(self.filled.samples)
        if not (errors or masked or self.logprobs):
            self._read_plain(tokens, result)
            return
        scored: dict[int, step.TokenLogprob] = {}
        if self.logprobs is not None:
            indices, tensors = self.logprobs
            scored = dict(zip(indices, tensors.entries(), strict=True))
        first = 0
        while first < len(tokens):
            batch_index = self.sampling[first]
            row = self.batch.rows[batch_index]
            beyond = first + 1 + len(row.drafts)
            if first in errors:
                result.errors[batch_index] = errors[first]
            else:
                # tokens behind one that failed are dropped; the next step computes it again, and reports its error
                sound = next((index for index in range(first, beyond) if index in errors), beyond)
                if row.grammar is None or first not in masked:
                    produced = _accepted(row.drafts, tokens[first:sound])
                    used = [(first + count, token) for count, token in enumerate(produced)]
                else:
                    produced, used = self._constrained(row, first, tokens[first:sound], batch_index, result)
                if produced:  # else its matcher failed
                    result.put(batch_index, row, produced)
                if scored and used and used[0][0] in scored:
                    result.logprobs[batch_index] = [self._logprob(scored[index], index, token) for index, token in used]
            first = beyond

    def _read_plain(self, tokens: list[int], result: step.StepResult) -> None:
        """Read the tokens of a step that has nothing but tokens: no masks, no scores, no errors."""
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

    def _logprob(self, sampled: step.TokenLogprob, index: int, token: int) -> step.TokenLogprob:
        entry, params, width = sampled, self.sample_rows[index].spec.params, len(sampled.top)
        if sampled.token_id != token:  # the matcher has replaced the sampled token
            logits, replacement = self.steerable[index][None], torch.tensor([token])
            named = named_by([params], width, replacement.device)
            (entry,) = token_logprobs(logits, replacement, width, named).entries()
        top = entry.top[: num_listed(params)]
        if params.logprobs_of == "sampled":  # tokens that cannot be drawn are no alternatives
            top = tuple((id_, logprob) for id_, logprob in top if logprob > -math.inf)
        return entry._replace(top=top)

    def _constrained(
        self, row: step.Row, first: int, sampled: Sequence[int], index: int, result: step.StepResult
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """Hand a row's matcher its sampled tokens, as long as its answers equal the drafts. Returns the row's tokens,
        and (index among the sampled tokens, token) of each that stands for a sampled one; none if the matcher fails."""
        grammar = row.grammar
        assert grammar is not None
        produced: list[int] = []
        used: list[tuple[int, int]] = []
        constrained = step.ConstrainedToken(False, False, None)
        # the log-probability of a token that was not sampled would be missing, and so would the traces of those that
        # a grammar forces at the end of an output, which are never computed: no jumps then
        jump = self.jump and not (row.spec.params.logprobs or row.spec.params.traced_from is not None)
        while len(produced) < len(sampled) and list(row.drafts[: len(produced)]) == produced:
            position = len(produced)
            sample_row, logits = self.sample_rows[first + position], self.choices.get(first + position)
            end = sample_row.start + sample_row.num_scheduled
            redraw = None if logits is None else partial(drawn_again, logits, row.spec, end)
            try:
                taken, *forced = grammar.accept(sampled[position], jump, redraw)
                replaced, num_forced = taken != sampled[position], constrained.forced + len(forced)
                constrained = step.ConstrainedToken(replaced, grammar.is_terminated(), grammar.steered_from, num_forced)
            except Exception as error:  # a foreign matcher may raise anything; it ends its own request only
                result.errors[index] = grammar_failed(error)
                return [], []
            used.append((first + position, taken))
            produced += [taken, *forced]
            if constrained.complete:
                break
        result.constrained[index] = constrained
        self.awaited[first].confirmed = not (constrained.replaced or constrained.complete or len(produced) > 1)
        return produced, used


def _accepted(drafts: Sequence[int], sampled: Sequence[int]) -> list[int]:
    """The sampled tokens that are kept: those up to and including the first that differs from its draft."""
    return list(sampled[: step.num_agreed(drafts, sampled) + 1])


def rows_of_samples(batch: step.Batch, sampling: Sequence[int]) -> list[step.Row]:
    """[S] the row of each sampled token: the batch's row as if it sampled this token alone."""
    rows = batch.rows
    if len(set(sampling)) == len(sampling):
        return [rows[index] for index in sampling]
    return [row for index in dict.fromkeys(sampling) for row in step.sampling_places(rows[index])]


# A step that does not fit in memory is launched in halves, one after the other, and their results are merged.

OUT_OF_MEMORY = "the device has not enough memory for this request's step"
_BY_ROW = (
    "further", "accepted", "drafted", "constrained", "logprobs", "prompt_logprobs", "traces", "vectors", "errors",
)  # fmt: skip
"""Fields of a result that are kept by row."""


def launch_split(batch: step.Batch, launch: Callable[[step.Batch], StepHandle], device: torch.device) -> StepHandle:
    """`launch(batch)`; if that runs out of memory, its halves are launched instead, and if need be theirs.

    A row that does not fit alone ends with an error. A row whose recurrent state is advanced in place is `lost`, and
    computed anew: some layers may have advanced theirs before the error. Raises any other exception of `launch`.
    """
    try:
        return launch(batch)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
    release_cached(device)  # not in the handler: the error's traceback still holds the step's tensors there
    rows = batch.rows
    if len(rows) == 1:
        return step.FinishedStep(step.StepResult(batch.step, [-1], errors={0: OUT_OF_MEMORY}))
    intact = [index for index, row in enumerate(rows) if not row.moves_state]
    if len(intact) < len(rows):
        logger.warning("step %d does not fit in memory: some of its rows start again", batch.step)
        ranges: list[Sequence[int]] = [intact] if intact else []
    else:
        logger.warning("step %d does not fit in memory: its %d rows are halved", batch.step, len(rows))
        ranges = [range(len(rows) // 2), range(len(rows) // 2, len(rows))]
    handles: list[tuple[Sequence[int], StepHandle]] = []
    for indices in ranges:
        half = step.Batch(batch.step, tuple(rows[index] for index in indices))
        handles.append((indices, launch_split(half, launch, device)))
    return JoinedStep(batch, handles)


@dataclass(frozen=True, slots=True)
class JoinedStep:
    """A `seams.StepHandle` of a step that was launched in several launches."""

    batch: step.Batch
    handles: Sequence[tuple[Sequence[int], StepHandle]]
    """(batch indices of the rows, handle) of each launch. Rows of none of them are lost."""

    @property
    def ready(self) -> bool:
        return all(handle.ready for _, handle in self.handles)

    def block(self) -> None:
        for _, handle in self.handles:
            handle.block()

    def wait(self) -> step.StepResult:
        whole = step.StepResult(self.batch.step, [-1] * len(self.batch.rows))
        lost = dict.fromkeys(range(len(whole.tokens)))
        for rows, handle in self.handles:
            result = handle.wait()
            whole.seconds += result.seconds
            for position, index in enumerate(rows):
                whole.tokens[index] = result.tokens[position]
                if position not in result.lost:
                    del lost[index]
            for name in _BY_ROW:
                by_row = getattr(result, name).items()
                getattr(whole, name).update({rows[position]: value for position, value in by_row})
        whole.lost = list(lost)
        return whole
