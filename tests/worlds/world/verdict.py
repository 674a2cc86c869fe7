"""The judgement of one call: were its tokens the model's, and does the plan explain its end?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from worlds.world.calls import Record
from worlds.world.device import allowed_letters
from worlds.world.plan import EOS, VOCABULARY

from asyncengine.engine.validation import sample_seed
from asyncengine.errors import (
    BudgetTooSmall,
    EngineClosed,
    EngineDead,
    GrammarError,
    GrammarTimeout,
    QueueFull,
    RequestFailed,
)
from asyncengine.testing.fake_runner import FakeModel

if TYPE_CHECKING:
    from worlds.world.life import Life


def judge(record: Record, life: Life) -> list[str]:
    """Violations of the contract, in words."""
    call, problems = record.call, list(record.problems)
    if record.error is not None and not _explains_error(record, life):
        problems.append(f"nothing explains {record.error!r}")
    for index, tokens in enumerate(record.tokens):
        reason = record.reasons.get(index)
        if reason is None and not record.left and record.error is None:
            problems.append(f"sample {index} has no end")
        wrong = _wrong_token(record, life, index, tokens)
        if wrong is not None:
            problems.append(f"sample {index}: wrong token at {wrong} of {tokens} ({reason})")
        elif reason is not None and not _explains_end(record, life, tokens, reason):
            problems.append(f"sample {index}: nothing explains {reason!r} after {tokens}")
    said = f"call {call.number} ({call.caller}, {call.style}), {record.submitted} to {record.ended}"
    return [f"{said}: {problem}" for problem in problems]


def _wrong_token(record: Record, life: Life, index: int, tokens: Sequence[int]) -> int | None:
    """The place of the first token that no weights of its time explain."""
    call, device = record.call, life.devices[record.call.engine]
    seed, context = sample_seed(call.params.seed, index), list(call.prompt)
    possible = [sum(moment <= record.submitted for moment, _ in device.updates)]
    versions = [0, *(weights for _, weights in device.updates)]
    for place, token in enumerate(tokens):
        possible = [
            version
            for version in range(possible[0], len(versions))
            if token == _next_token(record, life, versions[version], context, seed, place)
        ]
        if not possible:
            return place
        context.append(token)
    return None


def _next_token(record: Record, life: Life, weights: int, context: Sequence[int], seed: int, place: int) -> int:
    call = record.call
    model = FakeModel(eos_every=life.plan.setups[call.engine].eos_every)
    model.weights = weights
    token = model.next_token(context, seed)
    if call.grammar is None:
        return token
    return min(allowed_letters(call.grammar[0], place), key=lambda allowed: (allowed - token) % VOCABULARY)


def _explains_end(record: Record, life: Life, tokens: Sequence[int], reason: str) -> bool:
    call, config = record.call, life.plan.setups[record.call.engine].config
    complete = call.grammar is not None and len(tokens) == call.grammar[1]
    stopped = bool(tokens) and tokens[-1] in (EOS, *call.params.stop_token_ids)
    match reason:
        case "stop":
            return complete or stopped
        case "length":
            return len(tokens) == call.params.max_tokens and not complete and not stopped
        case "abort":
            return record.aborted or record.left or _closed(record, life)
        case "timeout":
            waited = (record.ended or 0.0) - record.submitted
            limits = config.request_timeout, config.waiting_timeout, config.inter_token_timeout
            return any(limit and waited >= limit - 1e-6 for limit in (*limits, call.options.get("timeout")))
        case "engine_dead":
            return _engine_died(record, life) or _closed(record, life)
        case "error" if record.error is None:  # those who leave do not wait for the error itself
            return record.left and (_failed(record, life) or call.grammar is not None)
        case "error":
            return _explains_error(record, life)
    return False


def _explains_error(record: Record, life: Life) -> bool:
    call = record.call
    _, length, kind = call.grammar or (0, 0, "")
    match record.error:
        case QueueFull():
            return life.plan.setups[call.engine].config.max_queued_requests is not None
        case EngineDead():
            return _engine_died(record, life)
        case EngineClosed():
            return _closed(record, life)
        case BudgetTooSmall():
            return (call.params.max_tokens or 0) < length and call.params.on_budget != "truncate"
        case GrammarTimeout():
            slow = [each for each in life.plan.calls if each.engine == call.engine and "slow" in (each.grammar or ())]
            held = len(slow) >= life.plan.setups[call.engine].config.grammar_workers  # a slow one is not interrupted
            return kind == "slow" or (bool(kind) and (held or life.plan.stalling > 0.0))
        case GrammarError():
            return kind == "broken"
        case RequestFailed():
            return _failed(record, life) or record.aborted
    return False


def _closed(record: Record, life: Life) -> bool:
    return record.ended is not None and record.ended >= life.closing_at


def _engine_died(record: Record, life: Life) -> bool:
    lost = life.plan.closing == "lost" and _closed(record, life)
    return lost or record.call.engine in life.plan.deadly


def _failed(record: Record, life: Life) -> bool:
    return f"call-{record.call.number}" in life.devices[record.call.engine].failed
