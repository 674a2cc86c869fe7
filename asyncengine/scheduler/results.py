"""Results of steps, applied to their requests: rows that count, tokens that are appended, requests that end.

A result may be older than what has happened since its step was launched: its request may have ended, given way, or been
launched for a token that its grammar did not let stand. Each row says as of which admission it was launched
(`InFlight.epochs`).
"""

from __future__ import annotations

from asyncengine.errors import InvariantViolation
from asyncengine.scheduler.drafts import settle_drafts
from asyncengine.scheduler.output import Output, plain_output, with_counts
from asyncengine.scheduler.request import Request, RequestState
from asyncengine.scheduler.roster import Roster
from asyncengine.scheduler.rows import InFlight, constrained_end, plain_end
from asyncengine.scheduler.states import settle_snapshots
from asyncengine.step import ConstrainedToken, Row, StepResult, TokenLogprob, first_scored


class Results:
    """Applies results to the requests of a roster."""

    def __init__(self, roster: Roster) -> None:
        self._roster = roster

    def apply(self, flown: InFlight, result: StepResult, now: float) -> None:
        """The step `flown` has retired with `result`. The only place where results become facts."""
        roster = self._roster
        batch, requests, epochs = flown[:3]
        if result.step != batch.step:
            raise InvariantViolation(f"result of step {result.step}, but step {batch.step} is the oldest in flight")
        roster.kv.retire(batch.step)  # the step has read and written its pages: they may have new owners
        roster.slots.retire(batch.step)
        if roster.kv.states is not None:
            settle_snapshots(flown, result, roster.kv, roster.publish)
            for index in result.lost:
                self._start_again(batch.rows[index], requests[index], epochs[index])
        roster.counters.steps += 1
        tokens, outputs = result.tokens, roster.outputs
        plain = not (result.errors or result.logprobs or result.prompt_logprobs or result.traces)
        computed = sampled = decoded = 0
        for index, (row, request, epoch) in enumerate(zip(batch.rows, requests, epochs, strict=True)):
            computed += row.num_scheduled
            if request.state is RequestState.FINISHED:
                continue  # it ended while the step ran: its token is dropped
            if batch.step <= request.discard_until:
                continue  # launched for a token that its grammar did not let stand: computed again
            if plain and row.num_scheduled == 1 and row.start >= len(row.spec.prompt) and request.matcher is None:
                # nearly every row: the same as `_apply_row`, in a fraction of its time
                token, spec, known = tokens[index], row.spec, request.tokens
                if row.samples and token not in spec.stop_ids and len(known) + 1 < spec.max_total:
                    if request.epoch == epoch:
                        request.num_computed = row.start + 1
                    request.num_pending -= 1
                    request.last_token_at = now
                    known.append(token)
                    decoded += 1
                    outputs.append(plain_output(spec.ticket, token))
                    continue
            taken, wrong = self._apply_row(row, request, request.epoch == epoch, result, index, now)
            sampled += taken
            computed -= wrong
        roster.counters.passes += decoded
        roster.counters.computed_tokens += computed
        roster.counters.generated_tokens += sampled + decoded

    def _apply_row(
        self, row: Row, request: Request, current: bool, result: StepResult, index: int, now: float
    ) -> tuple[int, int]:
        """Take in what was computed for one row; returns how many tokens that gave, and how many guesses were wrong.

        `current`: the request has not given way since the row was launched.
        """
        roster = self._roster
        if index in result.errors:
            roster.end(request, "error", result.errors[index])
            return 0, 0
        if current:
            request.num_computed = row.start + row.num_scheduled - len(row.drafts)
            if row.num_scheduled > 1 or row.start < len(row.spec.prompt):
                roster.publish(request)
        if index in result.prompt_logprobs:
            entries = (first_scored(row), result.prompt_logprobs[index])
            roster.outputs.append(Output(request.ticket, prompt_logprobs=entries))
        if index in result.traces:
            roster.outputs.append(Output(request.ticket, traces=(row.start, result.traces[index])))
        if not row.samples:
            return 0, 0
        request.num_pending -= 1
        if row.spec.max_total == len(row.spec.prompt):  # asked for no token: for a vector, or a prompt's scores
            if row.spec.pooled is not None:
                roster.end(request, "stop", vector=result.vectors[index])
            else:
                roster.end(request, "length")
            return 0, 0
        roster.counters.passes += 1
        scored = result.logprobs.get(index)
        if request.matcher is None and not row.drafts:
            self._accept(request, result.tokens[index], scored[0] if scored else None, now)
            return 1, 0
        several = (result.tokens[index], *result.further.get(index, ()))
        accepted = settle_drafts(roster.drafts, row, result, index)
        constrained = result.constrained[index] if request.matcher is not None else None
        taken = self._accept_several(request, several, accepted if current else 0, constrained, scored, now)
        return taken, len(row.drafts) - accepted

    def _start_again(self, row: Row, request: Request, epoch: int) -> None:
        """Restart a request whose state was lost in a step without memory; twice without a token in between is an
        error."""
        if request.state is RequestState.FINISHED or (request.epoch != epoch and not row.samples):
            return
        request.discard_launched()
        if request.state is RequestState.RUNNING:
            if request.num_kept == len(request.tokens):
                self._roster.end(request, "error", "the device has not enough memory for this request's steps")
            else:
                self._roster.preempt(request)

    def _accept(
        self, request: Request, token: int, logprob: TokenLogprob | None, now: float,
        constrained: ConstrainedToken | None = None, steered: bool = False,
    ) -> None:  # fmt: skip
        """Append a token of `request`; end the request if that was its last.

        A request preempted meanwhile takes its token all the same: it was sampled from intact pages. `constrained`:
        the outcome of its grammar, if this is the row's last token. `steered`:
        `Output.steered`.
        """
        request.tokens.append(token)
        request.last_token_at = now
        reason, error = plain_end(request, token), None
        if constrained is not None and request.matcher is not None:
            reason, error = constrained_end(request, constrained, reason)
        if reason is None and logprob is None and request.num_output > 1 and not steered:
            self._roster.outputs.append(plain_output(request.spec.ticket, token))
            return
        if reason is not None:
            self._roster.forget(request)
        self._roster.outputs.append(with_counts(request, token, reason, logprob=logprob, error=error, steered=steered))

    def _accept_several(
        self, request: Request, tokens: tuple[int, ...], accepted: int, constrained: ConstrainedToken | None,
        scored: list[TokenLogprob] | None, now: float,
    ) -> int:  # fmt: skip
        """Append the tokens of one row, until one ends the request: drafts that were right, and what its grammar
        forces, which is computed like a chunk in the next step. Returns how many were taken.

        `accepted`: the number of right guesses among them, whose positions are computed already.
        """
        if constrained is not None and request.num_pending and (constrained.replaced or len(tokens) > 1):
            request.discard_launched()
        request.drafts_launched = 0
        self._roster.policy.charge(request, accepted)
        last = len(tokens) - 1
        for index, token in enumerate(tokens):
            if index < accepted:
                request.num_computed += 1
                request.num_launched += 1
            steered = constrained is not None and constrained.steered_from == request.num_output
            outcome = constrained if index == last else None
            self._accept(request, token, scored[index] if scored else None, now, outcome, steered)
            if request.state is RequestState.FINISHED and index < last:  # a stop token id of the caller's
                forced = 0 if constrained is None else max(0, constrained.forced - (last - index))
                self._roster.counters.forced_tokens += forced
                return index + 1
        self._roster.counters.forced_tokens += 0 if constrained is None else constrained.forced
        return len(tokens)
