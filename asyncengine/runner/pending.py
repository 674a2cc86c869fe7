"""A launched step: what was asked, and what the device computes for it, until the results are on the host."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from asyncengine.batch import Batch, Row, StepResult, TokenLogprob
from asyncengine.protocols import StepHandle
from asyncengine.runner.logprobs import LogprobTensors, token_logprobs
from asyncengine.runner.masks import FilledMasks, grammar_failed
from asyncengine.runner.sampler import NON_FINITE, Sampled
from asyncengine.runner.transfer import Readback


@dataclass(slots=True, eq=False)
class PendingStep:
    """A `protocols.StepHandle`. Its tensors are host tensors that hold their values once `readback` has arrived."""

    batch: Batch
    readback: Readback
    jump: bool
    """Whether matchers may force tokens."""
    sampling: Sequence[int] = ()
    """Batch index of each sampling row."""
    sampled: Sampled | None = None
    filled: FilledMasks = field(default_factory=FilledMasks.none)
    logprobs: tuple[list[int], LogprobTensors] | None = None
    """Of these places among the sampling rows."""
    steerable: dict[int, torch.Tensor] = field(default_factory=dict)
    """Logits [vocab] of constrained rows that want log-probabilities: their matchers may put in other tokens."""
    prompts: list[tuple[int, torch.Tensor, LogprobTensors]] = field(default_factory=list)
    """(batch index, whether all its logits are finite, log-probabilities) of scored prompt chunks."""
    began: float = field(default_factory=time.perf_counter)

    @property
    def ready(self) -> bool:
        return self.readback.ready

    def wait(self) -> StepResult:
        """Once. Constrained rows tell their matchers what was sampled here: no step in flight knows them."""
        self.readback.wait()
        result = StepResult(self.batch.step, [-1] * len(self.batch.rows))
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
        result.seconds = time.perf_counter() - self.began
        return result

    def _read_tokens(self, sampled: Sampled, result: StepResult) -> None:
        rows = [self.batch.rows[index] for index in self.sampling]
        tokens = sampled.tokens.tolist()
        errors = {**sampled.errors, **self.filled.errors}
        if self.filled.places:
            self._accept(rows, tokens, errors, result)
        for place, token in enumerate(tokens):
            if place in errors:
                result.errors[self.sampling[place]] = errors[place]
            else:
                result.tokens[self.sampling[place]] = token
        if self.logprobs is None:
            return
        places, tensors = self.logprobs
        for place, found in zip(places, tensors.entries(), strict=True):
            if place in errors:
                continue
            entry = found if found.token_id == tokens[place] else self._score(place, tokens[place], len(found.top))
            top = entry.top[: rows[place].spec.params.top_logprobs]
            result.logprobs[self.sampling[place]] = entry._replace(top=top)

    def _score(self, place: int, token: int, num_top: int) -> TokenLogprob:
        """Of a token that was put in the place of the sampled one."""
        return token_logprobs(self.steerable[place][None], torch.tensor([token]), num_top).entries()[0]

    def _accept(self, rows: list[Row], tokens: list[int], errors: dict[int, str], result: StepResult) -> None:
        """Hand constrained rows their sampled tokens; `tokens` gets what they make of them."""
        for place, row in enumerate(rows):
            if row.grammar is None or place in errors:
                continue
            try:
                # the log-probability of a token that was not sampled would be missing: no jumps then
                taken, *forced = row.grammar.accept(tokens[place], self.jump and not row.spec.params.logprobs)
            except Exception as error:  # a foreign matcher may raise anything; it ends its own request only
                errors[place] = grammar_failed(error)
                continue
            tokens[place] = taken
            if forced:
                result.forced[self.sampling[place]] = forced


@dataclass(frozen=True, slots=True)
class SplitStep:
    """A `protocols.StepHandle` of a step that was launched in two parts, one after the other."""

    step: int
    parts: tuple[StepHandle, StepHandle]
    size: int
    """Rows of the first part."""

    @property
    def ready(self) -> bool:
        return all(part.ready for part in self.parts)

    def wait(self) -> StepResult:
        first, second = (part.wait() for part in self.parts)
        joined = StepResult(self.step, [*first.tokens, *second.tokens], seconds=first.seconds + second.seconds)
        for name in ("forced", "logprobs", "prompt_logprobs", "errors"):
            moved = {self.size + index: value for index, value in getattr(second, name).items()}
            getattr(joined, name).update(getattr(first, name) | moved)
        return joined
