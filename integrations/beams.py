"""Beam search: the likeliest outputs of a prompt, found by requests of one token that share what is cached of it.

It is outside of the scheduler, as in vLLM since 0.6. Which outputs are kept follows transformers' `num_beams` with
`early_stopping="never"`: it ends when none that goes on can become one of the best.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Unpack

from asyncengine import RequestKeywords, SamplingParams
from asyncengine.checks import as_integer, as_number

if TYPE_CHECKING:
    from asyncengine import AsyncEngine


@dataclass(frozen=True, slots=True)
class Beam:
    """One of the likeliest outputs."""

    token_ids: tuple[int, ...]
    """Its tokens, the one that ends it included."""
    logprob: float
    """Sum of their log-probabilities."""
    score: float
    """The sum divided by a power of the number of tokens, by which outputs are compared."""
    ended: bool
    """False: it was cut at `max_tokens`."""
    text: str = ""


async def beam_search(
    engine: AsyncEngine, prompt: str | Sequence[int], *, width: int = 4, max_tokens: int = 64,
    length_penalty: float = 1.0, **options: Unpack[RequestKeywords],
) -> list[Beam]:  # fmt: skip
    """The `width` likeliest outputs of `prompt`, the best one first, by the sums of their tokens' log-probabilities
    over their lengths to the power of `length_penalty`; `options` as, and raises as, `AsyncEngine.generate`."""
    stop_ids = engine.info.eos_token_ids
    # each beam may end with any of these ids: so many candidates leave one that goes on
    most = max(2, 1 + len(stop_ids))
    width = as_integer("width", width, 1, engine.core.config.max_top_logprobs // most)
    max_tokens, power = as_integer("max_tokens", max_tokens, 1), as_number("length_penalty", length_penalty, -99, 99)
    ids = engine.tokenize(prompt) if isinstance(prompt, str) else [*prompt]
    params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, logprobs=True, top_logprobs=most * width)
    live, best = [Beam((), 0.0, 0.0, False)], list[Beam]()
    with engine.session() as session:
        for length in range(1, max_tokens + 1):
            requests = (session.generate([*ids, *beam.token_ids], params, **options) for beam in live)
            grown = []
            for beam, answer in zip(live, await asyncio.gather(*requests), strict=True):
                for entry in answer.logprobs[0].top:
                    logprob, ended = beam.logprob + entry.logprob, entry.token_id in stop_ids
                    grown.append(Beam((*beam.token_ids, entry.token_id), logprob, logprob / length**power, ended))
            grown.sort(key=lambda beam: -beam.logprob)
            best += [beam for beam in grown[:width] if beam.ended]
            best = sorted(best, key=lambda beam: -beam.score)[:width]
            live = [beam for beam in grown[: most * width] if not beam.ended][:width]
            # the best score that any live beam can still reach, as in transformers
            hope = live[0].logprob / (max_tokens if power > 0 else length) ** power
            if len(best) == width and hope <= best[-1].score:
                live = []
                break
    chosen = sorted([*best, *live], key=lambda beam: -beam.score)[:width]
    if not engine.info.has_tokenizer:
        return chosen
    return [replace(beam, text=engine.detokenize(beam.token_ids)) for beam in chosen]
